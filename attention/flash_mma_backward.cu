/* flash_mma, backward, from O and LSE alone.
 *
 * With S = scale · Q Kᵀ + mask and P = exp(S - LSE) recomputed, Z the dropout factors, 0 or
 * 1/(1-p), and D = rowsum(dO ∘ O),
 *
 *   dP = dO Vᵀ,  dS = scale · P ∘ (Z ∘ dP - D),  dV = (P ∘ Z)ᵀ dO,  dQ = dS K,  dK = dSᵀ Q
 *
 * Accumulators hold Q Kᵀ and dS / scale: scale is applied within the exponential of P, and to dQ
 * and dK once, as they are stored. So is the 1/(1-p) of Z to dV.
 *
 * A first kernel makes D (and LSE · log2 e). dK and dV are summed by tiles of keys, and there are
 * two ways to dQ:
 *
 *   together  Algorithm 2 of Dao 2023 (arXiv 2307.08691): the key kernel makes dQ's part of each of
 *             its tiles as well, 5 matrix products in all, and adds it to a float sum in memory, in
 *             whatever order the blocks come; a last kernel rounds it.
 *   apart     the query kernel sums dQ by tiles of queries. Each sum has one owner, which adds in a
 *             fixed order, so the result is deterministic. The price is that S and dP are computed
 *             twice: 7 products. At D = 256 two blocks share the columns of dK and dV, and S and dP
 *             are computed a third time.
 *
 * The key kernel works on Sᵀ = K Qᵀ and dPᵀ = V dOᵀ: their accumulators are the A operands of Pᵀ dO
 * and dSᵀ Q, so P and dS need not leave the registers, but for dQ, which sums over all keys. */
#include "attention/flash_mma.cuh"
#include "attention/mma_gradient.cuh"

namespace {

enum Gradients { KEYS_ALONE, TOGETHER };

/* dK and dV. M: 16-row tiles of keys a warp; SPLIT: warps that share them, each computing a part of
 * the scores and of the columns of dK and dV; QUERIES: in a stage, multiplied STEP at a time;
 * COLUMNS: of dK and dV per block, since both accumulators of all D = 256 columns would not fit the
 * registers (blockIdx.y counts them); HOLD: K and V in registers. */
template <int M_, int SPLIT_, int QUERIES_, int STEP_, int COLUMNS_, bool HOLD_>
struct KeyShapeOf {
    static constexpr int M = M_, SPLIT = SPLIT_, QUERIES = QUERIES_, STEP = STEP_;
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr bool HOLD = HOLD_;
};
template <Gradients GRADIENTS, int D> struct KeyShape;
template <> struct KeyShape<KEYS_ALONE, 32> : KeyShapeOf<2, 1, 64, 32, 32, true> {};
template <> struct KeyShape<KEYS_ALONE, 64> : KeyShapeOf<2, 1, 64, 32, 64, false> {};
template <> struct KeyShape<KEYS_ALONE, 96> : KeyShapeOf<1, 1, 64, 64, 96, false> {};
template <> struct KeyShape<KEYS_ALONE, 128> : KeyShapeOf<1, 1, 64, 32, 128, false> {};
template <> struct KeyShape<KEYS_ALONE, 256> : KeyShapeOf<1, 1, 16, 16, 128, false> {};
template <> struct KeyShape<TOGETHER, 32> : KeyShapeOf<2, 1, 64, 32, 32, true> {};
template <> struct KeyShape<TOGETHER, 64> : KeyShapeOf<2, 1, 64, 32, 64, false> {};
template <> struct KeyShape<TOGETHER, 128> : KeyShapeOf<2, 2, 64, 32, 128, false> {};

/* Widths that have a shape of their own for dQ as well. */
constexpr bool goes_together(int D) { return D == 32 || D == 64 || D == 128; }

template <Gradients GRADIENTS, int D>
struct KeyTiles {
    using Shape = KeyShape<GRADIENTS, D>;
    static constexpr int M = Shape::M, SPLIT = Shape::SPLIT, QUERIES = Shape::QUERIES;
    static constexpr int KEYS = 16 * M * WARPS, THREADS = SPLIT * ::THREADS;
    static constexpr int COLUMNS = Shape::COLUMNS / SPLIT; /* of dK and dV, a warp's */
    using Scores = Tile<GRADIENTS == TOGETHER ? QUERIES : 64>; /* Pᵀ or dSᵀ */
    static constexpr uint32_t DOUT = Tile<D>::bytes(QUERIES); /* places within a stage */
    static constexpr uint32_t LSE2 = 2 * DOUT, DELTA = LSE2 + QUERIES * sizeof(float);
    static constexpr uint32_t STAGE_BYTES = DELTA + QUERIES * sizeof(float);
    static constexpr uint32_t V = Tile<D>::bytes(KEYS), STAGES = 2 * V; /* places of a block */
    static constexpr uint32_t DS = STAGES + 2 * STAGE_BYTES;
    static constexpr uint32_t P = DS + (GRADIENTS == TOGETHER ? Scores::bytes(KEYS) : 0);
    static constexpr size_t SHARED_BYTES = P + (SPLIT > 1 ? Scores::bytes(KEYS) : 0);
    static_assert(STAGE_BYTES % 128 == 0, "tiles are aligned");
    static_assert(GRADIENTS == TOGETHER || SHARED_BYTES <= MAX_SHARED_BYTES,
                  "runs on every GPU from sm_80");
    static_assert(ROW_PADDING % QUERIES == 0, "statistics are read by whole tiles");
    static_assert(SPLIT == 1 || (GRADIENTS == TOGETHER && QUERIES == SPLIT * Shape::STEP),
                  "warps that share keys exchange P and dS");
};

/* Of the dQ of a stage, a warp sums 32 rows of these columns. Its sum in memory is in the order of
 * the accumulators, so that a warp adds to 32 neighbours at a time. */
template <int D>
struct QueryPart {
    using Tiles = KeyTiles<TOGETHER, D>;
    static constexpr int M = 2, ROWS = 16 * M, ROW_GROUPS = Tiles::QUERIES / ROWS;
    static constexpr int COLUMNS = D * ROW_GROUPS * 32 / Tiles::THREADS, N = COLUMNS / 8;
    int row, column;
    size_t place; /* of this lane's first element, from the start of the sum; then each 32nd */

    __device__ __forceinline__ QueryPart(const FlashProblem &p, int b, int h, int i0) {
        const int warp = threadIdx.x / 32;
        row = warp % ROW_GROUPS * ROWS, column = warp / ROW_GROUPS * COLUMNS;
        place = (((size_t)b * p.NH + h) * p.rows + i0) * D + warp * ROWS * COLUMNS +
                threadIdx.x % 32;
    }
    template <class Visit>
    static __device__ __forceinline__ void visit(float (&dq)[M][N][4], Visit visit) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    visit(dq[m][n][e], 32 * ((m * N + n) * 4 + e));
    }
};

template <Gradients GRADIENTS, int D, bool DROPOUT>
__global__ void __launch_bounds__(KeyTiles<GRADIENTS, D>::THREADS,
                                  KeyTiles<GRADIENTS, D>::SPLIT > 1 ? 1 : 2)
    key_kernel(const FlashProblem p, unsigned tiles, unsigned section, float *dq_sum) {
    using Tiles = KeyTiles<GRADIENTS, D>;
    using Shape = typename Tiles::Shape;
    using Scores = typename Tiles::Scores;
    constexpr int M = Tiles::M, KEYS = Tiles::KEYS, QUERIES = Tiles::QUERIES, STEP = Shape::STEP;
    constexpr int SPLIT = Tiles::SPLIT, THREADS = Tiles::THREADS, COLUMNS = Tiles::COLUMNS;
    if (!KERNELS_EXIST)
        return;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const Tile<D> k_tile = {base}, v_tile = {base + Tiles::V};
    const Scores ds_tile = {base + Tiles::DS}, p_tile = {base + Tiles::P};

    const Place place = find_place(blockIdx.x, tiles, p.B, p.NKV, section);
    const int b = place.b, kv = place.h, j0 = place.tile * KEYS;
    const int group = p.NH / p.NKV;
    /* Queries before this one see no key of the tile. */
    const int first = max(0, j0 - p.mask.diagonal) / QUERIES * QUERIES;

    auto load_stage = [&](int h, int i0, int stage) {
        const uint32_t target = base + Tiles::STAGES + stage * Tiles::STAGE_BYTES;
        load_rows<QUERIES, THREADS>(Tile<D>{target}, p, p.q, b, h, i0, p.TQ);
        load_rows<QUERIES, THREADS>(Tile<D>{target + Tiles::DOUT}, p, p.dout, b, h, i0, p.TQ);
        if (threadIdx.x < QUERIES / 4) {
            const size_t row = ((size_t)b * p.NH + h) * p.rows + i0 + 4 * threadIdx.x;
            copy_async_16(target + Tiles::LSE2 + 16 * threadIdx.x, p.lse2 + row, 16);
            copy_async_16(target + Tiles::DELTA + 16 * threadIdx.x, p.delta + row, 16);
        }
    };
    load_rows<KEYS, THREADS>(k_tile, p, p.k, b, kv, j0, p.mask.TK);
    load_rows<KEYS, THREADS>(v_tile, p, p.v, b, kv, j0, p.mask.TK);
    if (first < p.TQ)
        load_stage(kv * group, first, 0);
    copy_async_wait();
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int split = warp % SPLIT, warp_row = warp / SPLIT * 16 * M;
    const int warp_j0 = j0 + warp_row;
    const int column0 = blockIdx.y * Shape::COLUMNS + split * COLUMNS;
    const auto k_rows = tile_rows<M, Shape::HOLD>(k_tile, warp_row);
    const auto v_rows = tile_rows<M, Shape::HOLD>(v_tile, warp_row);
    float dk[M][COLUMNS / 8][4], dv[M][COLUMNS / 8][4];
    clear(dk);
    clear(dv);

    /* All query tiles of one query head of the group, then of the next. */
    int h = kv * group, i0 = first, stage = 0;
    while (i0 < p.TQ) {
        copy_async_wait();
        __syncthreads();
        int next_h = h, next_i0 = i0 + QUERIES;
        if (next_i0 >= p.TQ && h + 1 < (kv + 1) * group)
            next_h = h + 1, next_i0 = first;
        if (next_i0 < p.TQ)
            load_stage(next_h, next_i0, stage ^ 1);
        const uint32_t loaded = base + Tiles::STAGES + stage * Tiles::STAGE_BYTES;
        const Tile<D> q_tile = {loaded}, dout_tile = {loaded + Tiles::DOUT};

#pragma unroll 1
        for (int step = split * STEP; step < QUERIES; step += SPLIT * STEP) {
            float scores[M][STEP / 8][4], dp[M][STEP / 8][4];
            clear(scores);
            if (p.mask.hides(i0 + step, STEP, warp_j0)) {
                if constexpr (GRADIENTS == TOGETHER)
                    store_fragments(ds_tile, warp_row, step, pack_fragments(scores));
                if constexpr (SPLIT > 1)
                    store_fragments(p_tile, warp_row, step, pack_fragments(scores));
                continue;
            }
            multiply_transposed(scores, k_rows, q_tile, step);
            if (p.mask.cuts(i0 + step, warp_j0, 16 * M))
                p.mask.apply_transposed(scores, warp_j0, i0 + step);
            clear(dp);
            multiply_transposed(dp, v_rows, dout_tile, step);

            const uint32_t statistics = loaded + Tiles::LSE2 + 4 * (step + 2 * (lane % 4));
#pragma unroll
            for (int n = 0; n < STEP / 8; n++)
                scores_to_probabilities(scores, n, load_shared_float2(statistics + 32 * n),
                                        p.scale_log2);
            Fragments<M, STEP / 16> fragments;
            if constexpr (DROPOUT) {
                float kept[M][STEP / 8][4];
                copy(kept, scores);
                p.dropout.visit_transposed<M, STEP / 8>(
                    b * p.NH + h, warp_j0, i0 + step,
                    [&](int m, int n, int e) { kept[m][n][e] = dp[m][n][e] = 0.0f; });
                fragments = pack_fragments(kept);
            } else {
                fragments = pack_fragments(scores);
            }
            if constexpr (SPLIT > 1)
                store_fragments(p_tile, warp_row, step, fragments);
            else
                multiply(dv, fragments, dout_tile, step, column0);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++)
                probabilities_to_gradients<DROPOUT>(
                    scores, dp, n,
                    load_shared_float2(statistics + (Tiles::DELTA - Tiles::LSE2) + 32 * n),
                    p.dropout);
            fragments = pack_fragments(scores);
            if constexpr (GRADIENTS == TOGETHER)
                store_fragments(ds_tile, warp_row, step, fragments);
            if constexpr (SPLIT == 1)
                multiply(dk, fragments, q_tile, step, column0);
        }
        if constexpr (GRADIENTS == TOGETHER) {
            __syncthreads();
            if constexpr (SPLIT > 1) {
                multiply(dv, TileRows<M, QUERIES>(p_tile, warp_row), dout_tile, 0, column0);
                multiply(dk, TileRows<M, QUERIES>(ds_tile, warp_row), q_tile, 0, column0);
            }
            using Part = QueryPart<D>;
            const Part part(p, b, h, i0);
            float dq[Part::M][Part::N][4];
            clear(dq);
            multiply(dq, TileColumns<Part::M, KEYS, QUERIES>(ds_tile, part.row), k_tile, 0,
                     part.column);
            Part::visit(dq, [&](float x, int place) { atomicAdd(dq_sum + part.place + place, x); });
        }
        h = next_h, i0 = next_i0, stage ^= 1;
    }
    if constexpr (GRADIENTS == TOGETHER)
        __syncthreads(); /* K is scratch now */

    float dk_factor[M][2], dv_factor[M][2];
    fill(dk_factor, p.scale);
    fill(dv_factor, DROPOUT ? p.dropout.scale : 1.0f);
    const Tile<D> scratch = {base + split * Tiles::V};
    store_rows(dk, dk_factor, scratch, warp_row, head_rows(p.dk, b, kv), p.dk.token, warp_j0,
               column0, p.mask.TK, p.HS, p.aligned);
    store_rows(dv, dv_factor, scratch, warp_row, head_rows(p.dv, b, kv), p.dv.token, warp_j0,
               column0, p.mask.TK, p.HS, p.aligned);
}

/* dQ = scale · its sum, of as many rows a block as the key kernel has in a stage. */
template <int D>
__global__ void __launch_bounds__(KeyTiles<TOGETHER, D>::THREADS)
    query_sum_kernel(const FlashProblem p, const float *dq_sum) {
    using Part = QueryPart<D>;
    using Scratch = Tile<32>;
    constexpr int QUERIES = KeyTiles<TOGETHER, D>::QUERIES;
    constexpr uint32_t WARP_BYTES = Part::ROWS * Scratch::ROW_BYTES;
    static_assert(Part::COLUMNS <= 32, "a warp's part fits its scratch");
    if (!KERNELS_EXIST)
        return;
    __shared__ __align__(128) unsigned char shared[KeyTiles<TOGETHER, D>::THREADS / 32 * WARP_BYTES];
    const unsigned block = gridDim.x - 1 - blockIdx.x; /* the last sums are still in the L2 */
    const int tiles = p.rows / QUERIES, i0 = block % tiles * QUERIES;
    const int bh = block / tiles, b = bh / p.NH, h = bh % p.NH;
    const Part part(p, b, h, i0);
    float dq[Part::M][Part::N][4], factor[Part::M][2];
    Part::visit(dq, [&](float &x, int place) { x = dq_sum[part.place + place]; });
    fill(factor, p.scale);
    store_rows(dq, factor, Scratch{shared_address(shared) + threadIdx.x / 32 * WARP_BYTES}, 0,
               head_rows(p.dq, b, h), p.dq.token, i0 + part.row, part.column, p.TQ, p.HS,
               p.aligned);
}

/* dQ apart. M: 16-row tiles of queries a warp; KEYS: keys in a stage, multiplied STEP at a time; HOLD: Q
 * and dO in registers. */
template <int M_, int KEYS_, int STEP_, bool HOLD_>
struct QueryShapeOf {
    static constexpr int M = M_, KEYS = KEYS_, STEP = STEP_;
    static constexpr bool HOLD = HOLD_;
};
template <int D> struct QueryShape;
template <> struct QueryShape<32> : QueryShapeOf<2, 64, 32, true> {};
template <> struct QueryShape<64> : QueryShapeOf<2, 64, 32, true> {};
template <> struct QueryShape<96> : QueryShapeOf<2, 32, 32, false> {};
template <> struct QueryShape<128> : QueryShapeOf<2, 32, 32, false> {};
template <> struct QueryShape<256> : QueryShapeOf<1, 16, 16, false> {};

template <int D>
struct QueryTiles {
    using Shape = QueryShape<D>;
    static constexpr int M = Shape::M, KEYS = Shape::KEYS, QUERIES = 16 * M * WARPS;
    static constexpr uint32_t V = Tile<D>::bytes(KEYS), STAGE_BYTES = 2 * V;
    static constexpr size_t SHARED_BYTES = 2 * Tile<D>::bytes(QUERIES) + 2 * STAGE_BYTES;
    static_assert(SHARED_BYTES <= MAX_SHARED_BYTES, "runs on every GPU from sm_80");
    static_assert(ROW_PADDING % QUERIES == 0, "statistics are read by whole tiles");
};

template <int D, bool DROPOUT>
__global__ void __launch_bounds__(THREADS, 2)
    query_kernel(const FlashProblem p, unsigned tiles, unsigned section) {
    using Tiles = QueryTiles<D>;
    using Shape = QueryShape<D>;
    constexpr int M = Tiles::M, KEYS = Tiles::KEYS, QUERIES = Tiles::QUERIES, STEP = Shape::STEP;
    if (!KERNELS_EXIST)
        return;
    extern __shared__ __align__(128) unsigned char shared[];
    const Tile<D> q_tile = {shared_address(shared)};
    const Tile<D> dout_tile = {q_tile.base + QUERIES * Tile<D>::ROW_BYTES};
    const uint32_t stages = dout_tile.base + QUERIES * Tile<D>::ROW_BYTES;

    const Place place = find_place(blockIdx.x, tiles, p.B, p.NH, section);
    const int b = place.b, h = place.h, kv = h / (p.NH / p.NKV);
    const int i0 = (tiles - 1 - place.tile) * QUERIES;
    const int keys = keys_seen(p, i0 + QUERIES);

    auto load_stage = [&](int j0, int stage) {
        const uint32_t base = stages + stage * Tiles::STAGE_BYTES;
        load_rows<KEYS>(Tile<D>{base}, p, p.k, b, kv, j0, p.mask.TK);
        load_rows<KEYS>(Tile<D>{base + Tiles::V}, p, p.v, b, kv, j0, p.mask.TK);
    };
    load_rows<QUERIES>(q_tile, p, p.q, b, h, i0, p.TQ);
    load_rows<QUERIES>(dout_tile, p, p.dout, b, h, i0, p.TQ);
    if (keys > 0)
        load_stage(0, 0);
    copy_async_wait();
    __syncthreads();

    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * M;
    const int warp_i0 = i0 + warp_row;
    const auto q_rows = tile_rows<M, Shape::HOLD>(q_tile, warp_row);
    const auto dout_rows = tile_rows<M, Shape::HOLD>(dout_tile, warp_row);
    float lse2[M][2], delta[M][2];
    const size_t statistics = ((size_t)b * p.NH + h) * p.rows + warp_i0 + lane / 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            lse2[m][r] = p.lse2[statistics + 16 * m + 8 * r];
            delta[m][r] = p.delta[statistics + 16 * m + 8 * r];
        }
    float dq[M][D / 8][4];
    clear(dq);

    for (int stage_j0 = 0, stage = 0; stage_j0 < keys; stage_j0 += KEYS, stage ^= 1) {
        copy_async_wait();
        __syncthreads();
        if (stage_j0 + KEYS < keys)
            load_stage(stage_j0 + KEYS, stage ^ 1);
        const uint32_t base = stages + stage * Tiles::STAGE_BYTES;
        const Tile<D> k_tile = {base}, v_tile = {base + Tiles::V};

#pragma unroll 1
        for (int step = 0; step < KEYS; step += STEP) {
            const int j0 = stage_j0 + step;
            if (p.mask.hides(warp_i0, 16 * M, j0))
                break;
            float scores[M][STEP / 8][4], dp[M][STEP / 8][4];
            clear(scores);
            multiply_transposed(scores, q_rows, k_tile, step);
            if (p.mask.cuts(warp_i0, j0, STEP))
                p.mask.apply(scores, warp_i0, j0);
            clear(dp);
            multiply_transposed(dp, dout_rows, v_tile, step);
            if constexpr (DROPOUT)
                p.dropout.visit<M, STEP / 8>(b * p.NH + h, warp_i0, j0, [&](int m, int n, int e) {
                    dp[m][n][e] = 0.0f;
                });
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        scores[m][n][e] =
                            exp2_approx(fmaf(scores[m][n][e], p.scale_log2, -lse2[m][e / 2])) *
                            score_gradient<DROPOUT>(p.dropout, dp[m][n][e], delta[m][e / 2]);
            multiply(dq, pack_fragments(scores), k_tile, step, 0);
        }
    }

    float factor[M][2];
    fill(factor, p.scale);
    store_rows(dq, factor, q_tile, warp_row, head_rows(p.dq, b, h), p.dq.token, warp_i0, 0, p.TQ,
               p.HS, p.aligned);
}

/* Whether the current GPU is to sum dQ with dK and dV: the order must be free, and the block's
 * tiles fit its shared memory. */
template <int D>
bool together(const Attention *problem) {
    if constexpr (goes_together(D)) {
        int device, shared_bytes;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          device));
        return !problem->deterministic &&
               KeyTiles<TOGETHER, D>::SHARED_BYTES <= (size_t)shared_bytes;
    }
    return false;
}

/* Floats in each of lse2 and delta. */
size_t statistics_count(const Attention *problem) {
    return problem->B * problem->NH * divide_up(problem->TQ, ROW_PADDING) * ROW_PADDING;
}

struct WorkspaceBytes {
    const Attention *problem;
    size_t *bytes;

    template <int D, bool DROPOUT>
    void with() const {
        *bytes = statistics_count(problem) * (2 + (together<D>(problem) ? D : 0)) * sizeof(float);
    }
};

struct RunBackward {
    const Attention *problem;
    const FlashProblem &p;
    float *dq_sum; /* (B·NH·rows,D), each block's part in the order of QueryPart */
    cudaStream_t stream;

    template <int D, bool DROPOUT>
    void with() const {
        if constexpr (goes_together(D))
            if (together<D>(problem)) {
                flash_statistics(p, dq_sum, D, NULL, 0, stream);
                launch_keys<TOGETHER, D, DROPOUT>();
                const unsigned tiles = p.rows / KeyTiles<TOGETHER, D>::QUERIES;
                launch<KeyTiles<TOGETHER, D>::THREADS>(query_sum_kernel<D>,
                                                       dim3(tiles * p.B * p.NH), 0, stream, p,
                                                       (const float *)dq_sum);
                return;
            }
        flash_statistics(p, NULL, 0, NULL, 0, stream);
        launch_keys<KEYS_ALONE, D, DROPOUT>();
        using Queries = QueryTiles<D>;
        const unsigned query_tiles = (unsigned)divide_up(p.TQ, Queries::QUERIES);
        launch(query_kernel<D, DROPOUT>, dim3(query_tiles * p.B * p.NH), Queries::SHARED_BYTES,
               stream, p, query_tiles, heads_per_section(&p, p.mask.TK, p.NH));
    }

    template <Gradients GRADIENTS, int D, bool DROPOUT>
    void launch_keys() const {
        using Keys = KeyTiles<GRADIENTS, D>;
        const unsigned tiles = (unsigned)divide_up(p.mask.TK, Keys::KEYS);
        launch<Keys::THREADS>(key_kernel<GRADIENTS, D, DROPOUT>,
                              dim3(tiles * p.B * p.NKV, D / Keys::Shape::COLUMNS),
                              Keys::SHARED_BYTES, stream, p, tiles,
                              heads_per_section(&p, (size_t)p.TQ * (p.NH / p.NKV), p.NKV), dq_sum);
    }
};

} // namespace

extern "C" size_t flash_mma_backward_workspace(const Attention *problem) {
    size_t bytes = 0;
    dispatch(problem->HS, problem->dropout.probability > 0, WorkspaceBytes{problem, &bytes});
    return bytes;
}

extern "C" void flash_mma_backward(const Attention *problem, const AttentionTensors *tensors,
                                   const AttentionGradients *gradients, void *workspace,
                                   void *stream) {
    FlashProblem p = describe(problem, tensors, gradients);
    const size_t count = statistics_count(problem);
    p.lse2 = (float *)workspace;
    p.delta = p.lse2 + count;
    dispatch(p.HS, p.dropout.threshold > 0,
             RunBackward{problem, p, p.delta + count, (cudaStream_t)stream});
}
