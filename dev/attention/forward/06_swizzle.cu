/* Rung 6: ldmatrix from swizzled tiles, and 32 queries a warp.
 *
 * The change: ldmatrix brings four 8×8 blocks, two B operands, in one instruction, and transposes
 * them on the way for V. It reads 8 rows of 16 bytes at once, which in plain rows of 128·n bytes
 * lie in the same 4 banks; so 16-byte chunk c of row r is stored at place c XOR r%8
 * (attention/mma_tile.cuh), which spreads them over all banks and, unlike padding, costs no memory.
 *
 * At one ldmatrix for two products shared memory would be the limit (4 clocks of it against 2.9 of
 * the tensor cores), so a warp owns 32 queries, and each B operand serves two products. Q no longer
 * fits beside O in the registers and is read again for every tile.
 *
 * This is near attention/flash_mma_forward.cu, which has one tile of K and one of V instead of two
 * stages of both, and corrects O less often.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 316 (46%), HS=64 289 (43%). */
#include "attention/mma_mask.cuh"
#include "attention/mma_tile.cuh"
#include "dev/attention/softmax_rows.cuh"

namespace {

enum { WARPS = 4, THREADS = 32 * WARPS, M = 2, QUERIES = 16 * M * WARPS, KEYS = 64 };

template <int HS>
__global__ void __launch_bounds__(THREADS, 2) forward_kernel(const Problem p) {
    if (!HAS_MMA)
        return;
    extern __shared__ __align__(128) unsigned char memory[];
    const Tile<HS> q_tile = {shared_address(memory)};
    auto tile = [&](int n) { /* K and V of stage 0, K and V of stage 1 */
        return Tile<HS>{q_tile.base + (QUERIES + n * KEYS) * Tile<HS>::ROW_BYTES};
    };
    const int i0 = (gridDim.x - 1 - blockIdx.x) * QUERIES, bh = blockIdx.y; /* longest first */
    const int warp_row = threadIdx.x / 32 * 16 * M, warp_i0 = i0 + warp_row;
    const size_t head = p.head(bh / p.NH, bh % p.NH), stride = p.stride();
    const Mask mask = {p.T, p.causal ? 0 : 1 << 30};
    auto load_stage = [&](int j0, int stage) {
        load_tile<KEYS, THREADS>(tile(2 * stage), p.k + head, stride, j0, p.T, HS, true);
        load_tile<KEYS, THREADS>(tile(2 * stage + 1), p.v + head, stride, j0, p.T, HS, true);
    };

    load_tile<QUERIES, THREADS>(q_tile, p.q + head, stride, i0, p.T, HS, true);
    load_stage(0, 0);
    const auto q_rows = tile_rows<M, false>(q_tile, warp_row);
    OnlineSoftmax<M> softmax;
    float out[M][HS / 8][4], correction[M][2];
    clear(out);

    const int keys = p.causal ? min(p.T, i0 + QUERIES) : p.T;
    for (int j0 = 0, stage = 0; j0 < keys; j0 += KEYS, stage ^= 1) {
        copy_async_wait();
        __syncthreads();
        if (j0 + KEYS < keys)
            load_stage(j0 + KEYS, stage ^ 1);
        if (mask.hides(warp_i0, 16 * M, j0))
            continue;
        float scores[M][KEYS / 8][4];
        clear(scores);
        multiply_transposed(scores, q_rows, tile(2 * stage), 0);
        if (mask.cuts(warp_i0, j0, KEYS))
            mask.apply(scores, warp_i0, j0);
        softmax_step(softmax, scores, correction, p.scale_log2);
        softmax.correct(out, correction);
        multiply(out, pack_fragments(scores), tile(2 * stage + 1), 0, 0);
    }

    store_output(out, softmax, p, bh, warp_i0);
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_kernel(forward_kernel<HS>, dim3(count_tiles(p.T, QUERIES), p.B * p.NH), THREADS,
                  Tile<HS>::bytes(QUERIES) + 4 * Tile<HS>::bytes(KEYS), stream, p);
}

} // namespace

const Rung forward_06 = {"06_swizzle", NEEDS_MMA, NULL, NULL, BY_HEAD_SIZE(launch)};
