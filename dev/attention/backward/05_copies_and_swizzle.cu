/* Rung 5: asynchronous copies, swizzled tiles and ldmatrix, as in the forward's rungs 5 and 6.
 *
 * The change: Q and dO have two stages, of which cp.async fills one while the other is multiplied;
 * all operands come by ldmatrix from swizzled tiles (attention/mma_tile.cuh), dS too: it is stored
 * as [key][query] pairs, as the accumulator has them, and read transposed.
 *
 * What limits it: one ldmatrix feeds two products, since a warp owns only 16 keys: 32 would not
 * leave room for dK and dV in the registers. So shared memory is the limit, and mma.sync itself.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 144 (21%), HS=64 134 (20%). */
#include "attention/mma_mask.cuh"
#include "attention/mma_tile.cuh"
#include "dev/attention/backward.cuh"
#include "dev/attention/softmax_rows.cuh"

namespace {

enum { THREADS = 128, KEYS = 64, QUERIES = 32 };

template <int HS>
constexpr size_t SHARED_BYTES = (2 * KEYS + 4 * QUERIES) * Tile<HS>::ROW_BYTES +
                                KEYS * Tile<QUERIES>::ROW_BYTES;

template <int HS>
__global__ void __launch_bounds__(THREADS, 2) backward_kernel(const Problem p) {
    if (!HAS_MMA)
        return;
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t row_bytes = Tile<HS>::ROW_BYTES;
    const Tile<HS> k_tile = {shared_address(memory)}, v_tile = {k_tile.base + KEYS * row_bytes};
    const uint32_t stages = v_tile.base + KEYS * row_bytes;
    const Tile<QUERIES> ds_tile = {stages + 4 * QUERIES * row_bytes}; /* [key][query] */
    const int j0 = blockIdx.x * KEYS, bh = blockIdx.y, lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, warp_j0 = j0 + 16 * warp;
    const size_t head = p.head(bh / p.NH, bh % p.NH), stride = p.stride();
    const BackwardSpace space(p);
    const Mask mask = {p.T, p.causal ? 0 : 1 << 30};
    auto tile = [&](int n) { /* Q and dO of stage 0, Q and dO of stage 1 */
        return Tile<HS>{stages + n * QUERIES * row_bytes};
    };
    auto load_stage = [&](int i0, int stage) {
        load_tile<QUERIES, THREADS>(tile(2 * stage), p.q + head, stride, i0, p.T, HS, true);
        load_tile<QUERIES, THREADS>(tile(2 * stage + 1), p.dout + head, stride, i0, p.T, HS, true);
    };

    const int first = p.causal ? j0 : 0;
    load_tile<KEYS, THREADS>(k_tile, p.k + head, stride, j0, p.T, HS, true);
    load_tile<KEYS, THREADS>(v_tile, p.v + head, stride, j0, p.T, HS, true);
    load_stage(first, 0);
    const auto k_rows = tile_rows<1, false>(k_tile, 16 * warp);
    const auto v_rows = tile_rows<1, false>(v_tile, 16 * warp);
    float dk[1][HS / 8][4], dv[1][HS / 8][4];
    clear(dk), clear(dv);

    for (int i0 = first, stage = 0; i0 < p.T; i0 += QUERIES, stage ^= 1) {
        copy_async_wait();
        __syncthreads();
        if (i0 + QUERIES < p.T)
            load_stage(i0 + QUERIES, stage ^ 1);
        const Tile<HS> q_tile = tile(2 * stage), dout_tile = tile(2 * stage + 1);
        float s[1][QUERIES / 8][4], dp[1][QUERIES / 8][4]; /* transposed: keys are rows */
        clear(s), clear(dp);
        multiply_transposed(s, k_rows, q_tile, 0);
        if (mask.cuts(i0, warp_j0, 16))
            mask.apply_transposed(s, warp_j0, i0);
        multiply_transposed(dp, v_rows, dout_tile, 0);
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
                store_shared_4(ds_tile.chunk(16 * warp + 8 * r + lane / 4, n) + 4 * (lane % 4),
                               ds.x[n / 2][0][n % 2 * 2 + r]);
        multiply(dv, pack_fragments(s), dout_tile, 0, 0);
        multiply(dk, ds, q_tile, 0, 0);
        __syncthreads();

        const int row = warp % 2 * 16, column = warp / 2 * HS / 2;
        const uint32_t ds_rows = Tile<QUERIES>::block(ds_tile.lane_columns_first(), 0, row);
        const uint32_t k_columns = Tile<HS>::block(k_tile.lane_rows_first(), 0, column);
        float dq[1][HS / 16][4];
        clear(dq);
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            uint32_t a[4], b[4];
            load_matrices_transposed(a, Tile<QUERIES>::block(ds_rows, k, 0));
#pragma unroll
            for (int n = 0; n < HS / 16; n += 2) {
                load_matrices_transposed(b, Tile<HS>::block(k_columns, k, 8 * n));
                mma_16x8x16(dq[0][n], a, b[0], b[1]);
                mma_16x8x16(dq[0][n + 1], a, b[2], b[3]);
            }
        }
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

const Rung backward_05 = {"05_copies_and_swizzle", NEEDS_MMA, sums_workspace, NULL,
                          BY_HEAD_SIZE(launch)};
