/* Rung 10: blocks that stay, with equal shares of work.
 *
 * The change: one block for each multiprocessor, which works through items, an item being 128
 * queries of a head. The producer loads the next item's Q, K and V while the consumers still finish
 * this one, and the output leaves through shared memory by a bulk copy of its own, so the tensor
 * cores see no beginning and no end between items.
 *
 * Under a causal mask items are unequal. They are taken longest first, heads in sections whose K
 * and V fit the L2 together (find_place), each by the block that is free first: the number comes
 * from a counter in global memory, asked for when the item before begins, and a ring hands it from
 * the producer to the consumers (Items). Dealt by a fixed rule instead, back and forth, the same
 * blocks got the longer items wherever a section's tiles and a round's blocks were out of step, and
 * lost more than the overlap gains. The time includes that of setting the counter to 0.
 *
 * What limits it: of shared memory's traffic, Q read again for every tile of keys, which the
 * production file holds in registers at head size 128; and at 64 the exponentials, for which it has
 * a third consumer.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 533 (78%), HS=64 387 (57%). */
#include "dev/attention/hopper_rungs.cuh"

namespace {

enum { BLOCK = (1 + CONSUMERS) * WARPGROUP };

struct Item {
    int i0, b, h, tiles; /* first query, head, tiles of keys */
};

template <int HS>
__global__ void __launch_bounds__(BLOCK, 1)
    forward_kernel(const __grid_constant__ ForwardCall call, unsigned section, unsigned count) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    const Blocks<QUERIES, HS> out_tile = {shared_address(memory)};
    const ForwardPlaces<HS> at = {out_tile.base + out_tile.BYTES};
    const auto q_ring = at.q_ring();
    const auto k_ring = at.k_ring(), v_ring = at.v_ring();
    const Items items = {{at.base + at.BYTES}, at.base + at.BYTES + Ring<2>::BYTES};
    const Problem &p = call.p;
    const auto find_item = [&](unsigned number) -> Item {
        const unsigned query_tiles = count_tiles(p.T, QUERIES);
        const Place place = find_place(number, query_tiles, p.B, p.NH, section);
        const int i0 = (int)(query_tiles - 1 - place.tile) * QUERIES;
        const int keys = p.causal ? min(p.T, i0 + QUERIES) : p.T;
        return {i0, place.b, place.h, count_tiles(keys, KEYS)};
    };
    unsigned use = 0; /* K and V tiles so far: the rings go on from item to item */
    if (threadIdx.x == 0) {
        items.init(CONSUMERS * WARPGROUP);
        at.init();
    }
    __syncthreads();

    if (threadIdx.x < WARPGROUP) { /* the producer */
        release_registers<24>();
        if (threadIdx.x > 0)
            return;
        unsigned number = blockIdx.x;
        for (unsigned round = 0;; round++) {
            items.publish(round, number);
            if (number >= count)
                break;
            const int ticket = (int)atomicAdd((unsigned *)p.workspace, 1);
            const Item item = find_item(number);
            q_ring.wait_empty(round);
            load(at.q_tile(), call.q, q_ring.full(round), item.i0, item.h, item.b);
#pragma unroll 1 /* 24 registers */
            for (int j = 0; j < item.tiles; j++, use++) {
                k_ring.wait_empty(use);
                load(at.k_tile(use), call.k, k_ring.full(use), j * KEYS, item.h, item.b);
                v_ring.wait_empty(use);
                load(at.v_tile(use), call.v, v_ring.full(use), j * KEYS, item.h, item.b);
            }
            number = gridDim.x + opaque(ticket); /* not waited for before */
        }
    } else {
        acquire_registers<240>();
        const int row0 = (threadIdx.x - WARPGROUP) / 32 * 16, group = uniform(row0 / 64);
        const int my_turn = 1 + group, next_turn = 2 - group, own = 3 + group; /* barriers */
        const bool leader = threadIdx.x % WARPGROUP == 0;
        float scores[1][KEYS / 8][4], correction[1][2];
        Fragments<1, KEYS / 16> probabilities;
        if (group == 1) barrier_arrive(next_turn, 2 * WARPGROUP);
        unsigned number;
        for (unsigned round = 0; (number = uniform(items.take(round))) < count; round++) {
            const Item item = find_item(number);
            OnlineSoftmax<1> softmax;
            float out[1][HS / 8][4];
            clear(out);
            const auto take_scores = [&](int j, unsigned use) {
                pin(scores);
                k_ring.release(use);
                if (j == item.tiles - 1)
                    q_ring.release(round);
                const Mask mask = mask_of(p);
                if (mask.cuts(item.i0 + row0, j * KEYS, KEYS))
                    mask.apply(scores, item.i0 + row0, j * KEYS);
                softmax_step(softmax, scores, correction, p.scale_log2);
            };

            q_ring.wait_full(round);
            start_scores(scores, at, group, use);
            wgmma_wait<0>();
            take_scores(0, use);
            probabilities = pack_fragments(scores);
            for (int j = 1; j < item.tiles; j++, use++) {
                barrier_sync(my_turn, 2 * WARPGROUP);
                start_scores(scores, at, group, use + 1);
                start_output(out, probabilities, at, use);
                barrier_arrive(next_turn, 2 * WARPGROUP);
                wgmma_wait<1>(); /* for the scores */
                take_scores(j, use + 1);
                finish_before_wait(softmax.sum[0][0] + softmax.sum[0][1], at.base);
                wgmma_wait<0>();
                pin(out);
                v_ring.release(use);
                softmax.correct(out, correction);
                probabilities = pack_fragments(scores);
            }
            start_output(out, probabilities, at, use);
            wgmma_wait<0>();
            pin(out);
            v_ring.release(use++);

            float factor[1][2], lse[1][2];
            softmax.finish(factor, lse, p.scale_log2);
            softmax.correct(out, factor);
            store_lse(lse, p, item.b * p.NH + item.h, item.i0 + row0);
            if (leader)
                store_wait_read(); /* the item before has left the tile */
            barrier_sync(own, WARPGROUP);
            store_matrices(out_tile, 64 * group, pack_fragments(out));
            fence_async();
            barrier_sync(own, WARPGROUP);
            if (leader)
                store_64(out_tile, 64 * group, call.o, item.i0 + 64 * group, item.h, item.b);
        }
        if (group == 0) barrier_sync(my_turn, 2 * WARPGROUP);
        if (leader) store_wait_read();
    }
#endif
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    const size_t head_bytes = (size_t)p.T * HS * 4, heads = (size_t)p.B * p.NH;
    const unsigned section = (unsigned)max((size_t)1, min(SECTION_BYTES / head_bytes, heads));
    const unsigned count = (unsigned)(count_tiles(p.T, QUERIES) * heads);
    int device, multiprocessors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaMemsetAsync(p.workspace, 0, sizeof(unsigned), stream)); /* the counter */
    launch_kernel(forward_kernel<HS>, min(count, (unsigned)multiprocessors), BLOCK,
                  Blocks<QUERIES, HS>::BYTES + ForwardPlaces<HS>::BYTES + Items::BYTES, stream,
                  forward_call(p), section, count);
}

} // namespace

const Rung forward_10 = {"10_persistent", NEEDS_WGMMA,
                         [](const Problem &) { return sizeof(unsigned); }, NULL,
                         BY_HEAD_SIZE(launch)};
