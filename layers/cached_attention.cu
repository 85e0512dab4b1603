/* Attention over a cache on CUDA: the keys of a head are cut into splits, a block each, and the block
 * that finishes last joins their results (Flash-Decoding, Dao et al. 2023):
 *
 *   m = max s,  l = Σ exp(s - m),  o = Σ exp(s - m) v   over a split's keys,  s = scale · q·k
 *   O = Σ exp(m_i - M) o_i / Σ exp(m_i - M) l_i  over the splits,  M = max m_i
 *
 * Within a block the same sums are kept by teams of lanes, which share out the keys: a team holds a
 * head between its lanes, so that a key is read in one access and its score is a few shuffles. The
 * order of every sum is fixed; only who does the last one is left to chance. */
#include "layers/cached_attention.h"

#include "layers/cuda_common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int SPLIT = 256; /* keys of a block */
constexpr int UNROLL = 4;  /* keys that a team waits for together */
constexpr int MAX_HS = 256;
constexpr float LOG2_E = 1.4426950408889634f;

__global__ __launch_bounds__(THREADS) void store_kernel(real *__restrict__ cache,
                                                        const real *__restrict__ qkv, size_t first,
                                                        size_t n, size_t T, size_t C) {
    const size_t b = first + blockIdx.y, i = blockIdx.x * (size_t)THREADS + threadIdx.x;
    if (i >= n * 2 * C) return;
    const size_t t = i / (2 * C), c = i % (2 * C);
    cache[(b * T + t) * 2 * C + c] = qkv[(3 * t + 1) * C + c];
}

/* exp2(x - most), 0 for x = -inf even if that is the most. */
__device__ __forceinline__ float weight_of(float x, float most) {
    return x == -INFINITY ? 0.0f : exp2f(x - most);
}

typedef struct {
    real *out, *cache;
    const real *qkv;
    const int32_t *positions;
    float *partials;   /* (B,NH,splits,HS + 2): o, m and l of each split */
    unsigned *arrived; /* (B,NH) splits that are done; 0 between calls */
    size_t T, NH, HS;
    int team; /* lanes, a power of two */
} Problem;

/* Joins `count` sums (m, l, o), each `stride` floats from the next, m and l at their own places:
 * element i of O without its division, and the divisor. */
__device__ __forceinline__ float join(const float *m, const float *l, const float *o, int count,
                                      size_t stride_m, size_t stride_o, float *most,
                                      float *divisor) {
    *most = -INFINITY;
    for (int k = 0; k < count; k++) *most = fmaxf(*most, m[k * stride_m]);
    float sum = 0.0f;
    *divisor = 0.0f;
    for (int k = 0; k < count; k++) {
        const float weight = weight_of(m[k * stride_m], *most);
        *divisor += weight * l[k * stride_m];
        sum += weight * o[k * stride_o];
    }
    return sum;
}

/* W: elements of a load. LOADS: of a lane for a key. */
template <int W, int LOADS>
__global__ __launch_bounds__(THREADS) void attention_kernel(Problem p) {
    __shared__ float team_m[THREADS], team_l[THREADS], team_o[THREADS * W * LOADS];
    __shared__ bool last;
    const int team = p.team, teams = THREADS / team;
    const int lane = threadIdx.x % team, mine = threadIdx.x / team;
    const size_t h = blockIdx.y, b = blockIdx.z, HS = p.HS, C = p.NH * HS;
    const int position = p.positions[b], begin = blockIdx.x * SPLIT;
    if (begin > position) return;
    const int end = min(begin + SPLIT, position + 1);
    const real *q = p.qkv + b * 3 * C + h * HS, *new_k = q + C, *new_v = q + 2 * C;
    real *keys = p.cache + b * p.T * 2 * C + h * HS, *values = keys + C;

    float query[LOADS][W] = {}, o[LOADS][W] = {}, m = -INFINITY, l = 0.0f;
    const float scale = LOG2_E * rsqrtf((float)HS);
#pragma unroll
    for (int j = 0; j < LOADS; j++) {
        const size_t i = (size_t)(j * team + lane) * W;
        if (i < HS) load<W>(query[j], q + i);
#pragma unroll
        for (int w = 0; w < W; w++) query[j][w] *= scale;
    }
    /* Every lane of a warp goes through the loop as often as the others: they exchange values. */
    for (int base = begin; base < end; base += teams * UNROLL) {
        float k[UNROLL][LOADS][W], v[UNROLL][LOADS][W], s[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int key = base + u * teams + mine;
            const real *k_row = key == position ? new_k : keys + (size_t)key * 2 * C;
            const real *v_row = key == position ? new_v : values + (size_t)key * 2 * C;
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                const size_t i = (size_t)(j * team + lane) * W;
                const bool exists = key < end && i < HS;
#pragma unroll
                for (int w = 0; w < W; w++) k[u][j][w] = v[u][j][w] = 0.0f;
                if (exists) load<W>(k[u][j], k_row + i);
                if (exists) load<W>(v[u][j], v_row + i);
            }
        }
        float most = m;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            s[u] = 0.0f;
#pragma unroll
            for (int j = 0; j < LOADS; j++)
#pragma unroll
                for (int w = 0; w < W; w++) s[u] += query[j][w] * k[u][j][w];
            for (int distance = team / 2; distance > 0; distance /= 2)
                s[u] += __shfl_xor_sync(0xffffffffu, s[u], distance);
            if (base + u * teams + mine >= end) s[u] = -INFINITY;
            most = fmaxf(most, s[u]);
        }
        const float correction = weight_of(m, most);
        m = most;
        l *= correction;
#pragma unroll
        for (int j = 0; j < LOADS; j++)
#pragma unroll
            for (int w = 0; w < W; w++) o[j][w] *= correction;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const float weight = weight_of(s[u], m);
            l += weight;
#pragma unroll
            for (int j = 0; j < LOADS; j++)
#pragma unroll
                for (int w = 0; w < W; w++) o[j][w] += weight * v[u][j][w];
        }
    }

    const int width = team * LOADS * W; /* HS and the padding */
#pragma unroll
    for (int j = 0; j < LOADS; j++)
#pragma unroll
        for (int w = 0; w < W; w++) team_o[mine * width + (j * team + lane) * W + w] = o[j][w];
    if (lane == 0) team_m[mine] = m, team_l[mine] = l;
    __syncthreads();

    const size_t i = threadIdx.x; /* an element of the head; HS <= THREADS */
    const int splits = position / SPLIT + 1;
    float sum = 0.0f, most, divisor = 1.0f;
    if (i < HS) sum = join(team_m, team_l, team_o + i, teams, 1, width, &most, &divisor);
    if (position / SPLIT == blockIdx.x && i < HS) {
        keys[(size_t)position * 2 * C + i] = new_k[i];
        values[(size_t)position * 2 * C + i] = new_v[i];
    }
    if (splits > 1) {
        const size_t stride = HS + 2, head = b * p.NH + h;
        float *partials = p.partials + head * gridDim.x * stride;
        float *partial = partials + blockIdx.x * stride;
        if (i < HS) partial[i] = sum;
        if (i == 0) partial[HS] = most, partial[HS + 1] = divisor;
        __threadfence();
        __syncthreads();
        if (i == 0) last = atomicAdd(&p.arrived[head], 1u) == (unsigned)splits - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        if (i < HS)
            sum = join(partials + HS, partials + HS + 1, partials + i, splits, stride, stride,
                       &most, &divisor);
        if (i == 0) p.arrived[head] = 0;
    }
    if (i < HS) p.out[b * C + h * HS + i] = from_float<real>(sum / divisor);
}

size_t splits_of(size_t T) { return div_up(T, (size_t)SPLIT); }

/* The counters, which come before the partial sums. */
size_t counters_bytes(size_t B, size_t NH) { return B * NH * sizeof(unsigned); }

} // namespace

void LAYER(cache_store)(void *cache, const void *qkv, size_t first, size_t count, size_t n,
                        size_t T, size_t C, Device *device) {
    const dim3 grid(blocks_for(n * 2 * C, THREADS), (unsigned)count);
    store_kernel<<<grid, THREADS, 0, stream_of(device)>>>((real *)cache, (const real *)qkv, first,
                                                          n, T, C);
    LAUNCH_CHECK();
}

size_t LAYER(cached_attention_workspace)(size_t B, size_t T, size_t NH, size_t HS) {
    return counters_bytes(B, NH) + B * NH * splits_of(T) * (HS + 2) * sizeof(float);
}

void LAYER(cached_attention_forward)(void *out, void *cache, const void *qkv,
                                     const int32_t *positions, void *workspace, size_t B, size_t T,
                                     size_t NH, size_t HS, Device *device) {
    if (HS > MAX_HS || B > 65535)
        error_fatal(__FILE__, __LINE__, "cached_attention_forward: %zu sequences, head size %zu", B,
                    HS);
    const bool aligned = vectorisable(HS, {cache, qkv});
    const size_t width = aligned ? VECTOR : 1;
    int team = 1;
    while (team < WARP && team * width < HS) team *= 2;
    const size_t loads = div_up(HS, team * width);
    const Problem p = {(real *)out,
                       (real *)cache,
                       (const real *)qkv,
                       positions,
                       (float *)((char *)workspace + counters_bytes(B, NH)),
                       (unsigned *)workspace,
                       T,
                       NH,
                       HS,
                       team};
    const dim3 grid((unsigned)splits_of(T), (unsigned)NH, (unsigned)B);
    auto run = aligned ? (loads == 1 ? attention_kernel<VECTOR, 1> : attention_kernel<VECTOR, 2>)
                       : attention_kernel<1, 8>;
    run<<<grid, THREADS, 0, stream_of(device)>>>(p);
    LAUNCH_CHECK();
}
