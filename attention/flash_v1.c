/* FlashAttention of Dao, Fu, Ermon, Rudra, Ré 2022 (arXiv 2205.14135) on the CPU: Algorithm 1
 * forward (2 adds scale, mask and dropout), Algorithm 4 backward, with the L1 and L2 caches in the
 * place of the GPU's shared memory.
 *
 * Forward: one task for each tile of 64 queries. It walks the tiles of 64 keys that its queries see
 * and keeps (m, ℓ, O) of its queries, corrected at each tile (online_softmax.h). The paper has the
 * loop over keys outside, so that O, m and ℓ return to memory at each step; with the loop over
 * queries outside they stay in cache and tasks share nothing.
 *
 * Backward: with P = exp(S - LSE) recomputed, Z the dropout factors and D = rowsum(dO ∘ O),
 *
 *   dP = dO Vᵀ,  dS = scale · P ∘ (Z ∘ dP - D),  dV = (P ∘ Z)ᵀ dO,  dQ = dS K,  dK = dSᵀ Q
 *
 * The paper's dP is Z ∘ dP, and its scale (τ) multiplies dS K and dSᵀ Q in place of dS. It saves m
 * and ℓ where LSE is saved here, and computes D in the loop where it is computed once here.
 *
 * One task for each key/value head and part of its key tiles. The tile's dK and dV stay in cache,
 * summed over the queries and over the heads that share it; dQ is summed in a buffer that belongs
 * to the task alone. The buffers of a head are added in a fixed order at the end, and their number
 * does not depend on the number of threads, so the result has the same bits on any machine of one
 * kind.
 *
 * Neither touches tiles that the mask hides wholly. Memory is O(T): tiles for each thread, D, and
 * the dQ buffers. */
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention/dropout_row.h"
#include "attention/family.h"
#include "attention/mask.h"
#include "attention/online_softmax.h"
#include "attention/tile_product.h"

/* Queries and keys in a tile. At HS = 64 in fp32 each tile of the backward is 16 KiB: the two that
 * a product reads fit a 32 KiB L1, all nine an L2. */
#define TILE 64
_Static_assert(TILE == SOFTMAX_QUERIES, "a query tile is one online softmax");
_Static_assert(TILE % DROPOUT_BLOCK == 0, "a key tile begins at a block of dropout draws");
_Static_assert(TILE % PRODUCT_COLUMNS == 0, "score tiles are whole blocks of the product");

/* Tasks that a backward is cut into at least, if it has the key tiles: heads may be too few. */
#define BACKWARD_TASKS 32

static size_t minimum(size_t a, size_t b) { return a < b ? a : b; }
static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static size_t tiles_of(size_t n) { return (n + TILE - 1) / TILE; }

/* HS as tiles hold it: padded with zeros to whole blocks of the product. */
static size_t padded_head(const Attention *p) { return round_up(p->HS, (size_t)PRODUCT_COLUMNS); }

static real *row(AttentionView view, size_t b, size_t t, size_t h) {
    return (real *)view.data + b * view.batch + t * view.token + h * view.head;
}

/* most_threads is the most that will run at once, which the workspace has tiles for: OpenMP's
 * number when first asked. A later change may lower the number that run, thread_count, not raise
 * it. */
#ifdef _OPENMP
static int most_threads(void) {
    static _Atomic int most;
    if (most == 0) most = omp_get_max_threads();
    return most;
}

static int thread_count(void) {
    int most = most_threads(), now = omp_get_max_threads();
    return now < most ? now : most;
}

static size_t thread_index(void) { return (size_t)omp_get_thread_num(); }
#else
static int most_threads(void) { return 1; }
static size_t thread_index(void) { return 0; }
#endif

/* tile (rows,HSp) = the same rows of x, padded with zeros. */
static void pack_rows(real *tile, const real *x, size_t token, size_t rows, size_t HS, size_t HSp) {
    for (size_t i = 0; i < rows; i++) {
        memcpy(tile + i * HSp, x + i * token, HS * sizeof(real));
        memset(tile + i * HSp + HS, 0, (HSp - HS) * sizeof(real));
    }
}

/* tile (HS,TILE) = the transpose of `rows` rows of x, zero in the other columns. */
static void pack_columns(real *tile, const real *x, size_t token, size_t rows, size_t HS) {
    for (size_t c = 0; c < HS; c++) {
        for (size_t i = 0; i < rows; i++) tile[c * TILE + i] = x[i * token + c];
        for (size_t i = rows; i < TILE; i++) tile[c * TILE + i] = 0;
    }
}

/* --- forward --- */

/* One thread's tiles. Scores lie transposed, keys by queries: see online_softmax.h. */
typedef struct {
    real *q; /* (HS,TILE): Qᵀ */
    real *v; /* (TILE,HSp) */
    real *o; /* (TILE,HSp) */
    real *s; /* (TILE,TILE): K Qᵀ, then (P ∘ Z / ℓ')ᵀ */
} ForwardTiles;

static size_t forward_tile_elements(const Attention *p) {
    return TILE * (3 * padded_head(p) + TILE);
}

static ForwardTiles forward_tiles(const Attention *p, real *memory) {
    size_t n = TILE * padded_head(p);
    return (ForwardTiles){memory, memory + n, memory + 2 * n, memory + 3 * n};
}

/* Scores of keys that a query does not see become -inf. */
static void mask_scores(const Attention *p, real *s, size_t q0, size_t queries, size_t k0,
                        size_t keys) {
    for (size_t i = 0; i < queries; i++) {
        size_t seen = keys_seen(p->mask, q0 + i, p->TQ, p->TK);
        for (size_t j = seen > k0 ? seen - k0 : 0; j < keys; j++) s[j * TILE + i] = -(real)INFINITY;
    }
}

static void drop_scores(const Attention *p, real *s, size_t bh, size_t q0, size_t queries,
                        size_t k0, size_t keys) {
    for (size_t i = 0; i < queries; i++) {
        real factor[DROPOUT_BLOCK];
        dropout_row(factor, p->dropout, bh, q0 + i, k0);
        for (size_t j = 0; j < keys; j++) s[j * TILE + i] *= factor[j];
    }
}

static void forward_query_tile(const Attention *p, const AttentionTensors *x, size_t b, size_t h,
                               size_t q0, ForwardTiles tiles) {
    const size_t HS = p->HS, HSp = padded_head(p), kv = h / (p->NH / p->NKV);
    const size_t queries = minimum(TILE, p->TQ - q0);
    const size_t seen = keys_seen(p->mask, q0 + queries - 1, p->TQ, p->TK);
    OnlineSoftmax state;
    online_softmax_start(&state);
    pack_columns(tiles.q, row(x->q, b, q0, h), x->q.token, queries, HS);
    memset(tiles.o, 0, TILE * HSp * sizeof(real));

    for (size_t k0 = 0; k0 < seen; k0 += TILE) {
        const size_t keys = minimum(TILE, seen - k0);
        pack_rows(tiles.v, row(x->v, b, k0, kv), x->v.token, keys, HS, HSp);
        /* The tile of S, without scale (Algorithm 1, line 9). */
        tile_product(tiles.s, TILE, row(x->k, b, k0, kv), x->k.token, 1, tiles.q, TILE, keys, TILE,
                     HS, PRODUCT_SET);
        /* The mask, only where it cuts the tile (Algorithm 2, line 11; Algorithm 1 has none). */
        if (!all_seen(p->mask, q0, k0 + keys, p->TQ, p->TK))
            mask_scores(p, tiles.s, q0, queries, k0, keys);
        /* m', ℓ' and P / ℓ' (lines 10, 11 and 13), then Z (Algorithm 2, line 14). */
        online_softmax_update(&state, tiles.s, keys, (real)p->scale);
        if (p->dropout.probability > 0)
            drop_scores(p, tiles.s, b * p->NH + h, q0, queries, k0, keys);
        /* O' = (c ℓ / ℓ') O + (P ∘ Z / ℓ') V (line 12). */
        for (size_t i = 0; i < queries; i++)
            for (size_t c = 0; c < HSp; c++) tiles.o[i * HSp + c] *= state.correction[i];
        tile_product(tiles.o, HSp, tiles.s, 1, TILE, tiles.v, HSp, queries, HSp, keys, PRODUCT_ADD);
    }

    real *lse = (real *)x->lse + (b * p->NH + h) * p->TQ + q0;
    for (size_t i = 0; i < queries; i++) {
        memcpy(row(x->o, b, q0 + i, h), tiles.o + i * HSp, HS * sizeof(real));
        lse[i] = online_softmax_lse(&state, i);
    }
}

size_t LAYER(flash_v1_forward_workspace)(const Attention *p) {
    return (size_t)most_threads() * forward_tile_elements(p) * sizeof(real);
}

void LAYER(flash_v1_forward)(const Attention *p, const AttentionTensors *x, void *workspace,
                             void *stream) {
    (void)stream;
    const size_t heads = p->B * p->NH, tiles = tiles_of(p->TQ);
    /* Under a causal mask the last query tiles take longest: they go first. */
#pragma omp parallel for schedule(dynamic) num_threads(thread_count())
    for (size_t task = 0; task < heads * tiles; task++) {
        size_t tile = tiles - 1 - task / heads, bh = task % heads;
        real *memory = (real *)workspace + thread_index() * forward_tile_elements(p);
        forward_query_tile(p, x, bh / p->NH, bh % p->NH, tile * TILE, forward_tiles(p, memory));
    }
}

/* --- backward --- */

/* One thread's tiles. */
typedef struct {
    real *k;            /* (TILE,HSp) */
    real *k_transposed; /* (HS,TILE) */
    real *v_transposed; /* (HS,TILE) */
    real *dk, *dv;      /* (TILE,HSp) */
    real *q, *dout;     /* (TILE,HSp) */
    real *s;            /* (TILE,TILE): Q Kᵀ, then P ∘ Z; queries by keys */
    real *dp;           /* (TILE,TILE): dP, then dS */
} BackwardTiles;

static size_t backward_tile_elements(const Attention *p) {
    return TILE * (7 * padded_head(p) + 2 * TILE);
}

static BackwardTiles backward_tiles(const Attention *p, real *memory) {
    size_t n = TILE * padded_head(p);
    return (BackwardTiles){.k = memory,
                           .k_transposed = memory + n,
                           .v_transposed = memory + 2 * n,
                           .dk = memory + 3 * n,
                           .dv = memory + 4 * n,
                           .q = memory + 5 * n,
                           .dout = memory + 6 * n,
                           .s = memory + 7 * n,
                           .dp = memory + 7 * n + TILE * TILE};
}

/* Parts that the key tiles of each key/value head are dealt into. */
static size_t backward_parts(const Attention *p) {
    size_t heads = p->B * p->NKV;
    return minimum((BACKWARD_TASKS + heads - 1) / heads, tiles_of(p->TK));
}

/* The workspace: tiles of every thread, then D (B,NH,TQ), then dQ buffers (B,NH,parts,TQ,HSp). */
typedef struct {
    real *tiles, *d, *dq;
    size_t elements;
} BackwardWorkspace;

static BackwardWorkspace backward_workspace(const Attention *p, void *memory) {
    const size_t block = 256 / sizeof(real);
    size_t tiles = (size_t)most_threads() * backward_tile_elements(p);
    size_t d = round_up(p->B * p->NH * p->TQ, block);
    size_t dq = p->B * p->NH * backward_parts(p) * p->TQ * padded_head(p);
    BackwardWorkspace w = {.elements = tiles + d + dq};
    if (memory) {
        w.tiles = memory;
        w.d = w.tiles + tiles;
        w.dq = w.d + d;
    }
    return w;
}

/* s: Q Kᵀ to P ∘ Z; dp: dP to dS. Columns from `keys` on hold what is never read. */
static void score_gradients(const Attention *p, BackwardTiles tiles, const real *lse, const real *d,
                            size_t bh, size_t q0, size_t queries, size_t k0, size_t keys) {
    const real scale = (real)p->scale;
    const int test = !all_seen(p->mask, q0, k0 + keys, p->TQ, p->TK);
    real factor[DROPOUT_BLOCK];
    for (size_t i = 0; i < queries; i++) {
        real *s = tiles.s + i * TILE, *dp = tiles.dp + i * TILE;
#pragma omp simd
        for (int j = 0; j < TILE; j++) s[j] = real_exp(scale * s[j] - lse[i]);
        if (test) {
            size_t seen = keys_seen(p->mask, q0 + i, p->TQ, p->TK);
            for (size_t j = seen > k0 ? seen - k0 : 0; j < keys; j++) s[j] = 0;
        }
        if (p->dropout.probability > 0) {
            dropout_row(factor, p->dropout, bh, q0 + i, k0);
            for (int j = 0; j < TILE; j++) {
                dp[j] = scale * s[j] * (factor[j] * dp[j] - d[i]);
                s[j] *= factor[j];
            }
        } else {
            for (int j = 0; j < TILE; j++) dp[j] = scale * s[j] * (dp[j] - d[i]);
        }
    }
}

/* dK, dV of one key tile, and its share of the dQ of every query that sees it. dq is the task's
 * (NH/NKV,TQ,HSp) buffers, `dq_head` elements apart. */
static void backward_key_tile(const Attention *p, const AttentionTensors *x,
                              const AttentionGradients *g, BackwardTiles tiles, size_t b, size_t kv,
                              size_t k0, const real *d, real *dq, size_t dq_head) {
    const size_t HS = p->HS, HSp = padded_head(p), group = p->NH / p->NKV;
    const size_t keys = minimum(TILE, p->TK - k0);
    const real *k = row(x->k, b, k0, kv), *v = row(x->v, b, k0, kv);
    pack_rows(tiles.k, k, x->k.token, keys, HS, HSp);
    pack_columns(tiles.k_transposed, k, x->k.token, keys, HS);
    pack_columns(tiles.v_transposed, v, x->v.token, keys, HS);
    memset(tiles.dk, 0, TILE * HSp * sizeof(real));
    memset(tiles.dv, 0, TILE * HSp * sizeof(real));

    const size_t first = first_query(p->mask, k0, p->TQ, p->TK) / TILE * TILE;
    for (size_t h = kv * group; h < (kv + 1) * group; h++, dq += dq_head)
        for (size_t q0 = first; q0 < p->TQ; q0 += TILE) {
            const size_t queries = minimum(TILE, p->TQ - q0), bh = b * p->NH + h;
            const real *lse = (const real *)x->lse + bh * p->TQ + q0;
            pack_rows(tiles.q, row(x->q, b, q0, h), x->q.token, queries, HS, HSp);
            pack_rows(tiles.dout, row(g->dout, b, q0, h), g->dout.token, queries, HS, HSp);
            /* The tile of S, without scale (Algorithm 4, line 11). */
            tile_product(tiles.s, TILE, tiles.q, HSp, 1, tiles.k_transposed, TILE, queries, TILE,
                         HS, PRODUCT_SET);
            /* dP = dO Vᵀ (line 17, the paper's dP^dropped). */
            tile_product(tiles.dp, TILE, tiles.dout, HSp, 1, tiles.v_transposed, TILE, queries,
                         TILE, HS, PRODUCT_SET);
            /* Mask, P, P ∘ Z (lines 12 to 15) and dS (lines 18 and 20). */
            score_gradients(p, tiles, lse, d + bh * p->TQ + q0, bh, q0, queries, k0, keys);
            /* dV += (P ∘ Z)ᵀ dO (line 16). */
            tile_product(tiles.dv, HSp, tiles.s, 1, TILE, tiles.dout, HSp, keys, HSp, queries,
                         PRODUCT_ADD);
            /* dK += dSᵀ Q (line 22). */
            tile_product(tiles.dk, HSp, tiles.dp, 1, TILE, tiles.q, HSp, keys, HSp, queries,
                         PRODUCT_ADD);
            /* dQ += dS K (line 21). */
            tile_product(dq + q0 * HSp, HSp, tiles.dp, TILE, 1, tiles.k, HSp, queries, HSp, keys,
                         PRODUCT_ADD);
        }

    for (size_t j = 0; j < keys; j++) {
        memcpy(row(g->dk, b, k0 + j, kv), tiles.dk + j * HSp, HS * sizeof(real));
        memcpy(row(g->dv, b, k0 + j, kv), tiles.dv + j * HSp, HS * sizeof(real));
    }
}

size_t LAYER(flash_v1_backward_workspace)(const Attention *p) {
    return backward_workspace(p, NULL).elements * sizeof(real);
}

void LAYER(flash_v1_backward)(const Attention *p, const AttentionTensors *x,
                              const AttentionGradients *g, void *workspace, void *stream) {
    (void)stream;
    const size_t HSp = padded_head(p), group = p->NH / p->NKV, parts = backward_parts(p);
    const size_t part_elements = p->TQ * HSp, dq_head = parts * part_elements;
    const BackwardWorkspace w = backward_workspace(p, workspace);

#pragma omp parallel for num_threads(thread_count())
    for (size_t i = 0; i < p->B * p->NH * p->TQ; i++) {
        size_t t = i % p->TQ, h = i / p->TQ % p->NH, b = i / p->TQ / p->NH;
        const real *o = row(x->o, b, t, h), *dout = row(g->dout, b, t, h);
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < p->HS; c++) sum += o[c] * dout[c];
        w.d[i] = sum;
    }

#pragma omp parallel for schedule(dynamic) num_threads(thread_count())
    for (size_t task = 0; task < p->B * p->NKV * parts; task++) {
        size_t part = task % parts, kv = task / parts % p->NKV, b = task / parts / p->NKV;
        real *memory = w.tiles + thread_index() * backward_tile_elements(p);
        real *dq = w.dq + (b * p->NH + kv * group) * dq_head + part * part_elements;
        for (size_t h = 0; h < group; h++)
            memset(dq + h * dq_head, 0, part_elements * sizeof(real));
        /* Dealt in turn, because under a causal mask early key tiles are seen by more queries. */
        for (size_t tile = part; tile < tiles_of(p->TK); tile += parts)
            backward_key_tile(p, x, g, backward_tiles(p, memory), b, kv, tile * TILE, w.d, dq,
                              dq_head);
    }

#pragma omp parallel for num_threads(thread_count())
    for (size_t i = 0; i < p->B * p->NH * p->TQ; i++) {
        size_t t = i % p->TQ, h = i / p->TQ % p->NH, b = i / p->TQ / p->NH;
        const real *sums = w.dq + (b * p->NH + h) * dq_head + t * HSp;
        real *dq = row(g->dq, b, t, h);
        for (size_t c = 0; c < p->HS; c++) {
            real sum = sums[c];
            for (size_t part = 1; part < parts; part++) sum += sums[part * part_elements + c];
            dq[c] = sum;
        }
    }
}
