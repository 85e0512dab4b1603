/* Rung 5: copies that run beside the products (cp.async, sm_80).
 *
 * The change: shared memory holds two stages of K and V. While the warps multiply one, cp.async
 * fills the other, from global to shared memory without passing through registers. One barrier a
 * tile says both that the tile has arrived and that all warps are done with the one before.
 *
 * What limits it: the B operands still come by 32- and 16-bit loads, V's two elements at a time
 * because its rows are the summed index.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 180 (26%), HS=64 177 (26%). */
#include "attention/mma_mask.cuh"
#include "dev/attention/padded_tile.cuh"
#include "dev/attention/softmax_rows.cuh"

namespace {

enum { THREADS = 128, QUERIES = 64, KEYS = 64 };

template <int HS>
__global__ void __launch_bounds__(THREADS) forward_kernel(const Problem p) {
    if (!HAS_MMA)
        return;
    extern __shared__ __align__(16) unsigned char memory[];
    auto tile = [&](int n) { /* K and V of stage 0, K and V of stage 1 */
        return PaddedTile<HS>{(bf16 *)memory + n * KEYS * PaddedTile<HS>::PITCH};
    };
    const int i0 = (gridDim.x - 1 - blockIdx.x) * QUERIES, bh = blockIdx.y; /* longest first */
    const int warp_i0 = i0 + threadIdx.x / 32 * 16;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const Mask mask = {p.T, p.causal ? 0 : 1 << 30};
    auto load_stage = [&](int j0, int stage) {
        load_rows<KEYS, THREADS, true>(tile(2 * stage), p.k + head, p, j0);
        load_rows<KEYS, THREADS, true>(tile(2 * stage + 1), p.v + head, p, j0);
    };

    load_rows<QUERIES, THREADS, true>(tile(2), p.q + head, p, i0); /* before stage 1 is needed */
    load_stage(0, 0);
    copy_async_wait();
    __syncthreads();
    const auto q = row_fragments(tile(2), warp_i0 - i0);
    OnlineSoftmax<1> softmax;
    float out[1][HS / 8][4], correction[1][2];
    clear(out);

    const int keys = p.causal ? min(p.T, i0 + QUERIES) : p.T;
    for (int j0 = 0, stage = 0; j0 < keys; j0 += KEYS, stage ^= 1) {
        copy_async_wait();
        __syncthreads();
        if (j0 + KEYS < keys)
            load_stage(j0 + KEYS, stage ^ 1);
        float scores[1][KEYS / 8][4];
        clear(scores);
        multiply_transposed(scores, q, tile(2 * stage), 0);
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
                  4 * PaddedTile<HS>::bytes(KEYS), stream, p);
}

} // namespace

const Rung forward_05 = {"05_asynchronous_copies", NEEDS_MMA, NULL, NULL, BY_HEAD_SIZE(launch)};
