/* Softmax over keys that arrive tile by tile (Milakov, Gimelshein 2018; Algorithm 1 of Dao et al.
 * 2022, arXiv 2205.14135, lines 10 to 13).
 *
 * For one query, m is the largest score so far and ℓ = Σ exp(s - m) over the keys so far. A tile
 * with scores s_j = scale · q k_j changes them to (m old, m' new, throughout attention/)
 *
 *   m' = max(m, max_j s_j),   c = exp(m - m'),   p_j = exp(s_j - m'),   ℓ' = c ℓ + Σ_j p_j
 *
 * and the output, kept normalised over the keys so far, to
 *
 *   O' = (c ℓ / ℓ') O + Σ_j (p_j / ℓ') v_j
 *
 * At the end O is the attention's output and m + log ℓ its LSE. While every score is -inf (all keys
 * masked), m' = -inf would make s - m' = NaN; 0 in its place gives p_j = 0, ℓ' = 0, O' = 0. */
#ifndef ATTENTION_ONLINE_SOFTMAX_H
#define ATTENTION_ONLINE_SOFTMAX_H

#include <math.h>
#include <stddef.h>

#include "runtime/real.h"
#include "runtime/vector_math.h"

#define SOFTMAX_QUERIES 64 /* queries side by side, the lanes of the vectors */

typedef struct {
    real max[SOFTMAX_QUERIES];        /* m */
    real sum[SOFTMAX_QUERIES];        /* ℓ */
    real correction[SOFTMAX_QUERIES]; /* c ℓ / ℓ' of the last tile: what O is multiplied by */
} OnlineSoftmax;

static inline void online_softmax_start(OnlineSoftmax *state) {
    for (int q = 0; q < SOFTMAX_QUERIES; q++) {
        state->max[q] = -(real)INFINITY;
        state->sum[q] = 0;
    }
}

/* tile (keys, SOFTMAX_QUERIES): (Q Kᵀ)ᵀ in, p_j / ℓ' out. The scores are scale · Q Kᵀ; scaling Q
 * instead would round differently from the scores that the backward recomputes, and exp of their
 * difference to LSE shows it when scores are large. Queries are contiguous, so that maxima, sums
 * and exponentials of 64 queries are plain vector code without a reduction across lanes. */
static inline void online_softmax_update(OnlineSoftmax *state, real *tile, size_t keys,
                                         real scale) {
    real max[SOFTMAX_QUERIES], sum[SOFTMAX_QUERIES], inverse[SOFTMAX_QUERIES];
    for (int q = 0; q < SOFTMAX_QUERIES; q++) max[q] = state->max[q];
    for (size_t j = 0; j < keys; j++) {
        real *s = tile + j * SOFTMAX_QUERIES;
#pragma omp simd
        for (int q = 0; q < SOFTMAX_QUERIES; q++) {
            s[q] *= scale;
            max[q] = s[q] > max[q] ? s[q] : max[q];
        }
    }
#pragma omp simd
    for (int q = 0; q < SOFTMAX_QUERIES; q++) {
        real old = state->max[q];
        state->max[q] = max[q];
        max[q] = max[q] == -(real)INFINITY ? 0 : max[q];
        sum[q] = state->sum[q] * real_exp(old - max[q]);
        state->sum[q] = sum[q]; /* c ℓ, until ℓ' is known */
    }
    for (size_t j = 0; j < keys; j++) {
        real *s = tile + j * SOFTMAX_QUERIES;
#pragma omp simd
        for (int q = 0; q < SOFTMAX_QUERIES; q++) {
            s[q] = real_exp(s[q] - max[q]);
            sum[q] += s[q];
        }
    }
#pragma omp simd
    for (int q = 0; q < SOFTMAX_QUERIES; q++) {
        inverse[q] = sum[q] == 0 ? 0 : 1 / sum[q];
        state->correction[q] = state->sum[q] * inverse[q];
        state->sum[q] = sum[q];
    }
    for (size_t j = 0; j < keys; j++) {
        real *s = tile + j * SOFTMAX_QUERIES;
#pragma omp simd
        for (int q = 0; q < SOFTMAX_QUERIES; q++) s[q] *= inverse[q];
    }
}

/* LSE of query q; -inf if it saw no key. */
static inline real online_softmax_lse(const OnlineSoftmax *state, size_t q) {
    return state->max[q] + (real)log((double)state->sum[q]);
}

#endif
