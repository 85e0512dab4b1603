/* Rung 8: a producer and consumers, and the softmax under the products (Shah et al. 2024, arXiv
 * 2407.08608, sections 3.1 and 3.2).
 *
 * The change: a third warpgroup only starts copies. It runs ahead through a ring of two stages,
 * each with an mbarrier that says full and one that says empty, so no consumer ever waits at a
 * barrier of the block or issues a load; setmaxnreg moves its registers to the consumers, 240 a
 * thread.
 *
 * With registers to spare, a consumer starts S_j = Q K_jᵀ before O += P_{j-1} V_{j-1}, and computes
 * the softmax of S_j while the latter runs: the tensor cores are not idle during it.
 *
 *   start S_0, softmax_0;   for j = 1 …: start S_j, start O += P_{j-1} V_{j-1}, wait for S_j,
 *   softmax_j, wait for O, correct O;   O += P V of the last tile
 *
 * What limits it: both consumers compute their softmax at the same time, and start their products
 * at the same time. At head size 64 two blocks of rung 7 fit a multiprocessor, and one's products run
 * under the other's softmax; of this one, whose consumers take the registers, one block does, and it
 * is slower there.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 498 (73%), HS=64 381 (56%). */
#include "dev/attention/hopper_rungs.cuh"

namespace {

enum { BLOCK = (1 + CONSUMERS) * WARPGROUP };

template <int HS>
__global__ void __launch_bounds__(BLOCK, 1)
    forward_kernel(const __grid_constant__ ForwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    const ForwardPlaces<HS> at = {shared_address(memory)};
    const auto q_ring = at.q_ring();
    const auto k_ring = at.k_ring(), v_ring = at.v_ring();
    const Problem &p = call.p;
    const int i0 = (gridDim.x - 1 - blockIdx.x) * QUERIES; /* longest first */
    const int b = blockIdx.y / p.NH, h = blockIdx.y % p.NH;
    const int tiles = count_tiles(p.causal ? min(p.T, i0 + QUERIES) : p.T, KEYS);
    if (threadIdx.x == 0)
        at.init();
    __syncthreads();

    if (threadIdx.x < WARPGROUP) { /* the producer */
        release_registers<24>();
        if (threadIdx.x > 0)
            return;
        load(at.q_tile(), call.q, q_ring.full(0), i0, h, b);
        for (int j = 0; j < tiles; j++) {
            k_ring.wait_empty(j);
            load(at.k_tile(j), call.k, k_ring.full(j), j * KEYS, h, b);
            v_ring.wait_empty(j);
            load(at.v_tile(j), call.v, v_ring.full(j), j * KEYS, h, b);
        }
    } else {
        acquire_registers<240>();
        const int row0 = threadIdx.x - WARPGROUP; /* 16 rows for each warp of 32 */
        const int group = uniform(row0 / WARPGROUP), warp_i0 = i0 + row0 / 32 * 16;
        const Mask mask = mask_of(p);
        OnlineSoftmax<1> softmax;
        float out[1][HS / 8][4], scores[1][KEYS / 8][4], correction[1][2];
        Fragments<1, KEYS / 16> probabilities;
        clear(out);
        const auto take_scores = [&](int j) {
            pin(scores);
            k_ring.release(j);
            if (mask.cuts(warp_i0, j * KEYS, KEYS))
                mask.apply(scores, warp_i0, j * KEYS);
            softmax_step(softmax, scores, correction, p.scale_log2);
        };

        q_ring.wait_full(0);
        start_scores(scores, at, group, 0);
        wgmma_wait<0>();
        take_scores(0);
        probabilities = pack_fragments(scores);
        for (int j = 1; j < tiles; j++) {
            start_scores(scores, at, group, j);
            start_output(out, probabilities, at, j - 1);
            wgmma_wait<1>(); /* for the scores */
            take_scores(j);
            finish_before_wait(softmax.sum[0][0] + softmax.sum[0][1], at.base);
            wgmma_wait<0>();
            pin(out);
            v_ring.release(j - 1);
            softmax.correct(out, correction);
            probabilities = pack_fragments(scores);
        }
        start_output(out, probabilities, at, tiles - 1);
        wgmma_wait<0>();
        pin(out);
        store_output(out, softmax, p, blockIdx.y, warp_i0);
    }
#endif
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_kernel(forward_kernel<HS>, dim3(count_tiles(p.T, QUERIES), p.B * p.NH), BLOCK,
                  ForwardPlaces<HS>::BYTES, stream, forward_call(p));
}

} // namespace

const Rung forward_08 = {"08_warp_specialisation", NEEDS_WGMMA, NULL, NULL, BY_HEAD_SIZE(launch)};
