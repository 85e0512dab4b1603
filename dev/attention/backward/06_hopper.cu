/* Rung 6: wgmma, TMA and warp specialisation, as in the forward's rungs 7 and 8 (Shah et al. 2024,
 * arXiv 2407.08608).
 *
 * The change: a block owns 128 keys, each of two consumer warpgroups 64 of them; a producer streams
 * Q, dO and the statistics through a ring of two stages. Sᵀ, dPᵀ, Pᵀ dO and dSᵀ Q as before, P and
 * dS in registers. dS also goes to shared memory, an image [key][query] that both warpgroups write
 * and, after a barrier, both read whole for a 64×64 piece of dQ = dS K each: at HS = 128 half the
 * columns of 64 queries, at HS = 64 half of 128 queries. Two images, used in turn, need one barrier
 * a tile. One copy of K, Q and dO serves products along their rows and along their columns.
 *
 * dQ is added to memory by the copy engine (cp.reduce.async.bulk), a piece at a time, in the order
 * that the registers have, which the last pass undoes.
 *
 * What is left to the production file: the next tile's S behind this one's dQ; blocks that stay; a
 * sum that need not be zeroed, because dQ's first part is stored; kernels that start under each other.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 431 (63%), HS=64 366 (53%). */
#include "dev/attention/backward.cuh"
#include "dev/attention/hopper_rungs.cuh"

namespace {

enum { BLOCK = (1 + CONSUMERS) * WARPGROUP };

template <int HS>
__global__ void __launch_bounds__(BLOCK, 1)
    backward_kernel(const __grid_constant__ BackwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int TILE = BackwardPlaces<HS>::TILE;
    extern __shared__ __align__(1024) unsigned char memory[];
    const BackwardPlaces<HS> at = {shared_address(memory)};
    const Ring<1> kv_ring = at.kv_ring();
    const Ring<STAGES> ring = at.ring();
    const Problem &p = call.p;
    const BackwardSpace space(p);
    const int j0 = blockIdx.x * KEYS, b = blockIdx.y / p.NH, h = blockIdx.y % p.NH;
    const int first = p.causal ? j0 : 0, tiles = count_tiles(p.T - first, TILE);
    if (threadIdx.x == 0) {
        kv_ring.init(2, 1), ring.init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        fence_barrier_init();
    }
    __syncthreads();

    if (threadIdx.x < WARPGROUP) { /* the producer */
        release_registers<24>();
        if (threadIdx.x > 0)
            return;
        load(at.k_tile(), call.k, kv_ring.full(0), j0, h, b);
        load(at.v_tile(), call.v, kv_ring.full(0), j0, h, b);
        for (int n = 0; n < tiles; n++) {
            const int i0 = first + n * TILE;
            const size_t row = (size_t)blockIdx.y * space.rows + i0;
            const Barrier full = ring.full(n);
            ring.wait_empty(n);
            full.arrive_expecting(2 * (at.q_tile(n).BYTES + at.ROW_BYTES));
            copy_tile(at.q_tile(n), &call.q, full, i0, h, b);
            copy_tile(at.dout_tile(n), &call.dout, full, i0, h, b);
            copy_bytes(at.lse2(n), space.lse2 + row, at.ROW_BYTES, full);
            copy_bytes(at.delta(n), space.delta + row, at.ROW_BYTES, full);
        }
    } else {
        acquire_registers<240>();
        const int row0 = (threadIdx.x - WARPGROUP) / 32 * 16, group = uniform(row0 / 64);
        const int lane = threadIdx.x % 32;
        const Mask mask = mask_of(p);
        float dk[1][HS / 8][4], dv[1][HS / 8][4];
        clear(dk), clear(dv);
        kv_ring.wait_full(0);
        for (int n = 0; n < tiles; n++) {
            const int i0 = first + n * TILE;
            float s[1][TILE / 8][4], dp[1][TILE / 8][4]; /* transposed: keys are rows */
            ring.wait_full(n);
            wgmma_fence();
            start_product<HS, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(s, at.k_tile(), 64 * group, 0,
                                                                at.q_tile(n), 0, 0, false);
            wgmma_commit();
            start_product<HS, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(dp, at.v_tile(), 64 * group, 0,
                                                                at.dout_tile(n), 0, 0, false);
            wgmma_commit();
            wgmma_wait<1>(); /* for S; the exponentials run beside dP */
            pin(s);
            if (mask.cuts(i0, j0 + row0, 16))
                mask.apply_transposed(s, j0 + row0, i0);
#pragma unroll
            for (int c = 0; c < TILE / 8; c++) {
                const float2 lse2 = load_shared_float2(at.lse2(n) + 8 * (lane % 4) + 32 * c);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[0][c][e] = exp2_approx(
                        fmaf(s[0][c][e], p.scale_log2, -(e % 2 ? lse2.y : lse2.x)));
            }
            const auto probabilities = pack_fragments(s);
            wgmma_fence();
            start_product<K_ALONG_ROWS>(dv, probabilities, at.dout_tile(n), 0, 0, true);
            wgmma_commit();
            wgmma_wait<1>(); /* for dP; dS is computed beside dV */
            pin(dp);
#pragma unroll
            for (int c = 0; c < TILE / 8; c++) {
                const float2 delta = load_shared_float2(at.delta(n) + 8 * (lane % 4) + 32 * c);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[0][c][e] *= dp[0][c][e] - (e % 2 ? delta.y : delta.x);
            }
            const auto ds = pack_fragments(s);
            store_matrices(at.ds_tile(n), 64 * group, ds);
            fence_async();
            barrier_sync(1, CONSUMERS * WARPGROUP);
            float dq[1][8][4];
            wgmma_fence();
            start_product<KEYS, K_ALONG_ROWS, K_ALONG_ROWS>(
                dq, at.ds_tile(n), 0, HS == 64 ? 64 * group : 0, at.k_tile(), 0,
                HS == 64 ? 0 : 64 * group, false);
            wgmma_commit();
            start_product<K_ALONG_ROWS>(dk, ds, at.q_tile(n), 0, 0, true);
            wgmma_commit();
            wgmma_wait<1>(); /* for dV and dQ */
            pin(dq);
            float *sums = space.dq + (size_t)blockIdx.y * space.rows * HS +
                          (i0 / 64 * (HS / 64) + group) * 4096;
            add_piece(sums, at.dq(group), dq, 2 + group);
            wgmma_wait<0>();
            pin(dk), pin(dv);
            ring.release(n);
        }
        const float one[1][2] = {{1, 1}}, scale[1][2] = {{p.scale, p.scale}};
        const size_t head = p.head(b, h);
        store_pairs(dk, scale, p.dk + head, p, j0 + row0);
        store_pairs(dv, one, p.dv + head, p, j0 + row0);
        if (threadIdx.x % WARPGROUP == 0)
            store_wait_read();
    }
#endif
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    const int tile = BackwardPlaces<HS>::TILE;
    const BackwardCall call = {tensor_map(p, p.q, tile), tensor_map(p, p.k, KEYS),
                               tensor_map(p, p.v, KEYS), tensor_map(p, p.dout, tile), p};
    launch_statistics<HS>(p, stream);
    clear_dq<HS>(p, stream);
    launch_kernel(backward_kernel<HS>, dim3(count_tiles(p.T, KEYS), p.B * p.NH), BLOCK,
                  BackwardPlaces<HS>::BYTES, stream, call);
    launch_round_dq<RegisterOrder<HS>, HS>(p, stream);
}

} // namespace

const Rung backward_06 = {"06_hopper", NEEDS_WGMMA, sums_workspace, NULL, BY_HEAD_SIZE(launch)};
