/* Drawing tokens on CUDA, a block a sequence.
 *
 * The two bounds, of the k-th largest logit and of the nucleus, are found bit by bit: 32 counts or
 * sums over all values. To have few values to go through, those that can matter are first listed
 * in shared memory. For top_k: each thread knows the largest of the logits that it has read; the
 * k-th largest of these is no larger than the k-th largest of all, so whatever is below it can be
 * left out, and little more than k logits are not. If the list overflows, all values are gone
 * through. */
#include "layers/cuda_common.cuh"
#include "layers/sample_rule.h"

namespace {

constexpr int THREADS = 1024, WARPS = THREADS / WARP;
constexpr int LISTED = 4096;
static_assert(WARPS == WARP, "a warp adds the sums of all warps, and searches them");

typedef unsigned long long u64;

/* The sum of a warp's values from its first lane to this one. */
__device__ __forceinline__ u64 warp_prefix(u64 x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const u64 before = __shfl_up_sync(0xffffffffu, x, distance);
        if (lane >= distance) x += before;
    }
    return x;
}

struct Add {
    __device__ u64 operator()(u64 a, u64 b) const { return a + b; }
};
struct Larger {
    __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

/* Over the block; every thread calls it and gets the result. */
template <typename Join> __device__ __forceinline__ u64 block_join(u64 x, Join join) {
    __shared__ u64 warps[WARPS];
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = join(x, __shfl_xor_sync(0xffffffffu, x, distance));
    __syncthreads(); /* the results of an earlier call have been read */
    if (lane == 0) warps[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warps[lane];
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = join(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

/* The values that can matter, in no particular order. */
typedef struct {
    uint32_t values[LISTED];
    unsigned count; /* more than LISTED: the list is incomplete */
} List;

__device__ __forceinline__ void list_clear(List *list) {
    __syncthreads(); /* the list has been read */
    if (threadIdx.x == 0) list->count = 0;
    __syncthreads();
}

/* Called by whole warps. */
__device__ __forceinline__ void list_add(List *list, uint32_t value, bool wanted) {
    const unsigned lanes = __ballot_sync(0xffffffffu, wanted), lane = threadIdx.x % WARP;
    unsigned first = 0;
    if (lane == 0 && lanes) first = atomicAdd(&list->count, (unsigned)__popc(lanes));
    const unsigned place =
        __shfl_sync(0xffffffffu, first, 0) + __popc(lanes & ((1u << lane) - 1));
    if (wanted && place < LISTED) list->values[place] = value;
}

/* The largest bound from which the values number, or with SUM sum to, at least `least`. */
template <bool SUM>
__device__ __forceinline__ uint32_t find_bound(const uint32_t *values, size_t n, u64 least) {
    uint32_t bound = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        u64 measure = 0;
        for (size_t i = threadIdx.x; i < n; i += THREADS)
            if (values[i] >= (bound | bit)) measure += SUM ? values[i] : 1;
        if (block_join(measure, Add()) >= least) bound |= bit;
    }
    return bound;
}

/* The k-th largest of the threads' values, k <= THREADS. */
__device__ __forceinline__ uint32_t kth_of_threads(uint32_t value, int k) {
    uint32_t bound = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (__syncthreads_count(value >= (bound | bit)) >= k) bound |= bit;
    return bound;
}

/* The bound of the k largest keys, given the largest that this thread has read. */
__device__ __forceinline__ uint32_t top_k_bound(List *list, const uint32_t *keys, size_t V,
                                                size_t k, uint32_t largest) {
    list_clear(list);
    const uint32_t at_least = k <= THREADS ? kth_of_threads(largest, (int)k) : 0;
    for (size_t base = 0; base < V; base += THREADS) {
        const size_t v = base + threadIdx.x;
        const uint32_t key = v < V ? keys[v] : 0;
        list_add(list, key, v < V && key >= at_least);
    }
    __syncthreads();
    const bool complete = list->count <= LISTED;
    return find_bound<false>(complete ? list->values : keys, complete ? list->count : V, k);
}

/* The first v whose running sum of the weights >= bound exceeds the target, which is below their
 * whole sum. A warp each adds up a stretch of the vocabulary; the one in whose stretch the target
 * falls goes through it again. Called by the whole block; the answer is thread 0's. */
__device__ __forceinline__ int32_t pick(const uint32_t *weights, size_t V, uint32_t bound,
                                        u64 target) {
    __shared__ u64 sums[WARPS];
    __shared__ int32_t answer;
    const size_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t stretch = div_up(V, (size_t)THREADS) * WARP;
    const size_t begin = warp * stretch, end = begin + stretch < V ? begin + stretch : V;
    u64 sum = 0;
    for (size_t v = begin + lane; v < end; v += WARP)
        if (weights[v] >= bound) sum += weights[v];
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();

    const u64 through = warp_prefix(sums[lane]); /* of the stretches up to number `lane` */
    const unsigned beyond = __ballot_sync(0xffffffffu, through > target);
    const unsigned mine = (unsigned)__ffs(beyond) - 1;
    u64 before = __shfl_sync(0xffffffffu, through - sums[lane], mine);
    if (warp == mine) {
        for (size_t base = begin; base < end; base += WARP) {
            const size_t v = base + lane;
            const u64 weight = v < end && weights[v] >= bound ? weights[v] : 0;
            const u64 running = before + warp_prefix(weight);
            const unsigned over = __ballot_sync(0xffffffffu, running > target);
            if (over) {
                if (lane == 0) answer = (int32_t)(base + __ffs(over) - 1);
                break;
            }
            before = __shfl_sync(0xffffffffu, running, WARP - 1);
        }
    }
    __syncthreads();
    return answer;
}

/* Thread 0's answer counts. */
__device__ int32_t draw(uint32_t *weights, const float *logits, size_t V, const Sampling &sampling,
                        uint64_t n, uint32_t sequence) {
    __shared__ List list;
    uint32_t largest = 0;
    size_t place = 0;
    for (size_t v = threadIdx.x; v < V; v += THREADS) {
        const uint32_t key = sample_key(logits[v]);
        weights[v] = key;
        if (key > largest) largest = key, place = v;
    }
    /* The first of the largest: the complement makes smaller places larger. */
    const u64 best = block_join((u64)largest << 32 | (uint32_t)~(uint32_t)place, Larger());
    const uint32_t best_key = (uint32_t)(best >> 32);
    if (!sample_key_finite(best_key)) return -1;
    if (sampling.temperature == 0.0f) return (int32_t) ~(uint32_t)best;

    uint32_t bound = 0;
    if (sampling.top_k > 0 && sampling.top_k < V)
        bound = top_k_bound(&list, weights, V, sampling.top_k, largest);
    const float most = sample_logit(best_key);
    list_clear(&list);
    u64 total = 0;
    for (size_t base = 0; base < V; base += THREADS) {
        const size_t v = base + threadIdx.x;
        uint32_t weight = 0;
        if (v < V && weights[v] >= bound)
            weight = sample_weight((logits[v] - most) / sampling.temperature);
        if (v < V) weights[v] = weight;
        if (sampling.top_p < 1.0f) list_add(&list, weight, weight > 0);
        total += weight;
    }
    total = block_join(total, Add());
    bound = 0;
    if (sampling.top_p < 1.0f) {
        const bool complete = list.count <= LISTED;
        bound = find_bound<true>(complete ? list.values : weights, complete ? list.count : V,
                                 sample_nucleus(sampling.top_p, total));
        u64 nucleus = 0;
        for (size_t v = threadIdx.x; v < V; v += THREADS)
            if (weights[v] >= bound) nucleus += weights[v];
        total = block_join(nucleus, Add());
    }
    return pick(weights, V, bound, sample_random(sampling.seed, n, sequence, total));
}

__global__ __launch_bounds__(THREADS) void sample_kernel(int32_t *tokens, int32_t *positions,
                                                         uint64_t *draws, uint32_t *weights,
                                                         const float *logits, size_t V,
                                                         Sampling sampling) {
    const size_t n = blockIdx.x;
    const int32_t token =
        draw(weights + n * V, logits + n * V, V, sampling, draws[n], (uint32_t)n);
    if (threadIdx.x > 0) return;
    tokens[n] = token;
    positions[n]++;
    draws[n]++;
}

} // namespace

void LAYER(sample_forward)(int32_t *tokens, int32_t *positions, uint64_t *draws, uint32_t *weights,
                           const void *logits, size_t N, size_t V, Sampling sampling,
                           Device *device) {
    sample_kernel<<<blocks_for(N, 1), THREADS, 0, stream_of(device)>>>(
        tokens, positions, draws, weights, (const float *)logits, V, sampling);
    LAUNCH_CHECK();
}
