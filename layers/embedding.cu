/* Token and position embeddings. The forward gathers rows; the backward adds them up again, without
 * atomics, so that equal inputs give equal bits.
 *
 * A token may occur once or fill a seventh of the batch (the space, in characters). To be fast at
 * both ends, the positions are sorted by token (stably, so that the order is unique) and cut into
 * chunks of equal length whatever the tokens, each summed by itself:
 *
 *   token     a a a b | b b b b | b b c c | d e e f
 *   chunk        0    |    1    |    2    |    3
 *
 * A run of equal tokens within one chunk (a, c, d, e, f) goes straight to its gradient. One that
 * crosses chunks (b) leaves a partial sum in each, and a second kernel adds those in order. */
#include "layers/embedding.h"

#include <cub/device/device_radix_sort.cuh>

#include "layers/cuda_common.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int IN_FLIGHT = 4; /* rows that a thread waits for together */

/* Entries of a chunk: short, so that a small batch has enough chunks to fill the GPU. */
constexpr size_t MIN_CHUNK = 32;
/* Longer chunks keep the partial sums within this. */
constexpr size_t PARTIALS_BYTES = SCRATCH_FIXED_BYTES / 2;

/* out[n] = dropout(wte[tokens[n]] + wpe[n mod T]), a warp a row. */
template <int W>
__global__ __launch_bounds__(THREADS) void forward_kernel(
    real *__restrict__ out, const int32_t *__restrict__ tokens, const real *__restrict__ wte,
    const real *__restrict__ wpe, size_t N, size_t T, size_t C, Dropout dropout) {
    const size_t n = blockIdx.x * (size_t)WARPS + threadIdx.x / WARP;
    if (n >= N) return;
    const real *token_row = wte + (size_t)tokens[n] * C, *position_row = wpe + n % T * C;
#pragma unroll 2
    for (size_t c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        float value[W], position[W];
        load<W>(value, token_row + c);
        load<W>(position, position_row + c);
#pragma unroll
        for (int j = 0; j < W; j++) value[j] += position[j];
        dropout_apply<W>(value, n * C + c, dropout);
        store<W>(out + n * C + c, value);
    }
}

/* out[n] = wte[tokens[n]] + wpe[positions[n]], one element a thread: there are few rows. */
__global__ __launch_bounds__(THREADS) void step_kernel(real *__restrict__ out,
                                                       const int32_t *__restrict__ tokens,
                                                       const int32_t *__restrict__ positions,
                                                       const real *__restrict__ wte,
                                                       const real *__restrict__ wpe, size_t N,
                                                       size_t C) {
    const size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
    if (i >= N * C) return;
    const size_t n = i / C, c = i % C;
    const size_t token = tokens[n] < 0 ? 0 : (size_t)tokens[n];
    out[i] = from_float<real>(to_float(wte[token * C + c]) +
                              to_float(wpe[(size_t)positions[n] * C + c]));
}

/* dwpe[t] += Σ_b dout[b,t]. A thread adds W columns of one position over the batch. */
template <int W>
__global__ __launch_bounds__(THREADS) void position_kernel(acc *__restrict__ dwpe,
                                                           const real *__restrict__ dout, size_t B,
                                                           size_t T, size_t C, Dropout dropout) {
    const size_t i = (blockIdx.x * (size_t)THREADS + threadIdx.x) * W; /* in (T,C) */
    if (i >= T * C) return;
    float sum[W];
    load<W>(sum, dwpe + i);
    for (size_t b = 0; b < B; b += IN_FLIGHT) {
        float value[IN_FLIGHT][W] = {};
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (b + u < B) load<W>(value[u], dout + (b + u) * T * C + i);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            dropout_apply<W>(value[u], (b + u) * T * C + i, dropout);
#pragma unroll
            for (int j = 0; j < W; j++) sum[j] += value[u][j];
        }
    }
    store<W>(dwpe + i, sum);
}

/* values[n] = n. */
__global__ __launch_bounds__(THREADS) void iota_kernel(uint32_t *values, uint32_t N) {
    const uint32_t n = blockIdx.x * THREADS + threadIdx.x;
    if (n < N) values[n] = n;
}

/* The batch sorted by token, in chunks. */
typedef struct {
    const uint32_t *tokens, *positions; /* (N) */
    uint32_t N, chunk;                  /* entries in all; of a chunk, the last one excepted */
    acc *partials; /* (chunks,2,C): of a run that came from the chunk before, of one that starts */
                   /* here and goes on                                                           */
} Sorted;

enum { RUN_CONTINUED, RUN_STARTED, RUN_KINDS };

__device__ __forceinline__ size_t partial_offset(uint32_t chunk, int kind, size_t C) {
    return (chunk * (size_t)RUN_KINDS + kind) * C;
}

/* Sums the runs of one chunk. A warp takes WARP * W columns of it. */
template <int W>
__global__ __launch_bounds__(THREADS) void runs_kernel(acc *__restrict__ dwte,
                                                       const real *__restrict__ dout, Sorted sorted,
                                                       uint32_t chunks, uint32_t tiles, size_t C,
                                                       Dropout dropout) {
    const size_t warp = blockIdx.x * (size_t)WARPS + threadIdx.x / WARP;
    const uint32_t chunk = (uint32_t)(warp / tiles);
    const size_t c = (warp % tiles * WARP + threadIdx.x % WARP) * W;
    if (chunk >= chunks || c >= C) return;
    const uint32_t begin = chunk * sorted.chunk, end = min(begin + sorted.chunk, sorted.N);
    const bool from_before = begin > 0 && sorted.tokens[begin - 1] == sorted.tokens[begin];
    const bool into_next = end < sorted.N && sorted.tokens[end] == sorted.tokens[end - 1];
    const uint32_t first = sorted.tokens[begin], last = sorted.tokens[end - 1];

    float sum[W] = {};
    auto finish_run = [&](uint32_t token) {
        if (token == first && from_before) {
            store<W>(sorted.partials + partial_offset(chunk, RUN_CONTINUED, C) + c, sum);
        } else if (token == last && into_next) {
            store<W>(sorted.partials + partial_offset(chunk, RUN_STARTED, C) + c, sum);
        } else {
            acc *row = dwte + token * C + c;
            float total[W];
            load<W>(total, row);
#pragma unroll
            for (int j = 0; j < W; j++) total[j] += sum[j];
            store<W>(row, total);
        }
    };

    uint32_t run = first;
    for (uint32_t i = begin; i < end; i += IN_FLIGHT) {
        float value[IN_FLIGHT][W] = {};
        uint32_t token[IN_FLIGHT], position[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) { /* past the end: zeros for the last run */
            token[u] = i + u < end ? sorted.tokens[i + u] : last;
            position[u] = i + u < end ? sorted.positions[i + u] : 0;
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (i + u < end) load<W>(value[u], dout + position[u] * C + c);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            dropout_apply<W>(value[u], position[u] * C + c, dropout);
            if (token[u] != run) {
                finish_run(run);
                run = token[u];
#pragma unroll
                for (int j = 0; j < W; j++) sum[j] = 0.0f;
            }
#pragma unroll
            for (int j = 0; j < W; j++) sum[j] += value[u][j];
        }
    }
    finish_run(run);
}

/* Adds the partial sums of the run that starts in this chunk and goes on, if there is one: those of
 * its chunks are shared out to the warps of the block, whose sums are then added in order. */
template <int W>
__global__ __launch_bounds__(THREADS) void crossing_runs_kernel(acc *__restrict__ dwte,
                                                                Sorted sorted, uint32_t chunks,
                                                                size_t C) {
    __shared__ float sums[WARPS][WARP * W];
    const uint32_t chunk = blockIdx.x, begin = chunk * sorted.chunk, end = begin + sorted.chunk;
    if (end >= sorted.N) return; /* the last chunk */
    const uint32_t token = sorted.tokens[end - 1];
    const bool starts = begin == 0 || sorted.tokens[begin - 1] != token;
    if (sorted.tokens[end] != token || !starts) return;

    /* The run ends in the last chunk whose first token is this one. */
    uint32_t low = chunk + 1, high = chunks - 1;
    while (low < high) {
        const uint32_t middle = high - (high - low) / 2;
        if (sorted.tokens[(size_t)middle * sorted.chunk] == token)
            low = middle;
        else
            high = middle - 1;
    }

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t c = (blockIdx.y * (size_t)WARP + lane) * W;
    float sum[W] = {};
    if (c < C) {
#pragma unroll 4
        for (uint32_t k = chunk + warp; k <= low; k += WARPS) {
            float value[W];
            const int kind = k == chunk ? RUN_STARTED : RUN_CONTINUED;
            load<W>(value, sorted.partials + partial_offset(k, kind, C) + c);
#pragma unroll
            for (int j = 0; j < W; j++) sum[j] += value[j];
        }
    }
#pragma unroll
    for (int j = 0; j < W; j++) sums[warp][lane * W + j] = sum[j];
    __syncthreads();
    for (int j = threadIdx.x; j < WARP * W; j += THREADS) {
        const size_t column = blockIdx.y * (size_t)(WARP * W) + j;
        if (column >= C) break;
        acc total = dwte[token * C + column];
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][j];
        dwte[token * C + column] = total;
    }
}

/* A part of the scratch, 256-byte aligned as the whole is. */
template <typename T> T *take(char **scratch, size_t n) {
    T *part = (T *)*scratch;
    *scratch += div_up(n * sizeof(T), (size_t)256) * 256;
    return part;
}

/* Sorts positions 0 … N-1 by token. */
Sorted sort_tokens(const int32_t *tokens, size_t N, size_t C, size_t V, Device *device) {
    if (N >= (size_t)1 << 31)
        error_fatal(__FILE__, __LINE__, "%zu tokens in a batch; fewer than 2^31 are possible", N);
    int bits = 1; /* of a token */
    while (bits < 31 && V > (size_t)1 << bits) bits++;
    const size_t chunk_rows = PARTIALS_BYTES / (RUN_KINDS * C * sizeof(acc));
    const size_t most_chunks = chunk_rows < 1 ? 1 : chunk_rows;
    size_t chunk = div_up(N, most_chunks);
    if (chunk < MIN_CHUNK) chunk = MIN_CHUNK;

    char *scratch = (char *)device->scratch;
    acc *partials = take<acc>(&scratch, div_up(N, chunk) * RUN_KINDS * C);
    uint32_t *positions = take<uint32_t>(&scratch, N);
    uint32_t *sorted_positions = take<uint32_t>(&scratch, N);
    uint32_t *sorted_tokens = take<uint32_t>(&scratch, N);
    const uint32_t *keys = (const uint32_t *)tokens; /* none is negative */
    const cudaStream_t stream = stream_of(device);

    size_t sort_bytes = 0;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, sort_bytes, keys, sorted_tokens, positions,
                                               sorted_positions, (int)N, 0, bits, stream));
    void *sort_scratch = take<char>(&scratch, sort_bytes);
    scratch_of(device, (size_t)(scratch - (char *)device->scratch));

    iota_kernel<<<blocks_for(N, THREADS), THREADS, 0, stream>>>(positions, (uint32_t)N);
    LAUNCH_CHECK();
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(sort_scratch, sort_bytes, keys, sorted_tokens,
                                               positions, sorted_positions, (int)N, 0, bits,
                                               stream));
    const Sorted sorted = {sorted_tokens, sorted_positions, (uint32_t)N, (uint32_t)chunk, partials};
    return sorted;
}

template <int W>
void forward(real *out, const int32_t *tokens, const real *wte, const real *wpe, size_t B, size_t T,
             size_t C, Dropout dropout, Device *device) {
    const size_t N = B * T;
    forward_kernel<W><<<blocks_for(N, WARPS), THREADS, 0, stream_of(device)>>>(
        out, tokens, wte, wpe, N, T, C, dropout);
    LAUNCH_CHECK();
}

template <int W>
void backward(acc *dwte, acc *dwpe, const real *dout, const int32_t *tokens, size_t B, size_t T,
              size_t C, size_t V, Dropout dropout, Device *device) {
    const cudaStream_t stream = stream_of(device);
    position_kernel<W><<<blocks_for(T * C, THREADS * W), THREADS, 0, stream>>>(dwpe, dout, B, T, C,
                                                                               dropout);
    LAUNCH_CHECK();

    const Sorted sorted = sort_tokens(tokens, B * T, C, V, device);
    const uint32_t chunks = div_up(sorted.N, sorted.chunk), tiles = blocks_for(C, WARP * W);
    runs_kernel<W><<<blocks_for((size_t)chunks * tiles, WARPS), THREADS, 0, stream>>>(
        dwte, dout, sorted, chunks, tiles, C, dropout);
    LAUNCH_CHECK();
    constexpr int FLOATS = W == 1 ? 1 : 4; /* partial sums are floats whatever real is */
    crossing_runs_kernel<FLOATS>
        <<<dim3(chunks, blocks_for(C, WARP * FLOATS)), THREADS, 0, stream>>>(dwte, sorted, chunks,
                                                                            C);
    LAUNCH_CHECK();
}

} // namespace

void LAYER(embedding_forward)(void *out, const int32_t *tokens, const void *wte, const void *wpe,
                              size_t B, size_t T, size_t C, Dropout dropout, Device *device) {
    auto run = vectorisable(C, {out, wte, wpe}) ? forward<VECTOR> : forward<1>;
    run((real *)out, tokens, (const real *)wte, (const real *)wpe, B, T, C, dropout, device);
}

void LAYER(embedding_step)(void *out, const int32_t *tokens, const int32_t *positions,
                           const void *wte, const void *wpe, size_t N, size_t C, Device *device) {
    step_kernel<<<blocks_for(N * C, THREADS), THREADS, 0, stream_of(device)>>>(
        (real *)out, tokens, positions, (const real *)wte, (const real *)wpe, N, C);
    LAUNCH_CHECK();
}

void LAYER(embedding_backward)(void *dwte, void *dwpe, const void *dout, const int32_t *tokens,
                               size_t B, size_t T, size_t C, size_t V, Dropout dropout,
                               Device *device) {
    auto run = vectorisable(C, {dwte, dwpe, dout}) ? backward<VECTOR> : backward<1>;
    run((acc *)dwte, (acc *)dwpe, (const real *)dout, tokens, B, T, C, V, dropout, device);
}
