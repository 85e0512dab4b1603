/* Rung 3: tensor cores, blocks that do not depend on each other, D computed once.
 *
 * The change: mma.sync, and two kernels. One owns 64 keys a block and sums dK and dV over the
 * queries, the other owns 64 queries and sums dQ over the keys; every sum has one owner and stays
 * in registers. The price is that S and dP are computed in both: seven products (S, dP, dV, dK; S,
 * dP, dQ) instead of five. The key kernel computes the transposes, Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, whose
 * accumulators are already laid out as the A operands of Pᵀ dO and dSᵀ Q.
 *
 * The statistics come from a kernel before: D, and LSE · log2 e, so that P is one fused
 * multiply-add and one ex2.
 *
 * What limits it: the two products too many, and loads that are waited for.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 122 (18%), HS=64 82.8 (12%). */
#include "attention/mma_mask.cuh"
#include "dev/attention/backward.cuh"
#include "dev/attention/padded_tile.cuh"
#include "dev/attention/softmax_rows.cuh"

namespace {

enum { THREADS = 128, OWNED = 64, STREAMED = 32 /* rows of a tile */ };

template <int HS>
struct Tiles {
    static constexpr size_t BYTES = 2 * (OWNED + STREAMED) * (HS + 8) * sizeof(bf16);
    PaddedTile<HS> owned[2], streamed[2];

    __device__ explicit Tiles(unsigned char *memory) {
        bf16 *place = (bf16 *)memory;
        for (int i = 0; i < 2; i++, place += OWNED * (HS + 8))
            owned[i] = {place};
        for (int i = 0; i < 2; i++, place += STREAMED * (HS + 8))
            streamed[i] = {place};
    }
};

template <int HS>
__global__ void __launch_bounds__(THREADS, 2) key_kernel(const Problem p) {
    if (!HAS_MMA)
        return;
    extern __shared__ __align__(16) unsigned char memory[];
    const Tiles<HS> tiles(memory);
    const PaddedTile<HS> k_tile = tiles.owned[0], v_tile = tiles.owned[1];
    const PaddedTile<HS> q_tile = tiles.streamed[0], dout_tile = tiles.streamed[1];
    const int j0 = blockIdx.x * OWNED, bh = blockIdx.y, lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16, warp_j0 = j0 + warp_row;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const BackwardSpace space(p);
    const Mask mask = {p.T, p.causal ? 0 : 1 << 30};
    load_rows<OWNED, THREADS, false>(k_tile, p.k + head, p, j0);
    load_rows<OWNED, THREADS, false>(v_tile, p.v + head, p, j0);
    float dk[1][HS / 8][4], dv[1][HS / 8][4];
    clear(dk), clear(dv);

    for (int i0 = p.causal ? j0 : 0; i0 < p.T; i0 += STREAMED) {
        __syncthreads();
        load_rows<STREAMED, THREADS, false>(q_tile, p.q + head, p, i0);
        load_rows<STREAMED, THREADS, false>(dout_tile, p.dout + head, p, i0);
        __syncthreads();
        float s[1][STREAMED / 8][4], dp[1][STREAMED / 8][4]; /* transposed: keys are rows */
        clear(s), clear(dp);
        multiply_transposed(s, row_fragments(k_tile, warp_row), q_tile, 0);
        if (mask.cuts(i0, warp_j0, 16))
            mask.apply_transposed(s, warp_j0, i0);
        multiply_transposed(dp, row_fragments(v_tile, warp_row), dout_tile, 0);
        const size_t statistics = (size_t)bh * space.rows + i0 + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < STREAMED / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const size_t i = statistics + 8 * n + e % 2;
                s[0][n][e] = exp2_approx(fmaf(s[0][n][e], p.scale_log2, -space.lse2[i]));
                dp[0][n][e] = s[0][n][e] * (dp[0][n][e] - space.delta[i]);
            }
        multiply(dv, pack_fragments(s), dout_tile, 0, 0);
        multiply(dk, pack_fragments(dp), q_tile, 0, 0);
    }
    const float one[1][2] = {{1, 1}}, scale[1][2] = {{p.scale, p.scale}};
    store_pairs(dk, scale, p.dk + head, p, warp_j0);
    store_pairs(dv, one, p.dv + head, p, warp_j0);
}

template <int HS>
__global__ void __launch_bounds__(THREADS, 2) query_kernel(const Problem p) {
    if (!HAS_MMA)
        return;
    extern __shared__ __align__(16) unsigned char memory[];
    const Tiles<HS> tiles(memory);
    const PaddedTile<HS> q_tile = tiles.owned[0], dout_tile = tiles.owned[1];
    const PaddedTile<HS> k_tile = tiles.streamed[0], v_tile = tiles.streamed[1];
    const int i0 = (gridDim.x - 1 - blockIdx.x) * OWNED, bh = blockIdx.y, lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16, warp_i0 = i0 + warp_row;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const BackwardSpace space(p);
    const Mask mask = {p.T, p.causal ? 0 : 1 << 30};
    load_rows<OWNED, THREADS, false>(q_tile, p.q + head, p, i0);
    load_rows<OWNED, THREADS, false>(dout_tile, p.dout + head, p, i0);
    float dq[1][HS / 8][4];
    clear(dq);

    const size_t statistics = (size_t)bh * space.rows + warp_i0 + lane / 4;
    const int keys = p.causal ? min(p.T, i0 + OWNED) : p.T;
    for (int j0 = 0; j0 < keys; j0 += STREAMED) {
        __syncthreads();
        load_rows<STREAMED, THREADS, false>(k_tile, p.k + head, p, j0);
        load_rows<STREAMED, THREADS, false>(v_tile, p.v + head, p, j0);
        __syncthreads();
        float s[1][STREAMED / 8][4], dp[1][STREAMED / 8][4];
        clear(s), clear(dp);
        multiply_transposed(s, row_fragments(q_tile, warp_row), k_tile, 0);
        if (mask.cuts(warp_i0, j0, STREAMED))
            mask.apply(s, warp_i0, j0);
        multiply_transposed(dp, row_fragments(dout_tile, warp_row), v_tile, 0);
#pragma unroll
        for (int n = 0; n < STREAMED / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const size_t i = statistics + e / 2 * 8;
                s[0][n][e] = exp2_approx(fmaf(s[0][n][e], p.scale_log2, -space.lse2[i])) *
                             (dp[0][n][e] - space.delta[i]);
            }
        multiply(dq, pack_fragments(s), k_tile, 0, 0);
    }
    const float scale[1][2] = {{p.scale, p.scale}};
    store_pairs(dq, scale, p.dq + head, p, warp_i0);
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    const dim3 grid(count_tiles(p.T, OWNED), p.B * p.NH);
    launch_statistics<HS>(p, stream);
    launch_kernel(key_kernel<HS>, grid, THREADS, Tiles<HS>::BYTES, stream, p);
    launch_kernel(query_kernel<HS>, grid, THREADS, Tiles<HS>::BYTES, stream, p);
}

} // namespace

const Rung backward_03 = {"03_tensor_cores", NEEDS_MMA, statistics_workspace, NULL,
                          BY_HEAD_SIZE(launch)};
