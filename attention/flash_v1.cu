/* FlashAttention of Dao, Fu, Ermon, Rudra, Ré 2022 (arXiv 2205.14135) in float arithmetic, on any
 * GPU: Algorithm 1 forward (2 adds scale, mask and dropout), Algorithm 4 backward, on tiles of 64
 * queries × 64 keys.
 *
 * Forward, one block for each tile of queries. For each tile of keys that its queries see:
 *
 *   S = scale · Q Kᵀ + mask,   m' = max(m, rowmax S),   c = exp(m - m')
 *   P = exp(S - m'),           ℓ' = c ℓ + rowsum P,     O' = (c ℓ / ℓ') O + (P ∘ Z / ℓ') V
 *
 * with m, ℓ, O the old and m', ℓ', O' the new; at the end LSE = m + log ℓ. Z are the dropout
 * factors. O is normalised over the keys so far at every step, as the paper has it; flash_mma
 * divides once, at the end. The paper's outer loop is over keys, so that O, m, ℓ return to memory
 * at each step; with the queries outside they stay in registers, and blocks share nothing. Tiles
 * pass through shared memory in slices (float_tile.cuh), Q's anew for each tile of keys, out of the
 * caches: so one tile size fits every HS and every GPU.
 *
 * Backward. With P = exp(S - LSE) recomputed and D = rowsum(dO ∘ O),
 *
 *   dP = dO Vᵀ,  dS = scale · P ∘ (Z ∘ dP - D),  dV = (P ∘ Z)ᵀ dO,  dQ = dS K,  dK = dSᵀ Q
 *
 * (the paper's dP is Z ∘ dP, and its scale multiplies dS K and dSᵀ Q in place of dS).
 *
 * One kernel has a block for each tile of keys and sums dK and dV over the queries, and over the
 * heads that share the keys; another has a block for each tile of queries and sums dQ. S and dP are
 * computed twice, 7 products in place of 5; without atomics, no sum depends on the order of blocks.
 *
 * A query without keys has m = -inf throughout, and -inf - -inf is NaN: subtracting 0 in its place
 * makes all its exponentials 0, hence O = 0, ℓ = 0, LSE = -inf. In the backward the mask alone
 * makes its P 0, and its LSE is not used. */
#include "attention/family.h"
#include "attention/float_tile.cuh"
#include "attention/mask.h"

namespace {

using namespace float_tile;

/* Which tile of which head a block works on. The tiles of a head are neighbours, so that what they
 * all read stays in the L2. */
struct Place {
    size_t tile, b, h;
};

__device__ __forceinline__ Place find_place(size_t tiles, size_t heads) {
    const size_t bh = blockIdx.x / tiles;
    return {blockIdx.x % tiles, bh / heads, bh % heads};
}

size_t tiles_of(size_t n) { return divide_up(n, (size_t)TILE); }

__device__ __forceinline__ Rows tile_rows(const AttentionView &view, size_t b, size_t h,
                                          size_t first, size_t T, size_t HS, bool aligned) {
    const int count = (int)min(T - first, (size_t)TILE);
    return {head_row(view, b, first, h), (int)view.token, count, (int)HS, aligned};
}

/* Keys first … first + 63 that query i sees: the first so many. None if there is no such query. */
__device__ __forceinline__ int tile_keys_seen(const Attention &p, size_t i, size_t first) {
    const size_t seen = i < p.TQ ? keys_seen(p.mask, i, p.TQ, p.TK) : 0;
    return seen > first ? (int)min(seen - first, (size_t)TILE) : 0;
}

/* The dropout factors of query i and the thread's keys j, j + 16, j + 32, j + 48, j % 64 < 16: by
 * the rule of runtime/random.h they are one byte of each word of one draw. */
__device__ __forceinline__ void dropout_factors(float (&factor)[EACH], const Attention &p,
                                                size_t bh, size_t i, size_t j) {
    static_assert(EACH == 4 && SIDE == 16 && TILE == 64, "a thread's keys are a draw's words");
    const Philox draw =
        dropout_attention_draw(p.dropout.key, (uint32_t)bh, (uint32_t)i, (uint32_t)j);
    const unsigned threshold = dropout_threshold(p.dropout.probability);
    const float scale = dropout_scale(p.dropout.probability);
    const int shift = 8 * dropout_attention_byte((uint32_t)j);
#pragma unroll
    for (int word = 0; word < EACH; word++)
        factor[word] = (draw.word[word] >> shift & 255u) < threshold ? 0.0f : scale;
}

/* scale · sum, rounded by itself. Contracted with the subtraction that follows it would round
 * differently in the forward and in the backward, and exp of the difference to LSE shows it when
 * scores are large. */
__device__ __forceinline__ float score(float sum, float scale) { return __fmul_rn(sum, scale); }

/* Over the 16 threads of a row, each of which gets the result. */
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int lanes = SIDE / 2; lanes > 0; lanes /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int lanes = SIDE / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

/* shared.tile = the block's result. */
__device__ __forceinline__ void store_tile(Shared &shared, const float (&result)[EACH][EACH]) {
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
        for (int c = 0; c < EACH; c++)
            shared.tile.at[thread_y() + SIDE * r][thread_x() + SIDE * c] = result[r][c];
}

/* Rows of the view from `first` on = the block's result, where they exist. */
template <int D>
__device__ __forceinline__ void store_rows(const AttentionView &view, size_t b, size_t h,
                                           size_t first, size_t T, size_t HS,
                                           const Wide<D> &result) {
#pragma unroll
    for (int r = 0; r < EACH; r++) {
        const size_t t = first + thread_y() + SIDE * r;
        if (t >= T) continue;
        real *row = head_row(view, b, t, h);
#pragma unroll
        for (int k = 0; k < Wide<D>::COLUMNS; k++) {
            const int column = Wide<D>::column(k);
            if (column < (int)HS) row[column] = from_float<real>(result.at[r][k]);
        }
    }
}

/* --- forward -------------------------------------------------------------------------------- */

template <int D>
__global__ __launch_bounds__(THREADS, D <= 128 ? 2 : 1) void forward_kernel(
    const Attention p, const AttentionTensors x, size_t tiles, bool aligned) {
    __shared__ Shared shared;
    const Place place = find_place(tiles, p.NH);
    const size_t b = place.b, h = place.h, kv = h / (p.NH / p.NKV), bh = b * p.NH + h;
    /* Under a causal mask the last tiles take longest: they go first. */
    const size_t i0 = (tiles - 1 - place.tile) * TILE;
    const size_t keys = keys_seen(p.mask, min(i0 + TILE, p.TQ) - 1, p.TQ, p.TK);
    const Rows q = tile_rows(x.q, b, h, i0, p.TQ, p.HS, aligned);

    float m[EACH], l[EACH];
    Wide<D> o = {};
#pragma unroll
    for (int r = 0; r < EACH; r++) m[r] = -INFINITY, l[r] = 0.0f;

    for (size_t j0 = 0; j0 < keys; j0 += TILE) {
        float s[EACH][EACH] = {};
        multiply_transposed(s, q, tile_rows(x.k, b, kv, j0, p.TK, p.HS, aligned), shared);
        const bool cut = !all_seen(p.mask, i0, j0 + TILE, p.TQ, p.TK);

#pragma unroll
        for (int r = 0; r < EACH; r++) {
            const size_t i = i0 + thread_y() + SIDE * r;
            const int seen = cut ? tile_keys_seen(p, i, j0) : TILE;
            float highest = m[r], sum = 0.0f;
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                s[r][c] = thread_x() + SIDE * c < seen ? score(s[r][c], p.scale) : -INFINITY;
                highest = fmaxf(highest, s[r][c]);
            }
            highest = row_max(highest);
            const float base = highest == -INFINITY ? 0.0f : highest;
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                s[r][c] = expf(s[r][c] - base);
                sum += s[r][c];
            }
            const float kept = expf(m[r] - base) * l[r]; /* c ℓ */
            m[r] = highest;
            l[r] = kept + row_sum(sum);
            const float inverse = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
            float factor[EACH] = {1.0f, 1.0f, 1.0f, 1.0f};
            if (p.dropout.probability > 0.0f) dropout_factors(factor, p, bh, i, j0 + thread_x());
#pragma unroll
            for (int c = 0; c < EACH; c++) s[r][c] *= inverse * factor[c];
#pragma unroll
            for (int k = 0; k < Wide<D>::COLUMNS; k++) o.at[r][k] *= kept * inverse;
        }
        store_tile(shared, s);
        multiply_tile(o, tile_rows(x.v, b, kv, j0, p.TK, p.HS, aligned), shared);
    }

    store_rows(x.o, b, h, i0, p.TQ, p.HS, o);
#pragma unroll
    for (int r = 0; r < EACH; r++) {
        const size_t i = i0 + thread_y() + SIDE * r;
        if (thread_x() == 0 && i < p.TQ) ((float *)x.lse)[bh * p.TQ + i] = m[r] + logf(l[r]);
    }
}

/* --- backward ------------------------------------------------------------------------------- */

enum { WARP = 32 };

/* D, one warp for each query of each head. */
__global__ __launch_bounds__(THREADS) void delta_kernel(const Attention p, const AttentionView o,
                                                        const AttentionView dout, float *delta) {
    const size_t n = blockIdx.x * (size_t)(THREADS / WARP) + threadIdx.x / WARP;
    if (n >= p.B * p.NH * p.TQ) return;
    const size_t i = n % p.TQ, h = n / p.TQ % p.NH, b = n / p.TQ / p.NH;
    const real *o_row = head_row(o, b, i, h), *dout_row = head_row(dout, b, i, h);
    float sum = 0.0f;
    for (int c = threadIdx.x % WARP; c < (int)p.HS; c += WARP)
        sum += to_float(o_row[c]) * to_float(dout_row[c]);
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % WARP == 0) delta[n] = sum;
}

/* What the backward knows of a query. One beyond the last has LSE = +inf, so that
 * exp(S - LSE) = 0. */
struct Query {
    float lse, delta;
};

__device__ __forceinline__ Query load_query(const Attention &p, const float *lse,
                                            const float *delta, size_t bh, size_t i) {
    if (i >= p.TQ) return {INFINITY, 0.0f};
    return {lse[bh * p.TQ + i], delta[bh * p.TQ + i]};
}

/* From Q Kᵀ and dP of one place: s becomes P ∘ Z, dp becomes dS. */
__device__ __forceinline__ void score_gradient(float &s, float &dp, bool seen, float factor,
                                               Query query, float scale) {
    const float probability = seen ? expf(score(s, scale) - query.lse) : 0.0f;
    dp = scale * probability * (factor * dp - query.delta);
    s = probability * factor;
}

/* dK and dV of one tile of keys. Everything is transposed: keys are rows, queries columns. */
template <int D>
__global__ __launch_bounds__(THREADS, D <= 64 ? 2 : 1) void backward_keys_kernel(
    const Attention p, const AttentionTensors x, const AttentionGradients g, const float *delta,
    size_t tiles, bool aligned) {
    __shared__ Shared shared;
    const Place place = find_place(tiles, p.NKV);
    const size_t b = place.b, kv = place.h, group = p.NH / p.NKV, j0 = place.tile * TILE;
    const Rows k = tile_rows(x.k, b, kv, j0, p.TK, p.HS, aligned);
    const Rows v = tile_rows(x.v, b, kv, j0, p.TK, p.HS, aligned);
    Wide<D> dk = {}, dv = {};

    for (size_t h = kv * group; h < (kv + 1) * group; h++)
        for (size_t i0 = first_query(p.mask, j0, p.TQ, p.TK) / TILE * TILE; i0 < p.TQ; i0 += TILE) {
            const size_t bh = b * p.NH + h;
            const Rows q = tile_rows(x.q, b, h, i0, p.TQ, p.HS, aligned);
            const Rows dout = tile_rows(g.dout, b, h, i0, p.TQ, p.HS, aligned);
            float s[EACH][EACH] = {}, dp[EACH][EACH] = {};
            multiply_transposed(s, k, q, shared);
            multiply_transposed(dp, v, dout, shared);
            const bool cut = !all_seen(p.mask, i0, j0 + TILE, p.TQ, p.TK);

#pragma unroll
            for (int c = 0; c < EACH; c++) {
                const size_t i = i0 + thread_x() + SIDE * c;
                const Query query = load_query(p, (const float *)x.lse, delta, bh, i);
                const int seen = cut ? tile_keys_seen(p, i, j0) : TILE;
                float factor[EACH] = {1.0f, 1.0f, 1.0f, 1.0f};
                if (p.dropout.probability > 0.0f)
                    dropout_factors(factor, p, bh, i, j0 + thread_y());
#pragma unroll
                for (int r = 0; r < EACH; r++)
                    score_gradient(s[r][c], dp[r][c], thread_y() + SIDE * r < seen, factor[r],
                                   query, p.scale);
            }
            store_tile(shared, s);
            multiply_tile(dv, dout, shared);
            __syncthreads();
            store_tile(shared, dp);
            multiply_tile(dk, q, shared);
        }

    store_rows(g.dk, b, kv, j0, p.TK, p.HS, dk);
    store_rows(g.dv, b, kv, j0, p.TK, p.HS, dv);
}

/* dQ of one tile of queries. */
template <int D>
__global__ __launch_bounds__(THREADS, D <= 64 ? 2 : 1) void backward_queries_kernel(
    const Attention p, const AttentionTensors x, const AttentionGradients g, const float *delta,
    size_t tiles, bool aligned) {
    __shared__ Shared shared;
    const Place place = find_place(tiles, p.NH);
    const size_t b = place.b, h = place.h, kv = h / (p.NH / p.NKV), bh = b * p.NH + h;
    const size_t i0 = (tiles - 1 - place.tile) * TILE;
    const size_t keys = keys_seen(p.mask, min(i0 + TILE, p.TQ) - 1, p.TQ, p.TK);
    const Rows q = tile_rows(x.q, b, h, i0, p.TQ, p.HS, aligned);
    const Rows dout = tile_rows(g.dout, b, h, i0, p.TQ, p.HS, aligned);
    Wide<D> dq = {};

    for (size_t j0 = 0; j0 < keys; j0 += TILE) {
        const Rows k = tile_rows(x.k, b, kv, j0, p.TK, p.HS, aligned);
        const Rows v = tile_rows(x.v, b, kv, j0, p.TK, p.HS, aligned);
        float s[EACH][EACH] = {}, dp[EACH][EACH] = {};
        multiply_transposed(s, q, k, shared);
        multiply_transposed(dp, dout, v, shared);
        const bool cut = !all_seen(p.mask, i0, j0 + TILE, p.TQ, p.TK);

#pragma unroll
        for (int r = 0; r < EACH; r++) {
            const size_t i = i0 + thread_y() + SIDE * r;
            const Query query = load_query(p, (const float *)x.lse, delta, bh, i);
            const int seen = cut ? tile_keys_seen(p, i, j0) : TILE;
            float factor[EACH] = {1.0f, 1.0f, 1.0f, 1.0f};
            if (p.dropout.probability > 0.0f) dropout_factors(factor, p, bh, i, j0 + thread_x());
#pragma unroll
            for (int c = 0; c < EACH; c++)
                score_gradient(s[r][c], dp[r][c], thread_x() + SIDE * c < seen, factor[c], query,
                               p.scale);
        }
        store_tile(shared, dp);
        multiply_tile(dq, k, shared);
    }
    store_rows(g.dq, b, h, i0, p.TQ, p.HS, dq);
}

/* --- launches ------------------------------------------------------------------------------- */

bool view_aligned(const AttentionView &view) {
    return ((size_t)view.data | (view.batch | view.token | view.head) * sizeof(real)) % 16 == 0;
}

template <int D>
void forward(const Attention &p, const AttentionTensors &x, cudaStream_t stream) {
    const bool aligned = view_aligned(x.q) && view_aligned(x.k) && view_aligned(x.v);
    const size_t tiles = tiles_of(p.TQ);
    forward_kernel<D><<<grid_blocks(tiles * p.B * p.NH), THREADS, 0, stream>>>(p, x, tiles,
                                                                              aligned);
    LAUNCH_CHECK();
}

template <int D>
void backward(const Attention &p, const AttentionTensors &x, const AttentionGradients &g,
              float *delta, cudaStream_t stream) {
    const bool aligned = view_aligned(x.q) && view_aligned(x.k) && view_aligned(x.v) &&
                         view_aligned(g.dout);
    const size_t queries = p.B * p.NH * p.TQ;
    delta_kernel<<<grid_blocks(divide_up(queries, (size_t)THREADS / WARP)), THREADS, 0, stream>>>(
        p, x.o, g.dout, delta);
    LAUNCH_CHECK();
    const size_t key_tiles = tiles_of(p.TK), query_tiles = tiles_of(p.TQ);
    backward_keys_kernel<D><<<grid_blocks(key_tiles * p.B * p.NKV), THREADS, 0, stream>>>(
        p, x, g, delta, key_tiles, aligned);
    LAUNCH_CHECK();
    backward_queries_kernel<D><<<grid_blocks(query_tiles * p.B * p.NH), THREADS, 0, stream>>>(
        p, x, g, delta, query_tiles, aligned);
    LAUNCH_CHECK();
}

} // namespace

/* The kernels hold HS padded to the next of these. */
#define DISPATCH(function, ...)                                                         \
    (p->HS <= 32 ? function<32>(__VA_ARGS__) : p->HS <= 64 ? function<64>(__VA_ARGS__)  \
     : p->HS <= 128 ? function<128>(__VA_ARGS__) : function<256>(__VA_ARGS__))

size_t LAYER(flash_v1_forward_workspace)(const Attention *) { return 0; }

void LAYER(flash_v1_forward)(const Attention *p, const AttentionTensors *x, void *, void *stream) {
    DISPATCH(forward, *p, *x, (cudaStream_t)stream);
}

/* D (B,NH,TQ). */
size_t LAYER(flash_v1_backward_workspace)(const Attention *p) {
    return p->B * p->NH * p->TQ * sizeof(float);
}

void LAYER(flash_v1_backward)(const Attention *p, const AttentionTensors *x,
                              const AttentionGradients *g, void *workspace, void *stream) {
    DISPATCH(backward, *p, *x, *g, (float *)workspace, (cudaStream_t)stream);
}
