/* What attention costs on paper: bytes on chip, operations, and bytes moved, as functions of the
 * shape and the tile. Nothing here is measured; io_report.py puts measurements beside it.
 *
 * "Moved" counts what a kernel asks of the memory system (the L2 of a GPU). What then comes from
 * DRAM is between that and the minimum, each tensor once, as the caches would have it. */
#ifndef DEV_ATTENTION_IO_MODEL_H
#define DEV_ATTENTION_IO_MODEL_H

#include "attention/attention.h"
#include "attention/mask.h"

/* One head; queries and keys are both T long. */
typedef struct {
    size_t T, HS;
    size_t Br, Bc; /* queries and keys of a tile */
    size_t bytes;  /* of an element of Q, K, V, O and their gradients */
    AttentionMask mask;
} IoShape;

/* --- on chip --- */

/* Q (Br,d), K and V (Bc,d), S (Br,Bc), O (Br,d). */
static inline size_t io_tile_elements(const IoShape *s) {
    return (s->Br + 2 * s->Bc) * s->HS + s->Br * s->Bc + s->Br * s->HS;
}

/* --- operations --- */

/* One product of the T×T kind, Q Kᵀ or P V; causality needs half. */
static inline double io_product_operations(const IoShape *s) {
    const double all = 2.0 * (double)s->T * (double)s->T * (double)s->HS;
    return s->mask == ATTENTION_CAUSAL ? all / 2 : all;
}

/* --- tiles --- */

static inline size_t io_round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static inline size_t io_smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Keys read, summed over the query tiles: T²/Br, or about half. */
static inline double io_keys_read(const IoShape *s) {
    double keys = 0;
    for (size_t i = 0; i < s->T; i += s->Br) {
        const size_t last = io_smaller(i + s->Br, s->T) - 1;
        const size_t seen = keys_seen(s->mask, last, s->T, s->T);
        keys += (double)io_smaller(io_round_up(seen, s->Bc), s->T);
    }
    return keys;
}

/* Queries read, summed over the key tiles: T²/Bc, or about half. */
static inline double io_queries_read(const IoShape *s) {
    double queries = 0;
    for (size_t j = 0; j < s->T; j += s->Bc)
        queries += (double)(s->T - first_query(s->mask, j, s->T, s->T) / s->Br * s->Br);
    return queries;
}

/* Scores that the mask leaves: T², or T(T+1)/2. */
static inline double io_scores_needed(const IoShape *s) {
    const double T = (double)s->T;
    return s->mask == ATTENTION_CAUSAL ? T * (T + 1) / 2 : T * T;
}

/* Scores computed in whole tiles. */
static inline double io_scores_computed(const IoShape *s) {
    double scores = 0;
    for (size_t i = 0; i < s->T; i += s->Br) {
        const size_t last = io_smaller(i + s->Br, s->T) - 1;
        scores += (double)(s->Br * io_round_up(keys_seen(s->mask, last, s->T, s->T), s->Bc));
    }
    return scores;
}

/* --- bytes moved, forward --- */

/* A (T,HS) tensor once. */
static inline double io_tensor(const IoShape *s) {
    return (double)s->T * (double)s->HS * (double)s->bytes;
}

/* Q, K, V read, O and LSE written. */
static inline double io_forward_minimum(const IoShape *s) {
    return 4 * io_tensor(s) + 4.0 * (double)s->T;
}

/* Queries outside: Q once, K and V again for every query tile. T·d·(1 + 2·T/Br) elements read. */
static inline double io_forward_reads(const IoShape *s) {
    return io_tensor(s) + 2 * io_keys_read(s) * (double)(s->HS * s->bytes);
}

static inline double io_forward_tiled(const IoShape *s) {
    return io_forward_reads(s) + io_tensor(s) + 4.0 * (double)s->T;
}

/* Keys outside, Algorithm 1 of 2022: K and V once; Q, O, m, ℓ read and O, m, ℓ written for every
 * pair of tiles. */
static inline double io_forward_2022(const IoShape *s) {
    return 2 * io_tensor(s) + io_queries_read(s) * (3.0 * (double)(s->HS * s->bytes) + 4 * 4);
}

/* Naive in three kernels that keep S and P in the tensors' type: S written, S read and P written, P
 * read. */
static inline double io_forward_naive(const IoShape *s) {
    const double T = (double)s->T;
    return 4 * T * T * (double)s->bytes + io_forward_minimum(s);
}

/* Naive as it is here (attention/naive.cu): S is float; the softmax reads what the mask leaves. */
static inline double io_forward_naive_here(const IoShape *s) {
    const double T = (double)s->T;
    return T * T * (4 + 2 * (double)s->bytes) + 4 * io_scores_needed(s) + io_forward_minimum(s);
}

/* --- bytes moved, backward --- */

/* Q, K, V, O, dO and LSE read, dQ, dK and dV written. */
static inline double io_backward_minimum(const IoShape *s) {
    return 8 * io_tensor(s) + 4.0 * (double)s->T;
}

/* D = rowsum(dO ∘ O), a pass of its own in every kernel here. */
static inline double io_statistics(const IoShape *s) {
    return 2 * io_tensor(s) + 4.0 * (double)s->T;
}

/* A block for each key tile, Algorithm 2 of 2023: K and V once; Q, dO, LSE, D read and a float dQ
 * read and written for every pair of tiles; dQ then converted. A kernel that has the L2 do the
 * additions sends it only one of the two. */
static inline double io_backward_2023(const IoShape *s) {
    const double row = (double)s->HS;
    return io_statistics(s) + 2 * io_tensor(s) +
           io_queries_read(s) * (2 * row * (double)s->bytes + 2 * 4 * row + 2 * 4) +
           2 * io_tensor(s) + (double)s->T * row * 4 + io_tensor(s);
}

/* Two kernels without sums in memory (as in flash_v1): K and V kept while Q and dO stream by
 * for dK and dV; Q and dO kept while K and V stream by for dQ. */
static inline double io_backward_two_kernels(const IoShape *s) {
    const double row = 2 * (double)(s->HS * s->bytes);
    return io_statistics(s) + 2 * io_tensor(s) + io_queries_read(s) * (row + 2 * 4) +
           2 * io_tensor(s) + io_keys_read(s) * row + 3 * io_tensor(s);
}

/* Naive that stored P, Algorithm 3 of 2022: P read for dV and for dS, dP written and read, dS
 * written and read twice. */
static inline double io_backward_naive(const IoShape *s) {
    const double T = (double)s->T;
    return 7 * T * T * (double)s->bytes + 8 * io_tensor(s);
}

/* Naive as it is here, which stores no P either: S and dP written and read as float, P and dS
 * written, P read for dV, dS for dQ and dK. */
static inline double io_backward_naive_here(const IoShape *s) {
    const double T = (double)s->T;
    return T * T * (2 * 4 + 5 * (double)s->bytes) + 8 * io_scores_needed(s) +
           io_backward_minimum(s);
}

#endif
