/* flash_hopper, backward: the gradients of flash_mma_backward.cu from 5 matrix products, scheduled
 * after FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).
 *
 * A block owns 128 keys, a consumer warpgroup 64 of them, and streams the queries. As there, the
 * products are transposed, Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that P and dS are A operands from
 * registers of dV += Pᵀ dO and dK += dSᵀ Q. dS also goes to shared memory, where both warpgroups
 * read all of it for their halves of dQ = dS K. Their sum over the keys is in global memory: the
 * first part is stored there and the others are added.
 *
 * What runs under what: dP under the exponentials; dV under dS; dK under dS's way to shared memory;
 * the next tile's S, started behind dQ, under dQ's way to the warp that adds it. */
#include "attention/flash_hopper.cuh"
#include "attention/mma_gradient.cuh"
#include "attention/sum_of_parts.cuh"

namespace {

/* QUERIES: in a stage. Two accumulators of scores, two of gradients and dQ's fill the registers. */
template <int D> struct BackwardShape;
template <> struct BackwardShape<64> { static constexpr int QUERIES = 128; };
template <> struct BackwardShape<128> { static constexpr int QUERIES = 64; };

constexpr int CHUNK = 64 * 64; /* floats of dQ that a warpgroup computes at a time */

template <int D>
struct BackwardTiles {
    static constexpr int QUERIES = BackwardShape<D>::QUERIES, STAGES = 2, CONSUMERS = 2;
    static constexpr int KEYS = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
    using Keys = Blocks<KEYS, D>;
    using Queries = Blocks<QUERIES, D>;
    using Scores = Blocks<KEYS, QUERIES>;
    using OwnKeys = Blocks<64, D>;
    /* Of a consumer: a chunk of dQ, or its dK and dV. */
    static constexpr uint32_t RESULT_BYTES = 2 * OwnKeys::BYTES;
    static_assert(RESULT_BYTES >= CHUNK * sizeof(float), "either fits");
    static_assert(QUERIES * D == CONSUMERS * CHUNK, "each computes one chunk of dQ");
    static_assert(ROW_PADDING % QUERIES == 0, "statistics are read by whole tiles");
    /* Places in shared memory. */
    static constexpr uint32_t ROW_BYTES = QUERIES * sizeof(float);
    static constexpr uint32_t K = 0, V = K + Keys::BYTES;
    static constexpr uint32_t Q = V + Keys::BYTES, DOUT = Q + STAGES * Queries::BYTES;
    static constexpr uint32_t DS = DOUT + STAGES * Queries::BYTES;
    static constexpr uint32_t RESULTS = DS + 2 * Scores::BYTES;
    static constexpr uint32_t LSE2 = RESULTS + CONSUMERS * RESULT_BYTES;
    static constexpr uint32_t DELTA = LSE2 + STAGES * ROW_BYTES;
    static constexpr uint32_t KV_RING = DELTA + STAGES * ROW_BYTES;
    static constexpr uint32_t Q_RING = KV_RING + Ring<1>::BYTES;
    static constexpr uint32_t DOUT_RING = Q_RING + Ring<STAGES>::BYTES;
    static constexpr uint32_t RESULT_RINGS = DOUT_RING + Ring<STAGES>::BYTES;
    static constexpr uint32_t ITEMS = RESULT_RINGS + CONSUMERS * Ring<1>::BYTES;
    static constexpr size_t SHARED_BYTES = ITEMS + Items::BYTES;
    static_assert(SHARED_BYTES <= 227 << 10, "of a block on sm_90");
};

struct BackwardCall {
    CUtensorMap q, k, v, dout, dk, dv;
    FlashProblem p;
    float *dq_sum; /* (B·NH·rows/QUERIES,CONSUMERS) chunks, each in the order of the accumulators */
    unsigned *parts; /* of each chunk, from 0 on: see sum_of_parts.cuh */
    unsigned *next;  /* item */
    bool in_turns;   /* the parts of a chunk are added in a fixed order */
    unsigned tiles, items, section;
    int group; /* query heads that share a key/value head */
};

/* Of an item: its keys, and the first tile of queries that sees any of them; there is one. */
struct Work {
    int b, kv, j0, first;
};

/* What the roles of a block share: the call, and places in shared memory. */
template <int D>
struct BackwardBlock {
    using Tiles = BackwardTiles<D>;
    using Keys = typename Tiles::Keys;
    using Queries = typename Tiles::Queries;
    using Scores = typename Tiles::Scores;
    static constexpr int CONSUMERS = Tiles::CONSUMERS, STAGES = Tiles::STAGES;

    const BackwardCall &call;
    uint32_t base; /* shared address, a multiple of 1024 */

    __device__ __forceinline__ Ring<1> kv_ring() const { return {base + Tiles::KV_RING}; }
    __device__ __forceinline__ Ring<STAGES> q_ring() const { return {base + Tiles::Q_RING}; }
    __device__ __forceinline__ Ring<STAGES> dout_ring() const { return {base + Tiles::DOUT_RING}; }
    __device__ __forceinline__ Ring<1> result_ring(int w) const {
        return {base + Tiles::RESULT_RINGS + w * Ring<1>::BYTES};
    }
    __device__ __forceinline__ Items items() const {
        return {{base + Tiles::ITEMS}, base + Tiles::ITEMS + Ring<2>::BYTES};
    }
    __device__ __forceinline__ Keys k_tile() const { return {base + Tiles::K}; }
    __device__ __forceinline__ Keys v_tile() const { return {base + Tiles::V}; }
    __device__ __forceinline__ Queries q_tile(unsigned use) const {
        return {base + Tiles::Q + use % STAGES * Queries::BYTES};
    }
    __device__ __forceinline__ Queries dout_tile(unsigned use) const {
        return {base + Tiles::DOUT + use % STAGES * Queries::BYTES};
    }
    __device__ __forceinline__ uint32_t lse2(unsigned use) const {
        return base + Tiles::LSE2 + use % STAGES * Tiles::ROW_BYTES;
    }
    __device__ __forceinline__ uint32_t delta(unsigned use) const {
        return base + Tiles::DELTA + use % STAGES * Tiles::ROW_BYTES;
    }
    __device__ __forceinline__ Scores ds_tile(unsigned use) const {
        return {base + Tiles::DS + use % 2 * Scores::BYTES};
    }
    __device__ __forceinline__ uint32_t result(int w) const {
        return base + Tiles::RESULTS + w * Tiles::RESULT_BYTES;
    }

    /* By one thread. */
    __device__ __forceinline__ void init() const {
        kv_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        q_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        dout_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        for (int w = 0; w < CONSUMERS; w++)
            result_ring(w).init(4, 1);
        items().init(WARPGROUP * CONSUMERS + 1 + CONSUMERS);
        fence_barrier_init();
    }

    /* The heaviest come first, but where additions are in order, the last keys: an item waits only
     * for ones before it. */
    __device__ __forceinline__ Work work_of(unsigned item) const {
        const FlashProblem &p = call.p;
        const Place place = find_place(item, call.tiles, p.B, p.NKV, call.section);
        const int tile = call.in_turns ? (int)call.tiles - 1 - place.tile : place.tile;
        const int j0 = tile * Tiles::KEYS;
        const int first = max(0, j0 - p.mask.diagonal) / Tiles::QUERIES * Tiles::QUERIES;
        return {place.b, place.h, j0, first};
    }
    /* Of a query head's rows in the statistics and in dQ's sum, the first. */
    __device__ __forceinline__ size_t head_row(const Work &work, int h) const {
        return ((size_t)work.b * call.p.NH + h) * call.p.rows;
    }
    /* Calls visit(h, i0) for each tile of queries of an item, head by head of the group. */
    template <class Visit>
    __device__ __forceinline__ void for_queries(const Work &work, Visit visit) const {
#pragma unroll 1
        for (int h = work.kv * call.group; h < (work.kv + 1) * call.group; h++)
#pragma unroll 1
            for (int i0 = work.first; i0 < call.p.TQ; i0 += Tiles::QUERIES)
                visit(h, i0);
    }
    /* A tile of queries, and of `statistics` the number of each, to the next places of a ring. */
    __device__ __forceinline__ void load_queries(Ring<STAGES> ring, unsigned use, Queries tile,
                                                 const CUtensorMap &map, uint32_t numbers,
                                                 const float *statistics, const Work &work, int h,
                                                 int i0) const {
        const Barrier full = ring.full(use);
        ring.wait_empty(use);
        full.arrive_expecting(Queries::BYTES + Tiles::ROW_BYTES);
        copy_tile(tile, &map, full, i0, h, work.b);
        copy_bytes(numbers, statistics + head_row(work, h) + i0, Tiles::ROW_BYTES, full);
    }
};

/* The first thread of the producer: hands out the items, and loads all that S is made of. */
template <int D>
__device__ __forceinline__ void load_keys_and_queries(const BackwardBlock<D> &block) {
    using Tiles = BackwardTiles<D>;
    using Keys = typename Tiles::Keys;
    const BackwardCall &call = block.call;
    const auto kv_ring = block.kv_ring();
    prefetch_map(&call.q);
    prefetch_map(&call.k);
    prefetch_map(&call.v);
    wait_for_last_kernel(); /* all other roles begin with what this thread publishes */
    /* Items that wait for each other's additions are taken from the counter as they start: one
     * taken ahead, or kept for a block that has not begun, would hold up the others. */
    unsigned loaded = 0, item = call.in_turns ? atomicAdd(call.next, 1) : blockIdx.x;
    for (unsigned use = 0;; use++) {
        block.items().publish(use, item);
        if (item >= call.items)
            break;
        const int ticket = call.in_turns ? 0 : atomicAdd(call.next, 1); /* long on its way */
        const Work work = block.work_of(item);
        const Barrier kv_full = kv_ring.full(use);
        kv_ring.wait_empty(use);
        kv_full.arrive_expecting(2 * Keys::BYTES);
        copy_tile(block.k_tile(), &call.k, kv_full, work.j0, work.kv, work.b);
        copy_tile(block.v_tile(), &call.v, kv_full, work.j0, work.kv, work.b);
        block.for_queries(work, [&](int h, int i0) {
            block.load_queries(block.q_ring(), loaded, block.q_tile(loaded), call.q,
                               block.lse2(loaded), call.p.lse2, work, h, i0);
            loaded++;
        });
        item = call.in_turns ? atomicAdd(call.next, 1) : gridDim.x + opaque(ticket);
    }
}

/* The second: dO and D. */
template <int D>
__device__ __forceinline__ void load_output_gradients(const BackwardBlock<D> &block) {
    const BackwardCall &call = block.call;
    prefetch_map(&call.dout);
    unsigned loaded = 0, item;
    for (unsigned use = 0; (item = block.items().take(use)) < call.items; use++) {
        const Work work = block.work_of(item);
        block.for_queries(work, [&](int h, int i0) {
            block.load_queries(block.dout_ring(), loaded, block.dout_tile(loaded), call.dout,
                               block.delta(loaded), call.p.delta, work, h, i0);
            loaded++;
        });
    }
}

/* One more for each consumer w: its results to global memory. */
template <int D>
__device__ __forceinline__ void store_results(const BackwardBlock<D> &block, int w) {
    using Tiles = BackwardTiles<D>;
    using OwnKeys = typename Tiles::OwnKeys;
    const BackwardCall &call = block.call;
    const uint32_t source = block.result(w);
    unsigned stored = 0, item;
    for (unsigned use = 0; (item = block.items().take(use)) < call.items; use++) {
        const Work work = block.work_of(item);
        block.for_queries(work, [&](int h, int i0) {
            const unsigned tiles = call.p.rows / Tiles::QUERIES;
            const unsigned tile = (work.b * call.p.NH + h) * tiles + i0 / Tiles::QUERIES;
            const unsigned chunk = tile * Tiles::CONSUMERS + w;
            unsigned *parts = call.parts + chunk;
            float *sum = call.dq_sum + (size_t)chunk * CHUNK;
            bool first;
            if (call.in_turns) {
                const unsigned turn = (keys_seen(call.p, i0 + Tiles::QUERIES) - 1) / Tiles::KEYS -
                                      work.j0 / Tiles::KEYS;
                wait_until(parts, turn);
                first = turn == 0;
            } else {
                first = !has_begun(parts); /* looked at while there is time */
            }
            block.result_ring(w).wait_full(stored);
            if (first && !call.in_turns)
                first = claim(parts);
            if (first)
                store_bytes(sum, source, CHUNK * sizeof(float));
            else
                add_bytes(sum, source, CHUNK * sizeof(float));
            store_commit();
            store_wait_read();
            block.result_ring(w).empty(stored++).arrive();
            if (first || call.in_turns)
                count_part(parts);
        });
        const int row = work.j0 + 64 * w;
        block.result_ring(w).wait_full(stored);
        store_tile(OwnKeys{source}, &call.dk, row, work.kv, work.b);
        store_tile(OwnKeys{source + OwnKeys::BYTES}, &call.dv, row, work.kv, work.b);
        store_wait_read();
        block.result_ring(w).empty(stored++).arrive();
    }
}

/* This lane's part of one number for each query of an accumulator: a pair for each 8. */
template <int N>
__device__ __forceinline__ void load_statistics(float2 (&x)[N], uint32_t source) {
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = load_shared_float2(source + 32 * n);
}

template <int N>
__device__ __forceinline__ void drop(float (&x)[1][N][4], const DropoutRule &dropout, int bh,
                                     int j0, int i0) {
    dropout.visit_transposed<1, N>(bh, j0, i0, [&](int m, int n, int e) { x[m][n][e] = 0.0f; });
}

/* A consumer warpgroup, and what it does for its 64 keys. Its results go through a place in shared
 * memory to the warp that stores them; `stored` counts them. */
template <int D>
struct Consumer {
    using Tiles = BackwardTiles<D>;
    using Keys = typename Tiles::Keys;
    using Scores = typename Tiles::Scores;
    using OwnKeys = typename Tiles::OwnKeys;
    static constexpr int KEYS = Tiles::KEYS, QUERIES = Tiles::QUERIES;

    const BackwardBlock<D> &block;
    const int w = uniform(threadIdx.x / WARPGROUP) - 1, lane = threadIdx.x % 32;
    const int thread = threadIdx.x % WARPGROUP, warp_row = 64 * w + thread / 32 * 16;
    const Keys k_tile = block.k_tile(), v_tile = block.v_tile();
    const Ring<1> results = block.result_ring(w);
    const uint32_t result = block.result(w);

    /* Sᵀ of a tile of queries. */
    __device__ __forceinline__ void start_scores(float (&scores)[1][QUERIES / 8][4],
                                                 unsigned use) const {
        start_product<D, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(scores, k_tile, 64 * w, 0,
                                                           block.q_tile(use), 0, 0, false);
        wgmma_commit();
    }

    /* dPᵀ. */
    __device__ __forceinline__ void start_dp(float (&dp)[1][QUERIES / 8][4], unsigned use) const {
        start_product<D, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(dp, v_tile, 64 * w, 0,
                                                           block.dout_tile(use), 0, 0, false);
        wgmma_commit();
    }

    /* A chunk of dQ, from the keys of all consumers: half the queries, or half the columns. */
    __device__ __forceinline__ void start_dq(float (&dq)[1][8][4], Scores ds_tile) const {
        if (D == 64)
            start_product<KEYS, K_ALONG_ROWS, K_ALONG_ROWS>(dq, ds_tile, 0, 64 * w, k_tile, 0, 0,
                                                            false);
        else
            start_product<KEYS, K_ALONG_ROWS, K_ALONG_ROWS>(dq, ds_tile, 0, 0, k_tile, 0, 64 * w,
                                                            false);
        wgmma_commit();
    }

    __device__ __forceinline__ void put_dq(const float (&dq)[1][8][4], unsigned stored) const {
        results.wait_empty(stored);
#pragma unroll
        for (int n = 0; n < 8; n++)
            store_shared_16(result + (n * WARPGROUP + thread) * 16,
                            make_uint4(__float_as_uint(dq[0][n][0]), __float_as_uint(dq[0][n][1]),
                                       __float_as_uint(dq[0][n][2]), __float_as_uint(dq[0][n][3])));
    }

    __device__ __forceinline__ void put_dk_dv(float (&dk)[1][D / 8][4], float (&dv)[1][D / 8][4],
                                              float dk_scale, float dv_scale,
                                              unsigned stored) const {
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dk[0][n][e] *= dk_scale;
                dv[0][n][e] *= dv_scale;
            }
        results.wait_empty(stored);
        store_matrices(OwnKeys{result}, 0, pack_fragments(dk));
        store_matrices(OwnKeys{result + OwnKeys::BYTES}, 0, pack_fragments(dv));
    }

    __device__ __forceinline__ void hand_over(unsigned &stored) const {
        fence_async();
        __syncwarp();
        if (lane == 0)
            results.full(stored).arrive();
        stored++;
    }
};

/* A consumer's way through the items, and through the queries of each. */
template <int D, bool DROPOUT>
__device__ __forceinline__ void consume(const BackwardBlock<D> &block) {
    using Tiles = BackwardTiles<D>;
    constexpr int QUERIES = Tiles::QUERIES;
    const BackwardCall &call = block.call;
    const FlashProblem &p = call.p;
    const auto kv_ring = block.kv_ring();
    const auto q_ring = block.q_ring(), dout_ring = block.dout_ring();
    const Items items = block.items();
    const Consumer<D> self = {block};
    const int all_consumers = 1; /* a named barrier; 0 is __syncthreads' */

    unsigned used = 0, stored = 0, item;
    for (unsigned use = 0; (item = uniform(items.take(use))) < call.items; use++) {
        const Work work = block.work_of(item);
        const int steps = (p.TQ - work.first + QUERIES - 1) / QUERIES * call.group;
        float dk[1][D / 8][4], dv[1][D / 8][4];
        clear(dk);
        clear(dv);
        kv_ring.wait_full(use);
        float scores[1][QUERIES / 8][4];
        if (steps > 0) { /* always: the branch saves the loop some moves of descriptors */
            q_ring.wait_full(used);
            wgmma_fence();
            self.start_scores(scores, used);
            wgmma_wait<0>();
            pin(scores);
        }
        int h = work.kv * call.group, i0 = work.first;
#pragma unroll 1
        for (int t = 1; t <= steps; t++) {
            const int bh = work.b * p.NH + h, j0 = work.j0 + self.warp_row;
            const uint32_t statistics = block.lse2(used) + 8 * (self.lane % 4);
            float2 lse2[QUERIES / 8];
            load_statistics(lse2, statistics);
            float dp[1][QUERIES / 8][4];
            dout_ring.wait_full(used);
            wgmma_fence();
            self.start_dp(dp, used);
            if (t > 1)
                self.hand_over(stored); /* dQ of the step before: its stores have had time to end */

            if (p.mask.cuts(i0, j0, 16))
                p.mask.apply_transposed(scores, j0, i0);
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
                scores_to_probabilities(scores, n, lse2[n], p.scale_log2);
            Fragments<1, QUERIES / 16> fragments;
            if constexpr (DROPOUT) {
                float kept[1][QUERIES / 8][4];
                copy(kept, scores);
                drop(kept, p.dropout, bh, j0, i0);
                fragments = pack_fragments(kept);
            } else {
                fragments = pack_fragments(scores);
            }
            wgmma_fence();
            start_product<K_ALONG_ROWS>(dv, fragments, block.dout_tile(used), 0, 0, true);
            wgmma_commit();

            wgmma_wait<1>();
            pin(dp);
            if constexpr (DROPOUT)
                drop(dp, p.dropout, bh, j0, i0);
            /* D is read where it is used: no registers are left to hold it. */
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
                probabilities_to_gradients<DROPOUT>(
                    scores, dp, n,
                    load_shared_float2(statistics + (Tiles::DELTA - Tiles::LSE2) + 32 * n),
                    p.dropout);
            const auto ds = pack_fragments(scores);
            const auto ds_tile = block.ds_tile(used);
            store_matrices(ds_tile, 64 * self.w, ds);
            wgmma_fence();
            start_product<K_ALONG_ROWS>(dk, ds, block.q_tile(used), 0, 0, true);
            wgmma_commit();
            fence_async();
            wgmma_wait<1>();
            pin(dv);
            dout_ring.release(used);
            barrier_sync(all_consumers, Tiles::CONSUMERS * WARPGROUP);

            float dq[1][8][4];
            wgmma_fence();
            self.start_dq(dq, ds_tile);
            /* After the last tile its scores once more, unused: a branch would make the compiler
             * wait for each product. */
            const unsigned next = t < steps ? used + 1 : used;
            q_ring.wait_full(next);
            self.start_scores(scores, next);
            wgmma_wait<1>();
            pin(dk);
            pin(dq);
            self.put_dq(dq, stored);
            wgmma_wait<0>();
            pin(scores);
            q_ring.release(used++);
            i0 += QUERIES;
            if (i0 >= p.TQ)
                i0 = work.first, h++;
        }
        self.hand_over(stored);
        kv_ring.release(use);
        self.put_dk_dv(dk, dv, p.scale, DROPOUT ? p.dropout.scale : 1.0f, stored);
        self.hand_over(stored);
    }
}

template <int D, bool DROPOUT>
__global__ void __launch_bounds__(BackwardTiles<D>::THREADS, 1)
    backward_kernel(const __grid_constant__ BackwardCall call) {
    if (!HOPPER_KERNELS_EXIST)
        return;
    extern __shared__ __align__(1024) unsigned char shared[];
    const BackwardBlock<D> block = {call, shared_address(shared)};
    if (threadIdx.x == 0)
        block.init();
    __syncthreads();
    allow_next_kernel();

    if (threadIdx.x < WARPGROUP) {
        release_registers<24>();
        if (threadIdx.x % 32 != 0) /* one thread of each warp has a task of its own */
            return;
        if (threadIdx.x == 0)
            load_keys_and_queries(block);
        else if (threadIdx.x == 32)
            load_output_gradients(block);
        else
            store_results(block, threadIdx.x / 32 - 2);
    } else {
        acquire_registers<240>();
        consume<D, DROPOUT>(block);
    }
}

/* dQ = scale · its sum, one chunk a block: out of the order of the accumulators. A chunk whose
 * queries see no key was never stored, and is 0. */
template <int D>
__global__ void __launch_bounds__(WARPGROUP)
    query_gradient_kernel(const FlashProblem p, const float *dq_sum) {
    if (!HOPPER_KERNELS_EXIST)
        return;
    constexpr int QUERIES = BackwardShape<D>::QUERIES, CHUNKS = QUERIES * D / CHUNK;
    __shared__ __align__(1024) unsigned char shared[2 * CHUNK];
    const Blocks<64, 64> tile = {shared_address(shared)};
    const unsigned chunk = gridDim.x - 1 - blockIdx.x; /* the last sums are still in the L2 */
    const size_t index = chunk / CHUNKS;
    const int part = chunk % CHUNKS, tiles = p.rows / QUERIES;
    const int i0 = (int)(index % tiles) * QUERIES + (D == 64 ? 64 * part : 0);
    const int column0 = D == 64 ? 0 : 64 * part;
    const int bh = (int)(index / tiles), thread = threadIdx.x;
    if (i0 >= p.TQ)
        return;
    wait_for_last_kernel();
    const float4 *sum = (const float4 *)(dq_sum + (size_t)chunk * CHUNK);
    const bool stored = keys_seen(p, (i0 / QUERIES + 1) * QUERIES) > 0;
    float dq[1][8][4];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 x = stored ? sum[n * WARPGROUP + thread] : make_float4(0, 0, 0, 0);
        dq[0][n][0] = x.x * p.scale, dq[0][n][1] = x.y * p.scale;
        dq[0][n][2] = x.z * p.scale, dq[0][n][3] = x.w * p.scale;
    }
    store_matrices(tile, 0, pack_fragments(dq));
    __syncthreads();
    bf16 *target = head_rows(p.dq, bh / p.NH, bh % p.NH);
#pragma unroll
    for (int i = thread; i < 64 * 8; i += WARPGROUP) {
        const int row = i / 8, c = i % 8;
        if (i0 + row < p.TQ && column0 + 8 * c < p.HS)
            *(uint4 *)(target + (size_t)(i0 + row) * p.dq.token + column0 + 8 * c) =
                load_shared_16(tile.chunk(row, c));
    }
}

/* Places in the workspace, in elements of 4 bytes: lse2, delta, dq_sum, and then what starts at 0:
 * the counter of items and those of the parts of dQ. */
struct Workspace {
    size_t rows, dq_sum, counters;

    explicit Workspace(const Attention *problem) {
        rows = problem->B * problem->NH * divide_up(problem->TQ, ROW_PADDING) * ROW_PADDING;
        dq_sum = rows * tile_width(problem->HS);
        counters = 1 + dq_sum / CHUNK;
    }
    size_t bytes() const { return (2 * rows + dq_sum + counters) * 4; }
};

struct RunBackward {
    const FlashProblem &p;
    const Workspace &sizes;
    bool in_turns;
    cudaStream_t stream;

    template <int D, bool DROPOUT>
    void with() const {
        using Tiles = BackwardTiles<D>;
        BackwardCall call = {};
        call.p = p;
        call.dq_sum = p.delta + sizes.rows;
        call.next = (unsigned *)(call.dq_sum + sizes.dq_sum);
        call.parts = call.next + 1;
        call.in_turns = in_turns;
        call.q = query_map(p, p.q, Tiles::QUERIES);
        call.dout = query_map(p, p.dout, Tiles::QUERIES);
        call.k = key_map(p, p.k, Tiles::KEYS);
        call.v = key_map(p, p.v, Tiles::KEYS);
        call.dk = key_map(p, p.dk, 64);
        call.dv = key_map(p, p.dv, 64);
        call.group = p.NH / p.NKV;
        call.tiles = (unsigned)divide_up(p.mask.TK, Tiles::KEYS);
        call.items = call.tiles * p.B * p.NKV;
        /* In turns, the tiles of one head wait for each other: many heads at a time. */
        const size_t streamed = (size_t)p.TQ * call.group;
        call.section = in_turns ? heads_that_fit(&p, streamed, p.NKV)
                                : heads_per_section(&p, streamed, p.NKV);

        flash_statistics(p, NULL, 0, call.next, sizes.counters, stream);
        launch_persistent<Tiles>(backward_kernel<D, DROPOUT>, call, stream);
        launch_under(query_gradient_kernel<D>, (unsigned)(sizes.dq_sum / CHUNK), WARPGROUP, 0,
                     stream, p, call.dq_sum);
    }
};

} // namespace

extern "C" size_t flash_hopper_backward_workspace(const Attention *problem) {
    const size_t other = flash_mma_backward_workspace(problem);
    const size_t own = Workspace(problem).bytes();
    return own > other ? own : other;
}

extern "C" void flash_hopper_backward(const Attention *problem, const AttentionTensors *tensors,
                                      const AttentionGradients *gradients, void *workspace,
                                      void *stream) {
    FlashProblem p = describe(problem, tensors, gradients);
    if (!p.aligned) /* out of the copy engine's reach */
        return flash_mma_backward(problem, tensors, gradients, workspace, stream);
    const Workspace sizes(problem);
    p.lse2 = (float *)workspace, p.delta = p.lse2 + sizes.rows;
    dispatch(p.HS, p.dropout.threshold > 0,
             RunBackward{p, sizes, problem->deterministic != 0, (cudaStream_t)stream});
}
