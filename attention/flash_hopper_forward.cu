/* flash_hopper, forward: O = dropout(softmax(scale · Q Kᵀ + mask)) V and LSE:
 * flash_mma_forward.cu's recurrence, scheduled as in FlashAttention-3 (Shah et al. 2024, arXiv
 * 2407.08608).
 *
 * In step j a consumer warpgroup starts S_j = Q K_jᵀ and, behind it, O += P_{j-1} V_{j-1}; the
 * second runs under the mask, the maxima and the corrections of S_j, and O is corrected among the
 * exponentials, which leave the multipliers idle. The warpgroups take turns at starting products,
 * so that one's softmax lies under the others' products. */
#include <cudaTypedefs.h>

#include "attention/flash_hopper.cuh"
#include "attention/mma_softmax.cuh"

namespace {

/* CONSUMERS: warpgroups, of 64 queries each: as many as the registers allow, of which setmaxnreg
 * moves some from the producer to the consumers. Two at D = 64 are 5 to 15% slower. HOLD: Q in
 * registers, read once for all tiles of keys; at D = 128 it is 2% faster. */
template <int D>
struct ForwardTiles {
    static constexpr int CONSUMERS = D == 64 ? 3 : 2, KEYS = 128, STAGES = 2;
    static constexpr int QUERIES = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
    static constexpr bool HOLD = D == 128, LAZY = D == 128;
    static constexpr int REGISTERS = CONSUMERS == 3 ? 160 : 240;
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
    using Queries = Blocks<64, D>;
    using Keys = Blocks<KEYS, D>;
    /* Places in shared memory. */
    static constexpr uint32_t K = CONSUMERS * Queries::BYTES;
    static constexpr uint32_t V = K + STAGES * Keys::BYTES;
    static constexpr uint32_t OUT = V + STAGES * Keys::BYTES;
    static constexpr uint32_t Q_RING = OUT + CONSUMERS * Queries::BYTES;
    static constexpr uint32_t K_RING = Q_RING + Ring<1>::BYTES;
    static constexpr uint32_t V_RING = K_RING + Ring<STAGES>::BYTES;
    static constexpr uint32_t ITEMS = V_RING + Ring<STAGES>::BYTES;
    static constexpr size_t SHARED_BYTES = ITEMS + Items::BYTES;
    static_assert(SHARED_BYTES <= 227 << 10, "of a block on sm_90");
};

struct ForwardCall {
    CUtensorMap q, k, v, o;
    FlashProblem p;
    unsigned tiles, items, section;
    unsigned *next;
};

/* The counter of items starts at 0. */
__global__ void reset_kernel(unsigned *next) {
    if (!HOPPER_KERNELS_EXIST)
        return;
    allow_next_kernel();
    *next = 0;
}

template <int D, bool DROPOUT>
__global__ void __launch_bounds__(ForwardTiles<D>::THREADS, 1)
    forward_kernel(const __grid_constant__ ForwardCall call) {
    if (!HOPPER_KERNELS_EXIST)
        return;
    using Tiles = ForwardTiles<D>;
    constexpr int KEYS = Tiles::KEYS, CONSUMERS = Tiles::CONSUMERS, STAGES = Tiles::STAGES;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const Ring<1> q_ring = {base + Tiles::Q_RING};
    const Ring<STAGES> k_ring = {base + Tiles::K_RING}, v_ring = {base + Tiles::V_RING};
    const Items items = {{base + Tiles::ITEMS}, base + Tiles::ITEMS + Ring<2>::BYTES};
    const FlashProblem &p = call.p;

    if (threadIdx.x == 0) {
        q_ring.init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        k_ring.init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        v_ring.init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        items.init(WARPGROUP * CONSUMERS);
        fence_barrier_init();
    }
    __syncthreads();

    /* Of an item: its queries, and the number of tiles of keys that any of them sees. */
    struct Work {
        int b, h, i0, tiles;
    };
    const auto key_tiles = [&](int end) { return (keys_seen(p, end) + KEYS - 1) / KEYS; };
    const auto work_of = [&](unsigned item) {
        const Place place = find_place(item, call.tiles, p.B, p.NH, call.section);
        const int i0 = (int)(call.tiles - 1 - place.tile) * Tiles::QUERIES;
        return Work{place.b, place.h, i0, key_tiles(i0 + Tiles::QUERIES)};
    };

    if (threadIdx.x < WARPGROUP) {
        release_registers<Tiles::PRODUCER_REGISTERS>();
        if (threadIdx.x != 0)
            return;
        prefetch_map(&call.q);
        prefetch_map(&call.k);
        prefetch_map(&call.v);
        prefetch_map(&call.o);
        unsigned loaded = 0, item = blockIdx.x;
        wait_for_last_kernel(); /* whose counter this thread alone reads */
        for (unsigned use = 0;; use++) {
            items.publish(use, item);
            if (item >= call.items)
                break;
            const int ticket = atomicAdd(call.next, 1); /* long on its way: used at the end */
            const Work work = work_of(item);
            const int kv = work.h / (p.NH / p.NKV);
            q_ring.wait_empty(use);
            q_ring.full(use).arrive_expecting(CONSUMERS * Tiles::Queries::BYTES);
            for (int w = 0; w < CONSUMERS; w++)
                copy_tile(typename Tiles::Queries{base + w * Tiles::Queries::BYTES}, &call.q,
                          q_ring.full(use), work.i0 + 64 * w, work.h, work.b);
#pragma unroll 1
            for (int j = 0; j < work.tiles; j++, loaded++) {
                const uint32_t stage = base + loaded % STAGES * Tiles::Keys::BYTES;
                k_ring.wait_empty(loaded);
                k_ring.full(loaded).arrive_expecting(Tiles::Keys::BYTES);
                copy_tile(typename Tiles::Keys{stage + Tiles::K}, &call.k, k_ring.full(loaded),
                          j * KEYS, kv, work.b);
                v_ring.wait_empty(loaded);
                v_ring.full(loaded).arrive_expecting(Tiles::Keys::BYTES);
                copy_tile(typename Tiles::Keys{stage + Tiles::V}, &call.v, v_ring.full(loaded),
                          j * KEYS, kv, work.b);
            }
            item = gridDim.x + opaque(ticket);
        }
    } else {
        acquire_registers<Tiles::REGISTERS>();
        const int group = uniform(threadIdx.x / WARPGROUP) - 1, lane = threadIdx.x % 32;
        const int row0 = 64 * group + threadIdx.x % WARPGROUP / 32 * 16; /* of this warp */
        /* Named barriers; 0 is __syncthreads'. A turn's is waited for by its warpgroup and arrived
         * at by the one before. */
        const int my_turn = 1 + group, next_turn = 1 + (group + 1) % CONSUMERS;
        const int own_barrier = 1 + CONSUMERS + group;
        const bool leader = threadIdx.x % WARPGROUP == 0;
        const typename Tiles::Queries q_tile = {base + group * Tiles::Queries::BYTES};
        const typename Tiles::Queries out_tile = {q_tile.base + Tiles::OUT};
        const auto stage_of = [&](unsigned use, uint32_t tensor) {
            return typename Tiles::Keys{base + tensor + use % STAGES * Tiles::Keys::BYTES};
        };
        if (group == CONSUMERS - 1) /* the first turn is the first warpgroup's */
            barrier_arrive(next_turn, 2 * WARPGROUP);

        unsigned used = 0, item;
        for (unsigned use = 0; (item = uniform(items.take(use))) < call.items; use++) {
            const Work work = work_of(item);
            const int i0 = work.i0 + row0, bh = work.b * p.NH + work.h;
            const int own_i0 = work.i0 + 64 * group;
            const int own_keys = own_i0 < p.TQ ? keys_seen(p, own_i0 + 64) : 0;
            const int own_tiles = (own_keys + KEYS - 1) / KEYS;

            OnlineSoftmax<1, Tiles::LAZY> softmax;
            float out[1][D / 8][4], correction[1][2];
            clear(out);
            q_ring.wait_full(use);
            if (own_tiles == 0) {
                q_ring.release(use);
            } else {
                float scores[1][KEYS / 8][4];
                Fragments<1, KEYS / 16> probabilities;
                const auto raise = [&](auto &scores, int j0) {
                    constexpr int N = sizeof(scores[0]) / sizeof(scores[0][0]);
                    if (p.mask.cuts(i0, j0, 8 * N))
                        p.mask.apply(scores, i0, j0);
                    softmax.raise(scores, correction, p.scale_log2);
                };
                const auto finish_probabilities = [&](auto &scores, int j0) {
                    constexpr int N = sizeof(scores[0]) / sizeof(scores[0][0]);
                    softmax.exponentials(scores, p.scale_log2);
                    if constexpr (DROPOUT)
                        p.dropout.visit<1, N>(bh, i0, j0, [&](int m, int n, int e) {
                            scores[m][n][e] = 0.0f;
                        });
                    first_steps<N / 2>(probabilities) = pack_fragments(scores);
                };
                Fragments<1, D / 16> q;
                if constexpr (Tiles::HOLD) {
                    q = load_operand(q_tile, 0);
                    q_ring.release(use);
                }
                const auto start_scores = [&](auto &scores, unsigned stage) {
                    const typename Tiles::Keys k_tile = stage_of(stage, Tiles::K);
                    if constexpr (Tiles::HOLD)
                        start_product<K_ALONG_COLUMNS>(scores, q, k_tile, 0, 0, false);
                    else
                        start_product<D, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(scores, q_tile, 0, 0,
                                                                           k_tile, 0, 0, false);
                    wgmma_commit();
                };
                const auto start_output = [&](const auto &probabilities, unsigned stage) {
                    v_ring.wait_full(stage);
                    start_product<K_ALONG_ROWS>(out, probabilities, stage_of(stage, Tiles::V), 0,
                                                0, true);
                    wgmma_commit();
                };
                /* The first S and the last P V of an item are alone, outside the turns. */
                const auto first_tile = [&](auto &scores) {
                    wgmma_fence();
                    start_scores(scores, used);
                    wgmma_wait<0>();
                    pin(scores);
                    k_ring.release(used);
                    if (!Tiles::HOLD && own_tiles == 1)
                        q_ring.release(use);
                    raise(scores, 0);
                    finish_probabilities(scores, 0);
                };
                const auto next_tile = [&](auto &scores, int j) {
                    wgmma_fence();
                    start_scores(scores, used + 1);
                    start_output(probabilities, used);
                    barrier_arrive(next_turn, 2 * WARPGROUP);
                    wgmma_wait<1>();
                    pin(scores);
                    k_ring.release(used + 1);
                    if (!Tiles::HOLD && j == own_tiles - 1)
                        q_ring.release(use);
                    raise(scores, j * KEYS);
                    finish_before_wait(correction[0][0] + correction[0][1], base);
                    wgmma_wait<0>();
                    pin(out);
                    v_ring.release(used++);
                    if (softmax.corrects(correction))
                        softmax.correct(out, correction);
                    finish_probabilities(scores, j * KEYS);
                };
                const auto last_output = [&](const auto &probabilities) {
                    wgmma_fence();
                    start_output(probabilities, used);
                    wgmma_wait<0>();
                    pin(out);
                    v_ring.release(used++);
                };
                /* The diagonal leaves one half of every other last tile. */
                const bool half = !DROPOUT && own_keys <= own_tiles * KEYS - KEYS / 2;
                auto &half_scores = first_columns<KEYS / 2>(scores);
                k_ring.wait_full(used);
                first_tile(scores);
                int j = 1;
                for (; j < own_tiles - half; j++) {
                    k_ring.wait_full(used + 1);
                    barrier_sync(my_turn, 2 * WARPGROUP);
                    next_tile(scores, j);
                }
                if (half) {
                    if (own_tiles > 1) {
                        k_ring.wait_full(used + 1);
                        barrier_sync(my_turn, 2 * WARPGROUP);
                        next_tile(half_scores, j);
                    }
                    last_output(first_steps<KEYS / 32>(probabilities));
                } else {
                    last_output(probabilities);
                }
            }
            /* Tiles that only other warpgroups see. */
            for (int j = own_tiles; j < work.tiles; j++, used++) {
                if (j > 0) {
                    barrier_sync(my_turn, 2 * WARPGROUP);
                    barrier_arrive(next_turn, 2 * WARPGROUP);
                }
                k_ring.wait_full(used);
                k_ring.release(used);
                v_ring.wait_full(used);
                v_ring.release(used);
            }

            float factor[1][2], lse[1][2];
            softmax.finish(factor, lse, p.scale_log2);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int i = i0 + 8 * r + lane / 4;
                if (lane % 4 == 0 && i < p.TQ)
                    p.lse[(size_t)bh * p.TQ + i] = lse[0][r];
                if constexpr (DROPOUT)
                    factor[0][r] *= p.dropout.scale;
            }
            softmax.correct(out, factor);
            if (leader)
                store_wait_read();
            barrier_sync(own_barrier, WARPGROUP);
            store_matrices(out_tile, 0, pack_fragments(out));
            fence_async();
            barrier_sync(own_barrier, WARPGROUP);
            if (leader)
                store_tile(out_tile, &call.o, own_i0, work.h, work.b);
        }
        if (group == 0) /* and the last, which nobody took */
            barrier_sync(my_turn, 2 * WARPGROUP);
        if (leader)
            store_wait_read();
    }
}

struct RunForward {
    const Attention *problem;
    const AttentionTensors *tensors;
    unsigned *next;
    cudaStream_t stream;

    template <int D>
    void with() const {
        using Tiles = ForwardTiles<D>;
        ForwardCall call = {};
        call.p = describe(problem, tensors);
        const FlashProblem &p = call.p;
        const size_t B = p.B, NH = p.NH, NKV = p.NKV, TQ = p.TQ, TK = p.mask.TK, HS = p.HS;
        call.q = flash_hopper_map(p.q, B, TQ, NH, HS, 64);
        call.k = flash_hopper_map(p.k, B, TK, NKV, HS, Tiles::KEYS);
        call.v = flash_hopper_map(p.v, B, TK, NKV, HS, Tiles::KEYS);
        call.o = flash_hopper_map(p.o, B, TQ, NH, HS, 64);
        call.tiles = (unsigned)divide_up(TQ, Tiles::QUERIES);
        call.items = call.tiles * p.B * p.NH;
        call.section = heads_per_section(&p, TK, p.NH);
        call.next = next;
        reset_kernel<<<1, 1, 0, stream>>>(next);
        CUDA_CHECK(cudaGetLastError());
        launch_persistent<Tiles>(
            p.dropout.threshold > 0 ? forward_kernel<D, true> : forward_kernel<D, false>, call,
            UNDER_LAST_KERNEL, stream);
    }
};

} // namespace

CUtensorMap flash_hopper_map(AttentionView view, size_t B, size_t T, size_t heads, size_t HS,
                             unsigned rows) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode;
    if (!encode) {
        void *symbol = NULL;
        cudaDriverEntryPointQueryResult found;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000,
                                                    cudaEnableDefault, &found));
        encode = (PFN_cuTensorMapEncodeTiled_v12000)symbol;
    }
    CUtensorMap map;
    /* The stride of an axis of one element is free, and may be anything in the view. */
    const cuuint64_t sizes[4] = {HS, T, heads, B};
    const cuuint64_t strides[3] = {2 * (T > 1 ? view.token : HS), 2 * (heads > 1 ? view.head : HS),
                                   2 * (B > 1 ? view.batch : HS)};
    const cuuint32_t box[4] = {64, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    const CUresult result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, view.data, sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        error_fatal(__FILE__, __LINE__, "cuTensorMapEncodeTiled: error %d", (int)result);
    return map;
}

/* Nonzero if the current GPU runs this problem with this family. */
extern "C" int flash_hopper_supported(const Attention *problem) {
    int device, major;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
        cudaGetLastError(); /* no usable GPU is an answer, not an error for the next check */
        return 0;
    }
    if (major != 9 || problem->HS % 8 != 0 || problem->HS > 128)
        return 0;
    /* Where the program has no code for sm_90a, the kernel is empty and needs few registers. */
    static const bool built = [] {
        cudaFuncAttributes kernel;
        CUDA_CHECK(cudaFuncGetAttributes(&kernel, forward_kernel<64, false>));
        return kernel.numRegs >= 128;
    }();
    return built && flash_mma_supported(problem);
}

extern "C" size_t flash_hopper_forward_workspace(const Attention *problem) {
    (void)problem;
    return sizeof(unsigned);
}

extern "C" void flash_hopper_forward(const Attention *problem, const AttentionTensors *tensors,
                                     void *workspace, void *stream) {
    if (!describe(problem, tensors).aligned) /* out of the copy engine's reach */
        return flash_mma_forward(problem, tensors, workspace, stream);
    const RunForward run = {problem, tensors, (unsigned *)workspace, (cudaStream_t)stream};
    if (problem->HS > 64)
        run.with<128>();
    else
        run.with<64>();
}
