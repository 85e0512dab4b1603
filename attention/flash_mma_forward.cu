/* flash_mma, forward: O = dropout(softmax(scale · Q Kᵀ + mask)) V and LSE, in one pass over the
 * keys: Algorithm 1 of Dao 2023 (arXiv 2307.08691).
 *
 *   for each tile of queries (one block), for each tile of keys that the mask leaves:
 *       S = scale · Q Kᵀ + mask,   m' = max(m, rowmax S),   P = exp(S - m')
 *       ℓ' = exp(m - m') ℓ + rowsum P,   O' = exp(m - m') O + (P ∘ Z) V
 *   and at the end O /= ℓ,  LSE = m + log ℓ
 *
 * Accumulators hold Q Kᵀ: scale is applied within the exponentials (mma_softmax.cuh). Of the
 * dropout factors Z, the zeros are applied to P and the common 1/(1-p) together with 1/ℓ.
 *
 * S, P and O never leave registers: a warp owns whole rows, and the accumulator of S is the A
 * operand of P V. Causal tiles beyond the diagonal are skipped, by the block and again by each
 * warp. */
#include "attention/flash_mma.cuh"
#include "attention/mma_softmax.cuh"

namespace {

/* M: 16-row tiles of queries a warp; KEYS: in a tile; HOLD: Q in registers, else read again for
 * every tile; BLOCKS: blocks per multiprocessor that registers must allow. M = 2 keeps shared
 * memory below the tensor cores' time (at D = 64, 1.25 clocks of it an mma against 1.47 on an
 * H200). With dropout, and at D = 128, the register limit puts up to 11 words that a tile uses once
 * (addresses, sums) in local memory; everything else stays in registers. */
template <int M_, int KEYS_, bool HOLD_, int BLOCKS_>
struct ForwardShapeOf {
    static constexpr int M = M_, KEYS = KEYS_, BLOCKS = BLOCKS_;
    static constexpr bool HOLD = HOLD_;
};
template <int D> struct ForwardShape;
template <> struct ForwardShape<32> : ForwardShapeOf<2, 64, false, 3> {};
template <> struct ForwardShape<64> : ForwardShapeOf<2, 128, false, 2> {};
template <> struct ForwardShape<96> : ForwardShapeOf<2, 64, false, 2> {};
template <> struct ForwardShape<128> : ForwardShapeOf<2, 64, false, 2> {};
template <> struct ForwardShape<256> : ForwardShapeOf<1, 32, false, 2> {};

template <int D>
struct ForwardTiles {
    using Shape = ForwardShape<D>;
    static constexpr int M = Shape::M, KEYS = Shape::KEYS, QUERIES = 16 * M * WARPS;
    static constexpr size_t SHARED_BYTES = Tile<D>::bytes(QUERIES) + 2 * Tile<D>::bytes(KEYS);
    static_assert(SHARED_BYTES <= MAX_SHARED_BYTES, "runs on every GPU from sm_80");
};

template <int D, bool DROPOUT>
__global__ void __launch_bounds__(THREADS, ForwardShape<D>::BLOCKS)
    forward_kernel(const FlashProblem p, unsigned tiles, unsigned section) {
    using Tiles = ForwardTiles<D>;
    constexpr int M = Tiles::M, KEYS = Tiles::KEYS, QUERIES = Tiles::QUERIES;
    if (!KERNELS_EXIST)
        return;
    extern __shared__ __align__(128) unsigned char shared[];
    const Tile<D> q_tile = {shared_address(shared)};
    const Tile<D> k_tile = {q_tile.base + QUERIES * Tile<D>::ROW_BYTES};
    const Tile<D> v_tile = {k_tile.base + KEYS * Tile<D>::ROW_BYTES};

    const Place place = find_place(blockIdx.x, tiles, p.B, p.NH, section);
    const int b = place.b, h = place.h, kv = h / (p.NH / p.NKV);
    const int i0 = (tiles - 1 - place.tile) * QUERIES;
    const int keys = keys_seen(p, i0 + QUERIES);

    auto load = [&](Tile<D> tile, const AttentionView &view, int j0) {
        load_rows<KEYS>(tile, p, view, opaque(b), opaque(kv), j0, p.mask.TK);
    };
    load_rows<QUERIES>(q_tile, p, p.q, b, h, i0, p.TQ);
    if (keys > 0)
        load(k_tile, p.k, 0);
    copy_async_wait();
    __syncthreads();

    const int warp_row = threadIdx.x / 32 * 16 * M, warp_i0 = i0 + warp_row;
    const auto q_rows = tile_rows<M, Tiles::Shape::HOLD>(q_tile, warp_row);
    OnlineSoftmax<M, true> softmax;
    float out[M][D / 8][4];
    clear(out);

    for (int j0 = 0; j0 < keys; j0 += KEYS) {
        const bool hidden = p.mask.hides(warp_i0, 16 * M, j0);
        float scores[M][KEYS / 8][4];
        copy_async_wait();
        __syncthreads(); /* K has come, and V is no longer read */
        load(v_tile, p.v, j0);
        if (!hidden) {
            clear(scores);
            multiply_transposed(scores, q_rows, k_tile, 0);
        }
        copy_async_wait();
        __syncthreads(); /* V has come, and K is no longer read */
        if (j0 + KEYS < keys)
            load(k_tile, p.k, j0 + KEYS);
        if (hidden)
            continue;
        if (p.mask.cuts(warp_i0, j0, KEYS))
            p.mask.apply(scores, warp_i0, j0);
        float correction[M][2];
        softmax.raise(scores, correction, p.scale_log2);
        if (softmax.corrects(correction))
            softmax.correct(out, correction);
        softmax.exponentials(scores, p.scale_log2);
        if constexpr (DROPOUT)
            p.dropout.visit<M, KEYS / 8>(b * p.NH + h, warp_i0, j0, [&](int m, int n, int e) {
                scores[m][n][e] = 0.0f;
            });
        multiply(out, pack_fragments(scores), v_tile, 0, 0);
    }

    float factor[M][2], lse[M][2];
    softmax.finish(factor, lse, p.scale_log2);
    float *lse_rows = p.lse + ((size_t)b * p.NH + h) * p.TQ;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = warp_i0 + 16 * m + 8 * r + lane / 4;
            if (lane % 4 == 0 && i < p.TQ)
                lse_rows[i] = lse[m][r];
            if constexpr (DROPOUT)
                factor[m][r] *= p.dropout.scale;
        }
    store_rows(out, factor, q_tile, warp_row, head_rows(p.o, b, h), p.o.token, warp_i0, 0, p.TQ,
               p.HS, p.aligned);
}

struct RunForward {
    const FlashProblem &p;
    cudaStream_t stream;

    template <int D, bool DROPOUT>
    void with() const {
        const unsigned tiles = (unsigned)divide_up(p.TQ, ForwardTiles<D>::QUERIES);
        launch(forward_kernel<D, DROPOUT>, dim3(tiles * p.B * p.NH), ForwardTiles<D>::SHARED_BYTES,
               stream, p, tiles, heads_per_section(&p, p.mask.TK, p.NH));
    }
};

} // namespace

/* Nonzero if the current GPU runs this problem with this family. A negative scale would turn the
 * row maximum of S into its minimum; tile counts must fit a grid and positions an int. */
extern "C" int flash_mma_supported(const Attention *problem) {
    int device, major, shared_bytes;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
            cudaSuccess) {
        cudaGetLastError(); /* no usable GPU is an answer, not an error for the next check */
        return 0;
    }
    const size_t longest = problem->TQ > problem->TK ? problem->TQ : problem->TK;
    const size_t fewest_rows = 16; /* of a block: those of flash_statistics.cu */
    return major >= 8 && shared_bytes >= MAX_SHARED_BYTES && problem->type == TYPE_BF16 &&
           problem->HS >= 1 && problem->HS <= 256 && problem->scale >= 0.0f &&
           longest <= MAX_LENGTH - ROW_PADDING &&
           problem->B * problem->NH <= INT_MAX / (divide_up(longest, ROW_PADDING) * ROW_PADDING) *
                                           fewest_rows;
}

extern "C" size_t flash_mma_forward_workspace(const Attention *problem) {
    (void)problem;
    return 0;
}

extern "C" void flash_mma_forward(const Attention *problem, const AttentionTensors *tensors,
                                  void *workspace, void *stream) {
    (void)workspace;
    const FlashProblem p = describe(problem, tensors);
    dispatch(p.HS, p.dropout.threshold > 0, RunForward{p, (cudaStream_t)stream});
}
