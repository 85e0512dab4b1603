/* Token and position embeddings on the CPU.
 *
 * The backward scatters rows into dwte, where tokens repeat. Threads share out the channels, and
 * each goes through all positions in order: no two write the same place, and every sum has one
 * order whatever the number of threads. */
#include "layers/embedding.h"

#include "layers/dropout_factors.h"

/* Channels of one thread's share in the backward: two cache lines of floats. */
#define CHANNELS 32

void LAYER(embedding_forward)(void *out_, const int32_t *tokens, const void *wte_, const void *wpe_,
                              size_t B, size_t T, size_t C, Dropout dropout, Device *device) {
    (void)device;
    real *out = out_;
    const real *wte = wte_, *wpe = wpe_;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * T; n++) {
        const real *token = wte + (size_t)tokens[n] * C, *position = wpe + n % T * C;
        for (size_t first = 0; first < C; first += DROPOUT_TILE) {
            size_t count = C - first < DROPOUT_TILE ? C - first : DROPOUT_TILE;
            real *row = out + n * C + first;
            float factors[DROPOUT_TILE];
            dropout_factors(factors, n * C + first, count, dropout);
#pragma omp simd
            for (size_t c = 0; c < count; c++)
                row[c] = (token[first + c] + position[first + c]) * factors[c];
        }
    }
}

void LAYER(embedding_step)(void *out_, const int32_t *tokens, const int32_t *positions,
                           const void *wte_, const void *wpe_, size_t N, size_t C,
                           Device *device) {
    (void)device;
    real *out = out_;
    const real *wte = wte_, *wpe = wpe_;
    for (size_t n = 0; n < N; n++) {
        const real *token = wte + (tokens[n] < 0 ? 0 : (size_t)tokens[n]) * C;
        const real *position = wpe + (size_t)positions[n] * C;
        for (size_t c = 0; c < C; c++) out[n * C + c] = token[c] + position[c];
    }
}

void LAYER(embedding_backward)(void *dwte_, void *dwpe_, const void *dout_, const int32_t *tokens,
                               size_t B, size_t T, size_t C, size_t V, Dropout dropout,
                               Device *device) {
    (void)V;
    (void)device;
    acc *dwte = dwte_, *dwpe = dwpe_;
    const real *dout = dout_;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < C; first += CHANNELS) {
        size_t count = C - first < CHANNELS ? C - first : CHANNELS;
        for (size_t n = 0; n < B * T; n++) {
            acc *dtoken = dwte + (size_t)tokens[n] * C + first;
            acc *dposition = dwpe + n % T * C + first;
            const real *row = dout + n * C + first;
            float factors[CHANNELS];
            dropout_factors(factors, n * C + first, count, dropout);
#pragma omp simd
            for (size_t c = 0; c < count; c++) {
                acc d = row[c] * factors[c];
                dtoken[c] += d;
                dposition[c] += d;
            }
        }
    }
}
