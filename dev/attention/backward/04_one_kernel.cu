/* Rung 4: one kernel and five products (Dao 2023, arXiv 2307.08691, Algorithm 2).
 *
 * The change: the query kernel is gone. A block still owns 64 keys and streams the queries, and
 * computes from the same dS its part of dQ, dS K_j, which it adds to a float array in memory by
 * atomic additions, since the blocks of all keys add to the same rows. A last pass rounds the sums.
 *
 * dS is computed transposed, its rows spread over the warps by keys; for dS K, whose rows are
 * queries, it goes through shared memory, and each warp takes 16 queries and half the columns.
 *
 * The price: dQ's bits depend on the order of the additions, and 4·HS bytes a query are added for
 * every 64 keys. So many small additions cost more than the two products that are saved here;
 * 128 keys a tile and additions to neighbours make them worth it (attention/flash_mma_backward.cu),
 * and rung 6 makes them in bulk.
 *
 * What limits it: loads that are waited for; B operands fetched by 32- and 16-bit loads.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 102 (15%), HS=64 79.3 (12%). */
#include "attention/mma_mask.cuh"
#include "dev/attention/backward.cuh"
#include "dev/attention/padded_tile.cuh"
#include "dev/attention/softmax_rows.cuh"

namespace {

enum { THREADS = 128, KEYS = 64, QUERIES = 32 };

template <int HS>
constexpr size_t SHARED_BYTES =
    (2 * (KEYS + QUERIES) * (HS + 8) + KEYS * (QUERIES + 8)) * sizeof(bf16);

template <int HS>
__global__ void __launch_bounds__(THREADS, 2) backward_kernel(const Problem p) {
    if (!HAS_MMA)
        return;
    extern __shared__ __align__(16) unsigned char memory[];
    const PaddedTile<HS> k_tile = {(bf16 *)memory}, v_tile = {k_tile.base + KEYS * (HS + 8)};
    const PaddedTile<HS> q_tile = {v_tile.base + KEYS * (HS + 8)};
    const PaddedTile<HS> dout_tile = {q_tile.base + QUERIES * (HS + 8)};
    const PaddedTile<QUERIES> ds_tile = {dout_tile.base + QUERIES * (HS + 8)}; /* [key][query] */
    const int j0 = blockIdx.x * KEYS, bh = blockIdx.y, lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, warp_j0 = j0 + 16 * warp;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const BackwardSpace space(p);
    const Mask mask = {p.T, p.causal ? 0 : 1 << 30};
    load_rows<KEYS, THREADS, false>(k_tile, p.k + head, p, j0);
    load_rows<KEYS, THREADS, false>(v_tile, p.v + head, p, j0);
    float dk[1][HS / 8][4], dv[1][HS / 8][4];
    clear(dk), clear(dv);

    for (int i0 = p.causal ? j0 : 0; i0 < p.T; i0 += QUERIES) {
        __syncthreads();
        load_rows<QUERIES, THREADS, false>(q_tile, p.q + head, p, i0);
        load_rows<QUERIES, THREADS, false>(dout_tile, p.dout + head, p, i0);
        __syncthreads();
        float s[1][QUERIES / 8][4], dp[1][QUERIES / 8][4]; /* transposed: keys are rows */
        clear(s), clear(dp);
        multiply_transposed(s, row_fragments(k_tile, 16 * warp), q_tile, 0);
        if (mask.cuts(i0, warp_j0, 16))
            mask.apply_transposed(s, warp_j0, i0);
        multiply_transposed(dp, row_fragments(v_tile, 16 * warp), dout_tile, 0);
        const size_t statistics = (size_t)bh * space.rows + i0 + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const size_t i = statistics + 8 * n + e % 2;
                s[0][n][e] = exp2_approx(fmaf(s[0][n][e], p.scale_log2, -space.lse2[i]));
                dp[0][n][e] = s[0][n][e] * (dp[0][n][e] - space.delta[i]);
            }
        const auto ds = pack_fragments(dp);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                ds_tile.set_pair(16 * warp + 8 * r + lane / 4, 8 * n + 2 * (lane % 4),
                                 ds.x[n / 2][0][n % 2 * 2 + r]);
        multiply(dv, pack_fragments(s), dout_tile, 0, 0);
        multiply(dk, ds, q_tile, 0, 0);
        __syncthreads();

        const int row = warp % 2 * 16, column = warp / 2 * HS / 2;
        float dq[1][HS / 16][4];
        clear(dq);
        multiply(dq, column_fragments<KEYS / 16>(ds_tile, row), k_tile, 0, column);
        float *sums = space.dq + ((size_t)bh * space.rows + i0 + row + lane / 4) * HS + column;
#pragma unroll
        for (int n = 0; n < HS / 16; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                atomicAdd(sums + e / 2 * 8 * HS + 8 * n + 2 * (lane % 4) + e % 2, dq[0][n][e]);
    }
    const float one[1][2] = {{1, 1}}, scale[1][2] = {{p.scale, p.scale}};
    store_pairs(dk, scale, p.dk + head, p, warp_j0);
    store_pairs(dv, one, p.dv + head, p, warp_j0);
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_statistics<HS>(p, stream);
    clear_dq<HS>(p, stream);
    launch_kernel(backward_kernel<HS>, dim3(count_tiles(p.T, KEYS), p.B * p.NH), THREADS,
                  SHARED_BYTES<HS>, stream, p);
    launch_round_dq<RowMajor<HS>, HS>(p, stream);
}

} // namespace

const Rung backward_04 = {"04_one_kernel", NEEDS_MMA, sums_workspace, NULL, BY_HEAD_SIZE(launch)};
