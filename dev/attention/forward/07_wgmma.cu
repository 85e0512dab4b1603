/* Rung 7: Hopper's own products and copies, wgmma and TMA (sm_90a).
 *
 * The change: a warpgroup, 4 warps, multiplies 64×16 by 16×128 with one instruction, which runs
 * beside the program and reads K and V from shared memory by itself; mma.sync can reach 68% of the
 * tensor cores, wgmma all of them. A block is two warpgroups of 64 queries each, on 128 keys at a
 * time. One thread starts the loads: a bulk tensor copy (TMA) brings a whole tile, swizzled as
 * wgmma wants it, fills rows past T with zeros, and counts its bytes at an mbarrier, on which
 * readers wait. The scores' accumulator is still laid out as the A operand of P V, so P stays in
 * registers.
 *
 *   S = Q Kᵀ: both operands' rows lie along K, the summed index.  O += P V: V's rows are K itself.
 *
 * What limits it: the products wait for the softmax and the softmax for the products, and all for
 * the barrier at which a stage is given back.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 447 (65%), HS=64 414 (61%). */
#include "dev/attention/hopper_rungs.cuh"

namespace {

enum { BLOCK = CONSUMERS * WARPGROUP };

template <int HS>
__global__ void __launch_bounds__(BLOCK, 1)
    forward_kernel(const __grid_constant__ ForwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    const ForwardPlaces<HS> at = {shared_address(memory)};
    const Problem &p = call.p;
    const int i0 = (gridDim.x - 1 - blockIdx.x) * QUERIES; /* longest first */
    const int b = blockIdx.y / p.NH, h = blockIdx.y % p.NH;
    const int tiles = count_tiles(p.causal ? min(p.T, i0 + QUERIES) : p.T, KEYS);
    const int group = uniform(threadIdx.x / WARPGROUP), warp_i0 = i0 + threadIdx.x / 32 * 16;
    const Mask mask = mask_of(p);
    const auto load_stage = [&](int j) {
        load(at.k_tile(j), call.k, at.k_ring().full(j), j * KEYS, h, b);
        load(at.v_tile(j), call.v, at.v_ring().full(j), j * KEYS, h, b);
    };

    if (threadIdx.x == 0) {
        at.init();
        load(at.q_tile(), call.q, at.q_ring().full(0), i0, h, b);
        load_stage(0);
    }
    __syncthreads();
    at.q_ring().wait_full(0);

    OnlineSoftmax<1> softmax;
    float out[1][HS / 8][4], scores[1][KEYS / 8][4], correction[1][2];
    Fragments<1, KEYS / 16> probabilities;
    clear(out);
    for (int j = 0; j < tiles; j++) {
        __syncthreads(); /* all are done with the stage that is filled next */
        if (threadIdx.x == 0 && j + 1 < tiles)
            load_stage(j + 1);
        at.k_ring().wait_full(j);
        wgmma_fence();
        start_product<HS, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(scores, at.q_tile(), 64 * group, 0,
                                                            at.k_tile(j), 0, 0, false);
        wgmma_commit();
        wgmma_wait<0>();
        pin(scores);

        if (mask.cuts(warp_i0, j * KEYS, KEYS))
            mask.apply(scores, warp_i0, j * KEYS);
        softmax_step(softmax, scores, correction, p.scale_log2);
        softmax.correct(out, correction);
        probabilities = pack_fragments(scores);

        at.v_ring().wait_full(j);
        wgmma_fence();
        start_product<K_ALONG_ROWS>(out, probabilities, at.v_tile(j), 0, 0, true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(out);
    }
    store_output(out, softmax, p, blockIdx.y, warp_i0);
#endif
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_kernel(forward_kernel<HS>, dim3(count_tiles(p.T, QUERIES), p.B * p.NH), BLOCK,
                  ForwardPlaces<HS>::BYTES, stream, forward_call(p));
}

} // namespace

const Rung forward_07 = {"07_wgmma", NEEDS_WGMMA, NULL, NULL, BY_HEAD_SIZE(launch)};
