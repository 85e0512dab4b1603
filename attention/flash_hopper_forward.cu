/* flash_hopper, forward: O = dropout(softmax(scale · Q Kᵀ + mask)) V and LSE:
 * flash_mma_forward.cu's recurrence, scheduled as in FlashAttention-3 (Shah et al. 2024, arXiv
 * 2407.08608).
 *
 * In step j a consumer warpgroup starts S_j = Q K_jᵀ and, behind it, O += P_{j-1} V_{j-1}; the
 * second runs under the mask, the maxima and the corrections of S_j, and O is corrected among the
 * exponentials, which leave the multipliers idle. Two warpgroups take turns at starting products, so
 * that one's softmax lies under the other's products; of three, one or the other always has a
 * product to run. */
#include "attention/flash_hopper.cuh"
#include "attention/mma_softmax.cuh"

namespace {

/* CONSUMERS: warpgroups, of 64 queries each: as many as the registers allow, of which setmaxnreg
 * moves some from the producer to the consumers. Two at D = 64 are 5 to 15% slower. STAGES of keys
 * and Q_PLACES, for the queries of so many items. TURNS: the warpgroups start products in turn.
 * Without, one whose queries see fewer keys runs ahead as far as stages and places allow, into the
 * next item, which short sequences gain more by than long ones lose. HOLD: Q in registers, read
 * once for all tiles of keys; at D = 128 it is 2% faster. LAZY: see OnlineSoftmax. */
template <int D>
struct ForwardTiles {
    static constexpr int CONSUMERS = D == 64 ? 3 : 2, KEYS = 128;
    static constexpr int STAGES = D == 64 ? 4 : 2, Q_PLACES = D == 64 ? 2 : 1;
    static constexpr bool TURNS = D == 128;
    static constexpr int QUERIES = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
    static constexpr bool HOLD = D == 128, LAZY = D == 128;
    static constexpr int REGISTERS = CONSUMERS == 3 ? 160 : 240;
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
    using Queries = Blocks<64, D>;
    using Keys = Blocks<KEYS, D>;
    /* Places in shared memory. */
    static constexpr uint32_t K = Q_PLACES * CONSUMERS * Queries::BYTES;
    static constexpr uint32_t V = K + STAGES * Keys::BYTES;
    static constexpr uint32_t OUT = V + STAGES * Keys::BYTES;
    static constexpr uint32_t Q_RING = OUT + CONSUMERS * Queries::BYTES;
    static constexpr uint32_t K_RING = Q_RING + Ring<Q_PLACES>::BYTES;
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

/* Of an item: its queries, and the number of tiles of keys that any of them sees. */
struct Work {
    int b, h, i0, tiles;
};

/* What the roles of a block share: the call, and places in shared memory. */
template <int D>
struct ForwardBlock {
    using Tiles = ForwardTiles<D>;
    using Queries = typename Tiles::Queries;
    using Keys = typename Tiles::Keys;
    static constexpr int CONSUMERS = Tiles::CONSUMERS, STAGES = Tiles::STAGES;
    static constexpr int Q_PLACES = Tiles::Q_PLACES;

    const ForwardCall &call;
    uint32_t base; /* shared address, a multiple of 1024 */

    __device__ __forceinline__ Ring<Q_PLACES> q_ring() const { return {base + Tiles::Q_RING}; }
    __device__ __forceinline__ Ring<STAGES> k_ring() const { return {base + Tiles::K_RING}; }
    __device__ __forceinline__ Ring<STAGES> v_ring() const { return {base + Tiles::V_RING}; }
    __device__ __forceinline__ Items items() const {
        return {{base + Tiles::ITEMS}, base + Tiles::ITEMS + Ring<2>::BYTES};
    }
    __device__ __forceinline__ Queries q_tile(unsigned use, int group) const {
        return {base + (use % Q_PLACES * CONSUMERS + group) * Queries::BYTES};
    }
    __device__ __forceinline__ Queries out_tile(int group) const {
        return {base + Tiles::OUT + group * Queries::BYTES};
    }
    __device__ __forceinline__ uint32_t stage(unsigned use) const {
        return base + use % STAGES * Keys::BYTES;
    }
    __device__ __forceinline__ Keys k_tile(uint32_t stage) const { return {stage + Tiles::K}; }
    __device__ __forceinline__ Keys v_tile(uint32_t stage) const { return {stage + Tiles::V}; }

    /* By one thread. */
    __device__ __forceinline__ void init() const {
        q_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        k_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        v_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        items().init(WARPGROUP * CONSUMERS);
        fence_barrier_init();
    }

    __device__ __forceinline__ int key_tiles(int keys) const {
        return (keys + Tiles::KEYS - 1) / Tiles::KEYS;
    }
    __device__ __forceinline__ Work work_of(unsigned item) const {
        const FlashProblem &p = call.p;
        const Place place = find_place(item, call.tiles, p.B, p.NH, call.section);
        const int i0 = (int)(call.tiles - 1 - place.tile) * Tiles::QUERIES;
        return {place.b, place.h, i0, key_tiles(keys_seen(p, i0 + Tiles::QUERIES))};
    }
};

/* The producer, one thread: hands out the items, and loads their tiles. */
template <int D>
__device__ __forceinline__ void produce(const ForwardBlock<D> &block) {
    using Tiles = ForwardTiles<D>;
    const ForwardCall &call = block.call;
    const FlashProblem &p = call.p;
    const auto q_ring = block.q_ring();
    const auto k_ring = block.k_ring(), v_ring = block.v_ring();
    prefetch_map(&call.q);
    prefetch_map(&call.k);
    prefetch_map(&call.v);
    prefetch_map(&call.o);
    unsigned loaded = 0, item = blockIdx.x;
    wait_for_last_kernel(); /* whose counter this thread alone reads */
    for (unsigned use = 0;; use++) {
        block.items().publish(use, item);
        if (item >= call.items)
            break;
        const int ticket = atomicAdd(call.next, 1); /* long on its way: used at the end */
        const Work work = block.work_of(item);
        const int kv = work.h / (p.NH / p.NKV);
        q_ring.wait_empty(use);
        q_ring.full(use).arrive_expecting(Tiles::CONSUMERS * Tiles::Queries::BYTES);
        for (int w = 0; w < Tiles::CONSUMERS; w++)
            copy_tile(block.q_tile(use, w), &call.q, q_ring.full(use), work.i0 + 64 * w, work.h,
                      work.b);
#pragma unroll 1
        for (int j = 0; j < work.tiles; j++, loaded++) {
            const uint32_t stage = block.stage(loaded);
            k_ring.wait_empty(loaded);
            k_ring.full(loaded).arrive_expecting(Tiles::Keys::BYTES);
            copy_tile(block.k_tile(stage), &call.k, k_ring.full(loaded), j * Tiles::KEYS, kv,
                      work.b);
            v_ring.wait_empty(loaded);
            v_ring.full(loaded).arrive_expecting(Tiles::Keys::BYTES);
            copy_tile(block.v_tile(stage), &call.v, v_ring.full(loaded), j * Tiles::KEYS, kv,
                      work.b);
        }
        item = gridDim.x + opaque(ticket);
    }
}

/* Of an item, a consumer's own: 64 queries from i0 on, this warp's from warp_i0 on, and how many
 * keys, and tiles of keys, any of them sees. */
struct OwnQueries {
    int i0, warp_i0, bh, keys, tiles;
};

/* A consumer warpgroup. */
template <int D>
struct Consumer {
    using Tiles = ForwardTiles<D>;
    using Queries = typename Tiles::Queries;

    const ForwardBlock<D> &block;
    const int group = uniform(threadIdx.x / WARPGROUP) - 1, lane = threadIdx.x % 32;
    const int row0 = 64 * group + threadIdx.x % WARPGROUP / 32 * 16; /* of this warp */
    /* Named barriers; 0 is __syncthreads'. A turn's is waited for by its warpgroup and arrived at
     * by the one before. */
    const int my_turn = 1 + group, next_turn = 1 + (group + 1) % Tiles::CONSUMERS;
    const int own_barrier = 1 + Tiles::CONSUMERS + group;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    const Queries out_tile = block.out_tile(group);

    __device__ __forceinline__ void take_turn() const {
        if constexpr (Tiles::TURNS)
            barrier_sync(my_turn, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (Tiles::TURNS)
            barrier_arrive(next_turn, 2 * WARPGROUP);
    }

    __device__ __forceinline__ OwnQueries own_queries(const Work &work) const {
        const FlashProblem &p = block.call.p;
        const int warp_i0 = work.i0 + row0, bh = work.b * p.NH + work.h;
        const int i0 = work.i0 + 64 * group;
        const int keys = i0 < p.TQ ? keys_seen(p, i0 + 64) : 0;
        return {i0, warp_i0, bh, keys, block.key_tiles(keys)};
    }

    /* Tiles that only other warpgroups see; `used` counts those of all items so far. */
    __device__ __forceinline__ void skip_tiles(int first, int end, unsigned &used) const {
        const auto k_ring = block.k_ring(), v_ring = block.v_ring();
        for (int j = first; j < end; j++, used++) {
            if (j > 0) {
                take_turn();
                pass_turn();
            }
            k_ring.wait_full(used);
            k_ring.release(used);
            v_ring.wait_full(used);
            v_ring.release(used);
        }
    }
};

/* What a consumer does with a tile of keys. All data is consume()'s, which keeps it in registers: a
 * struct with arrays of its own is taken apart too late for the compiler to place them as well. */
template <int D, bool DROPOUT>
struct Steps {
    using Tiles = ForwardTiles<D>;
    static constexpr int KEYS = Tiles::KEYS;

    const ForwardBlock<D> &block;
    const FlashProblem &p;
    const Consumer<D> &self;
    const OwnQueries &own;
    const unsigned use; /* of the queries' place */
    unsigned &used;     /* tiles of keys, of all items so far */
    Fragments<1, D / 16> &q; /* if Tiles::HOLD */
    OnlineSoftmax<1, Tiles::LAZY> &softmax;
    float (&correction)[1][2];
    Fragments<1, KEYS / 16> &probabilities;
    float (&out)[1][D / 8][4];

    /* Half a tile of scores is a tile too. */
    template <int N>
    __device__ __forceinline__ void start_scores(float (&scores)[1][N][4], unsigned tile) const {
        const auto k_tile = block.k_tile(block.stage(tile));
        if constexpr (Tiles::HOLD)
            start_product<K_ALONG_COLUMNS>(scores, q, k_tile, 0, 0, false);
        else
            start_product<D, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(
                scores, block.q_tile(use, self.group), 0, 0, k_tile, 0, 0, false);
        wgmma_commit();
    }

    template <int STEPS>
    __device__ __forceinline__ void start_output(const Fragments<1, STEPS> &probabilities) const {
        block.v_ring().wait_full(used);
        start_product<K_ALONG_ROWS>(out, probabilities, block.v_tile(block.stage(used)), 0, 0,
                                    true);
        wgmma_commit();
    }

    template <int N>
    __device__ __forceinline__ void raise(float (&scores)[1][N][4], int j0) const {
        if (p.mask.cuts(own.warp_i0, j0, 8 * N))
            p.mask.apply(scores, own.warp_i0, j0);
        softmax.raise(scores, correction, p.scale_log2);
    }

    template <int N>
    __device__ __forceinline__ void finish_probabilities(float (&scores)[1][N][4], int j0) const {
        softmax.exponentials(scores, p.scale_log2);
        if constexpr (DROPOUT)
            p.dropout.visit<1, N>(own.bh, own.warp_i0, j0,
                                  [&](int m, int n, int e) { scores[m][n][e] = 0.0f; });
        first_steps<N / 2>(probabilities) = pack_fragments(scores);
    }

    /* The first S and the last P V of an item are alone, outside the turns. */
    __device__ __forceinline__ void first_tile(float (&scores)[1][KEYS / 8][4]) const {
        block.k_ring().wait_full(used);
        wgmma_fence();
        start_scores(scores, used);
        wgmma_wait<0>();
        pin(scores);
        block.k_ring().release(used);
        if (!Tiles::HOLD && own.tiles == 1)
            block.q_ring().release(use);
        raise(scores, 0);
        finish_probabilities(scores, 0);
    }

    template <int N>
    __device__ __forceinline__ void next_tile(float (&scores)[1][N][4], int j) const {
        block.k_ring().wait_full(used + 1);
        self.take_turn();
        wgmma_fence();
        start_scores(scores, used + 1);
        start_output(probabilities);
        self.pass_turn();
        wgmma_wait<1>();
        pin(scores);
        block.k_ring().release(used + 1);
        if (!Tiles::HOLD && j == own.tiles - 1)
            block.q_ring().release(use);
        raise(scores, j * KEYS);
        finish_before_wait(correction[0][0] + correction[0][1], block.base);
        wgmma_wait<0>();
        pin(out);
        block.v_ring().release(used++);
        if (softmax.corrects(correction))
            softmax.correct(out, correction);
        finish_probabilities(scores, j * KEYS);
    }

    template <int STEPS>
    __device__ __forceinline__ void last_output(const Fragments<1, STEPS> &probabilities) const {
        wgmma_fence();
        start_output(probabilities);
        wgmma_wait<0>();
        pin(out);
        block.v_ring().release(used++);
    }
};

/* The end of an item: LSE, and O through the consumer's place in shared memory. */
template <int D, bool DROPOUT>
__device__ __forceinline__ void store_results(const Consumer<D> &self, const Work &work,
                                              const OwnQueries &own, float (&out)[1][D / 8][4],
                                              float (&factor)[1][2], const float (&lse)[1][2]) {
    const FlashProblem &p = self.block.call.p;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = own.warp_i0 + 8 * r + self.lane / 4;
        if (self.lane % 4 == 0 && i < p.TQ)
            p.lse[(size_t)own.bh * p.TQ + i] = lse[0][r];
        if constexpr (DROPOUT)
            factor[0][r] *= p.dropout.scale;
    }
    OnlineSoftmax<1>::correct(out, factor);
    if (self.leader)
        store_wait_read(); /* of the item before, from this place */
    barrier_sync(self.own_barrier, WARPGROUP);
    store_matrices(self.out_tile, 0, pack_fragments(out));
    fence_async();
    barrier_sync(self.own_barrier, WARPGROUP);
    if (self.leader)
        store_tile(self.out_tile, &self.block.call.o, own.i0, work.h, work.b);
}

/* A consumer warpgroup: one item after the other, the steps of each. */
template <int D, bool DROPOUT>
__device__ __forceinline__ void consume(const ForwardBlock<D> &block) {
    using Tiles = ForwardTiles<D>;
    constexpr int KEYS = Tiles::KEYS;
    const FlashProblem &p = block.call.p;
    const auto q_ring = block.q_ring();
    const Items items = block.items();
    const Consumer<D> self = {block};
    if (self.group == Tiles::CONSUMERS - 1) /* the first turn is the first warpgroup's */
        self.pass_turn();

    unsigned used = 0, item;
    for (unsigned use = 0; (item = uniform(items.take(use))) < block.call.items; use++) {
        const Work work = block.work_of(item);
        const OwnQueries own = self.own_queries(work);
        OnlineSoftmax<1, Tiles::LAZY> softmax;
        float out[1][D / 8][4], correction[1][2];
        clear(out);
        q_ring.wait_full(use);
        if (own.tiles == 0) {
            q_ring.release(use);
        } else {
            float scores[1][KEYS / 8][4];
            Fragments<1, KEYS / 16> probabilities;
            Fragments<1, D / 16> q;
            const Steps<D, DROPOUT> steps = {block, p,       self,       own,           use, used,
                                             q,     softmax, correction, probabilities, out};
            if constexpr (Tiles::HOLD) {
                q = load_operand(block.q_tile(use, self.group), 0);
                q_ring.release(use);
            }
            /* The diagonal leaves one half of every other last tile. */
            const bool half = !DROPOUT && own.keys <= own.tiles * KEYS - KEYS / 2;
            steps.first_tile(scores);
            int j = 1;
            for (; j < own.tiles - half; j++)
                steps.next_tile(scores, j);
            if (half) {
                if (own.tiles > 1)
                    steps.next_tile(first_columns<KEYS / 2>(scores), j);
                steps.last_output(first_steps<KEYS / 32>(probabilities));
            } else {
                steps.last_output(probabilities);
            }
        }
        self.skip_tiles(own.tiles, work.tiles, used);

        float factor[1][2], lse[1][2];
        softmax.finish(factor, lse, p.scale_log2);
        store_results<D, DROPOUT>(self, work, own, out, factor, lse);
    }
    if (self.group == 0) /* and the last, which nobody took */
        self.take_turn();
    if (self.leader)
        store_wait_read();
}

template <int D, bool DROPOUT>
__global__ void __launch_bounds__(ForwardTiles<D>::THREADS, 1)
    forward_kernel(const __grid_constant__ ForwardCall call) {
    if (!HOPPER_KERNELS_EXIST)
        return;
    extern __shared__ __align__(1024) unsigned char shared[];
    const ForwardBlock<D> block = {call, shared_address(shared)};
    if (threadIdx.x == 0)
        block.init();
    __syncthreads();

    if (threadIdx.x < WARPGROUP) {
        release_registers<ForwardTiles<D>::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            produce(block);
    } else {
        acquire_registers<ForwardTiles<D>::REGISTERS>();
        consume<D, DROPOUT>(block);
    }
}

struct RunForward {
    const FlashProblem &p;
    unsigned *next;
    cudaStream_t stream;

    template <int D, bool DROPOUT>
    void with() const {
        using Tiles = ForwardTiles<D>;
        ForwardCall call = {};
        call.q = query_map(p, p.q, 64);
        call.k = key_map(p, p.k, Tiles::KEYS);
        call.v = key_map(p, p.v, Tiles::KEYS);
        call.o = query_map(p, p.o, 64);
        call.p = p;
        call.tiles = (unsigned)divide_up(p.TQ, Tiles::QUERIES);
        call.items = call.tiles * p.B * p.NH;
        call.section = heads_per_section(&p, p.mask.TK, p.NH);
        call.next = next;
        reset_kernel<<<1, 1, 0, stream>>>(next);
        CUDA_CHECK(cudaGetLastError());
        launch_persistent<Tiles>(forward_kernel<D, DROPOUT>, call, stream);
    }
};

} // namespace

extern "C" size_t flash_hopper_forward_workspace(const Attention *problem) {
    (void)problem;
    return sizeof(unsigned);
}

extern "C" void flash_hopper_forward(const Attention *problem, const AttentionTensors *tensors,
                                     void *workspace, void *stream) {
    const FlashProblem p = describe(problem, tensors);
    if (!p.aligned) /* out of the copy engine's reach */
        return flash_mma_forward(problem, tensors, workspace, stream);
    dispatch(p.HS, p.dropout.threshold > 0,
             RunForward{p, (unsigned *)workspace, (cudaStream_t)stream});
}
