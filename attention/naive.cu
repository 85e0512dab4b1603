/* Attention by its definition on CUDA, the baseline of every comparison: the whole score matrices
 * of all heads, (B,NH,TQ,TK), are written to the workspace.
 *
 *   forward    S = scale · Q Kᵀ + mask,  P = softmax(S),  O = (P ∘ Z) V
 *   backward   P = exp(S - LSE),  dP = dO Vᵀ,  dS = scale · P ∘ (Z ∘ dP - D),  D = rowsum(dO ∘ O)
 *              dV = (P ∘ Z)ᵀ dO,  dQ = dS K,  dK = dSᵀ Q
 *
 * Z are the dropout factors; naive.c has the source. S and dP are float, so that large scores keep
 * their differences; P ∘ Z and dS are `real`, what tensor cores multiply, and take the place of S
 * and dP row by row. The workspace is thus 4 bytes a score forward and 8 backward in either type,
 * with rows padded to multiples of 16 bytes.
 *
 * The products are cuBLASLt's, batched over the heads of a sequence, where every row starts at a
 * multiple of 16 bytes, and float_tile.cuh's elsewhere. In fp32 they are fp32 throughout, no TF32.
 * With heads that share keys, dK and dV are summed in `real`, head after head. */
#include <cublasLt.h>

#include <mutex>
#include <utility>

#include "attention/family.h"
#include "attention/float_tile.cuh"
#include "attention/mask.h"

namespace {

/* cuBLASLt's name of a type: float, or bf16 where `real` is that. */
template <class T> constexpr cudaDataType_t TYPE_OF = sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F;

/* --- matrix products ------------------------------------------------------------------------ */

/* A matrix for each of `heads` heads of B sequences: element (r,c) of head h of sequence b is
 * data[b*batch + h*head + r*row + c]. */
template <class T> struct Matrices {
    T *data;
    size_t row, head, batch;
    bool transposed; /* whether products use it so */
};

template <class T> Matrices<T> transpose(Matrices<T> m) {
    m.transposed = !m.transposed;
    return m;
}

/* C (M,N) = alpha A B + beta C in each of B·heads places, A (M,K) and B (K,N) after transposition;
 * beta = 0 overwrites C whatever it holds. C is not transposed. */
struct Product {
    size_t B, heads, M, N, K;
    float alpha, beta;
};

template <class T> bool aligned(const Matrices<T> &m, const Product &size) {
    size_t bits = (size_t)m.data | m.row * sizeof(T);
    if (size.heads > 1) bits |= m.head * sizeof(T);
    if (size.B > 1) bits |= m.batch * sizeof(T);
    return bits % 16 == 0;
}

/* False if cuBLASLt cannot do this; any other failure is fatal. */
#define CUBLASLT_SUPPORTS(call) cublaslt_supports((call), #call, __LINE__)
#define CUBLASLT_CHECK(call)                                                         \
    do {                                                                             \
        if (!CUBLASLT_SUPPORTS(call))                                                \
            error_fatal(__FILE__, __LINE__, "%s: not supported by cuBLASLt", #call); \
    } while (0)

bool cublaslt_supports(cublasStatus_t status, const char *call, int line) {
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED)
        error_fatal(__FILE__, line, "%s: %s", call, cublasLtGetStatusString(status));
    return status == CUBLAS_STATUS_SUCCESS;
}

/* The current GPU's handle, which is made when first asked for and lives as long as the process. */
cublasLtHandle_t cublaslt_handle() {
    enum { MOST_GPUS = 64 };
    static cublasLtHandle_t handles[MOST_GPUS];
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    int device;
    CUDA_CHECK(cudaGetDevice(&device));
    if (device >= MOST_GPUS)
        error_fatal(__FILE__, __LINE__, "attention: GPU %d, but at most %d are provided for",
                    device, MOST_GPUS);
    if (!handles[device]) CUBLASLT_CHECK(cublasLtCreate(&handles[device]));
    return handles[device];
}

/* cuBLASLt counts by columns: a matrix of ours by rows is to it the transpose, with `row` as its
 * leading dimension. */
template <class T>
cublasLtMatrixLayoutOpaque_t layout(const Matrices<T> &m, size_t rows, size_t columns,
                                    const Product &size) {
    if (m.transposed) std::swap(rows, columns);
    cublasLtMatrixLayoutOpaque_t layout;
    CUBLASLT_CHECK(cublasLtMatrixLayoutInit(&layout, TYPE_OF<T>, columns, rows, (int64_t)m.row));
    const int32_t count = (int32_t)size.heads;
    const int64_t stride = (int64_t)m.head;
    CUBLASLT_CHECK(cublasLtMatrixLayoutSetAttribute(
        &layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    CUBLASLT_CHECK(cublasLtMatrixLayoutSetAttribute(
        &layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
    return layout;
}

template <class T>
void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
            T value) {
    CUBLASLT_CHECK(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

/* False and nothing done if cuBLASLt cannot. C = A B is asked for as Cᵀ = Bᵀ Aᵀ. */
template <class T>
bool multiply_cublaslt(const Matrices<T> &C, const Matrices<const real> &A,
                       const Matrices<const real> &B, const Product &size, cudaStream_t stream) {
    if (!aligned(A, size) || !aligned(B, size) || !aligned(C, size)) return false;
    cublasLtMatmulDescOpaque_t description;
    const cublasOperation_t first = B.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = A.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLASLT_CHECK(cublasLtMatmulDescInit(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLASLT_CHECK(cublasLtMatmulDescSetAttribute(&description, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                                  sizeof first));
    CUBLASLT_CHECK(cublasLtMatmulDescSetAttribute(&description, CUBLASLT_MATMUL_DESC_TRANSB,
                                                  &second, sizeof second));
    cublasLtMatrixLayoutOpaque_t a = layout(A, size.M, size.K, size);
    cublasLtMatrixLayoutOpaque_t b = layout(B, size.K, size.N, size);
    cublasLtMatrixLayoutOpaque_t c = layout(C, size.M, size.N, size);

    /* Without a workspace of its own, and without sums split over blocks: their order could depend
     * on timing. */
    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLASLT_CHECK(cublasLtMatmulPreferenceInit(&preference));
    prefer(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)0);
    prefer(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           (uint32_t)CUBLASLT_REDUCTION_SCHEME_NONE);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)16);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)16);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)16);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)16);

    const cublasLtHandle_t handle = cublaslt_handle();
    cublasLtMatmulHeuristicResult_t choice;
    int found = 0;
    if (!CUBLASLT_SUPPORTS(cublasLtMatmulAlgoGetHeuristic(handle, &description, &b, &a, &c, &c,
                                                          &preference, 1, &choice, &found)) ||
        found == 0 || choice.state != CUBLAS_STATUS_SUCCESS)
        return false;
    for (size_t batch = 0; batch < size.B; batch++) {
        T *result = C.data + batch * C.batch;
        /* Some limits are found only here; that is the same for every sequence. */
        if (!CUBLASLT_SUPPORTS(cublasLtMatmul(
                handle, &description, &size.alpha, B.data + batch * B.batch, &b,
                A.data + batch * A.batch, &a, &size.beta, result, &c, result, &c, &choice.algo,
                /*workspace=*/NULL, 0, stream)))
            return false;
    }
    return true;
}

using namespace float_tile;

/* Rows from first_row on of a matrix, for a product that runs over its columns k … k + DEPTH - 1.
 * Rows and columns beyond those that exist are zeros. */
__device__ __forceinline__ void load_strided(Slice<DEPTH> &slice, const real *data, size_t row,
                                             size_t column, size_t first_row, size_t rows, size_t k,
                                             size_t K) {
    /* Neighbouring threads read neighbouring addresses. */
    for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        const int r = column == 1 ? i / DEPTH : i % TILE;
        const int c = column == 1 ? i % DEPTH : i / TILE;
        const bool exists = first_row + r < rows && k + c < K;
        slice.at[r][c] = exists ? to_float(data[(first_row + r) * row + (k + c) * column]) : 0.0f;
    }
}

/* The product for any layout: one block for each 64 × 64 elements of C. */
template <class T>
__global__ __launch_bounds__(THREADS) void multiply_kernel(Matrices<T> C, Matrices<const real> A,
                                                           Matrices<const real> B, Product size,
                                                           size_t tiles_m, size_t tiles_n) {
    __shared__ Slice<DEPTH> slices[2];
    const size_t tile = blockIdx.x % (tiles_m * tiles_n), place = blockIdx.x / (tiles_m * tiles_n);
    const size_t h = place % size.heads, b = place / size.heads;
    const size_t m = tile / tiles_n * TILE, n = tile % tiles_n * TILE;
    const real *from_a = A.data + b * A.batch + h * A.head;
    const real *from_b = B.data + b * B.batch + h * B.head;
    float sum[EACH][EACH] = {};
    for (size_t k = 0; k < size.K; k += DEPTH) {
        __syncthreads();
        load_strided(slices[0], from_a, A.transposed ? 1 : A.row, A.transposed ? A.row : 1, m,
                     size.M, k, size.K);
        load_strided(slices[1], from_b, B.transposed ? B.row : 1, B.transposed ? 1 : B.row, n,
                     size.N, k, size.K);
        __syncthreads();
        multiply_slices(sum, slices[0], slices[1]);
    }
    for (int r = 0; r < EACH; r++)
        for (int c = 0; c < EACH; c++) {
            const size_t row = m + thread_y() + SIDE * r, column = n + thread_x() + SIDE * c;
            if (row >= size.M || column >= size.N) continue;
            T *result = C.data + b * C.batch + h * C.head + row * C.row + column;
            const float before = size.beta == 0.0f ? 0.0f : size.beta * to_float(*result);
            *result = from_float<T>(size.alpha * sum[r][c] + before);
        }
}

template <class T>
void multiply(const Matrices<T> &C, const Matrices<const real> &A, const Matrices<const real> &B,
              const Product &size, cudaStream_t stream) {
    if (multiply_cublaslt(C, A, B, size, stream)) return;
    const size_t tiles_m = divide_up(size.M, (size_t)TILE);
    const size_t tiles_n = divide_up(size.N, (size_t)TILE);
    multiply_kernel<<<grid_blocks(tiles_m * tiles_n * size.heads * size.B), THREADS, 0, stream>>>(
        C, A, B, size, tiles_m, tiles_n);
    LAUNCH_CHECK();
}

/* --- softmax -------------------------------------------------------------------------------- */

enum { WARP = 32, ROWS = THREADS / WARP, PAIRS = 4, STRIDE = 2 * WARP, SPAN = PAIRS * STRIDE };

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

/* Elements of a row of scores in the workspace. */
__host__ __device__ __forceinline__ size_t score_row(const Attention &p) {
    return (p.TK + 3) / 4 * 4;
}

/* The scores of one query, which one warp works on; a lane has pairs of neighbouring keys, WARP
 * pairs apart. */
struct ScoreRow {
    size_t bh, i, seen;
    size_t start; /* of the row in the workspace, in floats */
    int lane;
};

__device__ __forceinline__ bool find_row(ScoreRow &row, const Attention &p) {
    const size_t n = blockIdx.x * (size_t)ROWS + threadIdx.x / WARP;
    row.bh = n / p.TQ, row.i = n % p.TQ;
    row.seen = keys_seen(p.mask, row.i, p.TQ, p.TK);
    row.start = n * score_row(p);
    row.lane = threadIdx.x % WARP;
    return n < p.B * p.NH * p.TQ;
}

/* The dropout factors of keys j and j + 1, j even: two bytes of one draw (runtime/random.h). */
__device__ __forceinline__ float2 dropout_factors(const Attention &p, const ScoreRow &row,
                                                  size_t j) {
    const Philox draw =
        dropout_attention_draw(p.dropout.key, (uint32_t)row.bh, (uint32_t)row.i, (uint32_t)j);
    const unsigned threshold = dropout_threshold(p.dropout.probability);
    const float scale = dropout_scale(p.dropout.probability);
    const int byte = dropout_attention_byte((uint32_t)j);
    /* Selected, where an index would put the draw into local memory. */
    const uint32_t low = byte & 4 ? draw.word[1] : draw.word[0];
    const uint32_t high = byte & 4 ? draw.word[3] : draw.word[2];
    const uint32_t bytes = (byte & 8 ? high : low) >> (8 * (byte & 3));
    return make_float2((bytes & 255u) < threshold ? 0.0f : scale,
                       (bytes >> 8 & 255u) < threshold ? 0.0f : scale);
}

/* Keys j and j + 1 of a row, the row padding included. */
__device__ __forceinline__ void store_pair(real *row, size_t j, float2 x) {
#ifdef REAL_BF16
    *(__nv_bfloat162 *)(row + j) = __float22bfloat162_rn(x);
#else
    *(float2 *)(row + j) = x;
#endif
}

/* Each row from S to P ∘ Z in its place, and its LSE. A row of P is no longer than its row of S: a
 * span of P lies where scores have been read, by this span's loads at the latest. */
__global__ __launch_bounds__(THREADS) void softmax_kernel(const Attention p, float *scores,
                                                          float *lse) {
    ScoreRow row;
    if (!find_row(row, p)) return;
    const float *s = scores + row.start;
    real *probability = (real *)(scores + row.start);

    float highest = -INFINITY, sum = 0.0f; /* over this lane's keys, then over all */
#pragma unroll 4
    for (size_t j = 2 * row.lane; j < row.seen; j += STRIDE) {
        const float2 pair = *(const float2 *)(s + j);
        const float second = j + 1 < row.seen ? pair.y : -INFINITY;
        const float higher = fmaxf(highest, fmaxf(pair.x, second));
        sum = sum * expf(highest - higher) + expf(pair.x - higher) + expf(second - higher);
        highest = higher;
    }
    const float lane_highest = highest;
    highest = warp_max(highest);
    /* A lane without keys has sum = 0 and -inf for its maximum, a row without keys everywhere. */
    sum = warp_sum(lane_highest == -INFINITY ? 0.0f : sum * expf(lane_highest - highest));
    if (row.lane == 0) lse[row.bh * p.TQ + row.i] = highest + logf(sum);

    const float inverse = 1.0f / sum;
    for (size_t first = 2 * row.lane; first - 2 * row.lane < p.TK; first += SPAN) {
        float2 pair[PAIRS];
#pragma unroll
        for (int u = 0; u < PAIRS; u++) {
            const size_t j = first + u * STRIDE;
            pair[u] = j < row.seen ? *(const float2 *)(s + j) : make_float2(0.0f, 0.0f);
        }
        __syncwarp();
#pragma unroll
        for (int u = 0; u < PAIRS; u++) {
            const size_t j = first + u * STRIDE;
            if (j >= p.TK) continue;
            float2 x;
            x.x = j < row.seen ? expf(pair[u].x - highest) * inverse : 0.0f;
            x.y = j + 1 < row.seen ? expf(pair[u].y - highest) * inverse : 0.0f;
            if (p.dropout.probability > 0.0f) {
                const float2 factor = dropout_factors(p, row, j);
                x.x *= factor.x, x.y *= factor.y;
            }
            store_pair(probability, j, x);
        }
    }
}

/* Each row from S to P ∘ Z and from dP to dS in their places. */
__global__ __launch_bounds__(THREADS) void softmax_backward_kernel(const Attention p, float *scores,
                                                                   float *dscores, const float *lse,
                                                                   const AttentionView o,
                                                                   const AttentionView dout) {
    ScoreRow row;
    if (!find_row(row, p)) return;
    const float *s = scores + row.start, *dp = dscores + row.start;
    real *probability = (real *)(scores + row.start), *ds = (real *)(dscores + row.start);

    const real *o_row = head_row(o, row.bh / p.NH, row.i, row.bh % p.NH);
    const real *dout_row = head_row(dout, row.bh / p.NH, row.i, row.bh % p.NH);
    float delta = 0.0f;
    for (int c = row.lane; c < (int)p.HS; c += WARP)
        delta += to_float(o_row[c]) * to_float(dout_row[c]);
    delta = warp_sum(delta);
    const float row_lse = lse[row.bh * p.TQ + row.i];

    for (size_t first = 2 * row.lane; first - 2 * row.lane < p.TK; first += SPAN) {
        float2 pair[PAIRS], dpair[PAIRS];
#pragma unroll
        for (int u = 0; u < PAIRS; u++) {
            const size_t j = first + u * STRIDE;
            pair[u] = dpair[u] = make_float2(0.0f, 0.0f);
            if (j < row.seen) {
                pair[u] = *(const float2 *)(s + j);
                dpair[u] = *(const float2 *)(dp + j);
            }
        }
        __syncwarp();
#pragma unroll
        for (int u = 0; u < PAIRS; u++) {
            const size_t j = first + u * STRIDE;
            if (j >= p.TK) continue;
            float2 factor = make_float2(1.0f, 1.0f), x, dx;
            if (p.dropout.probability > 0.0f) factor = dropout_factors(p, row, j);
            x.x = j < row.seen ? expf(pair[u].x - row_lse) : 0.0f;
            x.y = j + 1 < row.seen ? expf(pair[u].y - row_lse) : 0.0f;
            dx.x = j < row.seen ? p.scale * x.x * (factor.x * dpair[u].x - delta) : 0.0f;
            dx.y = j + 1 < row.seen ? p.scale * x.y * (factor.y * dpair[u].y - delta) : 0.0f;
            store_pair(probability, j, make_float2(x.x * factor.x, x.y * factor.y));
            store_pair(ds, j, dx);
        }
    }
}

unsigned row_blocks(const Attention &p) {
    return grid_blocks(divide_up(p.B * p.NH * p.TQ, (size_t)ROWS));
}

/* --- the family ----------------------------------------------------------------------------- */

size_t score_elements(const Attention &p) { return p.B * p.NH * p.TQ * score_row(p); }

/* Query heads that share keys. A product takes one member of every group: member m of group g is
 * head g·(NH/NKV) + m. */
size_t group_size(const Attention &p) { return p.NH / p.NKV; }

/* The (T,HS) matrices of the heads member, member + heads, …. A single token's stride means nothing
 * and may be less than HS. */
template <class T>
Matrices<T> view_matrices(const AttentionView &view, const Attention &p, size_t member,
                          size_t heads) {
    const size_t row = view.token > p.HS ? view.token : p.HS;
    return {(T *)view.data + member * view.head, row, heads * view.head, view.batch, false};
}

/* The (TQ,TK) matrices of one member of each group. */
template <class T> Matrices<T> score_matrices(float *scores, const Attention &p, size_t member) {
    const size_t row = score_row(p) * sizeof(float) / sizeof(T), head = p.TQ * row;
    return {(T *)scores + member * head, row, group_size(p) * head, p.NH * head, false};
}

} // namespace

size_t LAYER(naive_forward_workspace)(const Attention *p) {
    return score_elements(*p) * sizeof(float);
}

void LAYER(naive_forward)(const Attention *problem, const AttentionTensors *x, void *workspace,
                          void *opaque_stream) {
    const Attention &p = *problem;
    const cudaStream_t stream = (cudaStream_t)opaque_stream;
    float *scores = (float *)workspace;
    const size_t group = group_size(p);
    const Matrices<const real> K = view_matrices<const real>(x->k, p, 0, 1);
    const Matrices<const real> V = view_matrices<const real>(x->v, p, 0, 1);

    for (size_t member = 0; member < group; member++)
        multiply(score_matrices<float>(scores, p, member),
                 view_matrices<const real>(x->q, p, member, group), transpose(K),
                 {p.B, p.NKV, p.TQ, p.TK, p.HS, p.scale, 0.0f}, stream);
    softmax_kernel<<<row_blocks(p), THREADS, 0, stream>>>(p, scores, (float *)x->lse);
    LAUNCH_CHECK();
    for (size_t member = 0; member < group; member++)
        multiply(view_matrices<real>(x->o, p, member, group),
                 score_matrices<const real>(scores, p, member), V,
                 {p.B, p.NKV, p.TQ, p.HS, p.TK, 1.0f, 0.0f}, stream);
}

size_t LAYER(naive_backward_workspace)(const Attention *p) {
    return 2 * score_elements(*p) * sizeof(float);
}

void LAYER(naive_backward)(const Attention *problem, const AttentionTensors *x,
                           const AttentionGradients *g, void *workspace, void *opaque_stream) {
    const Attention &p = *problem;
    const cudaStream_t stream = (cudaStream_t)opaque_stream;
    float *scores = (float *)workspace, *dscores = scores + score_elements(p);
    const size_t group = group_size(p);
    const Matrices<const real> K = view_matrices<const real>(x->k, p, 0, 1);
    const Matrices<const real> V = view_matrices<const real>(x->v, p, 0, 1);
    const Matrices<real> dK = view_matrices<real>(g->dk, p, 0, 1);
    const Matrices<real> dV = view_matrices<real>(g->dv, p, 0, 1);

    for (size_t member = 0; member < group; member++) {
        multiply(score_matrices<float>(scores, p, member),
                 view_matrices<const real>(x->q, p, member, group), transpose(K),
                 {p.B, p.NKV, p.TQ, p.TK, p.HS, p.scale, 0.0f}, stream);
        multiply(score_matrices<float>(dscores, p, member),
                 view_matrices<const real>(g->dout, p, member, group), transpose(V),
                 {p.B, p.NKV, p.TQ, p.TK, p.HS, 1.0f, 0.0f}, stream);
    }
    softmax_backward_kernel<<<row_blocks(p), THREADS, 0, stream>>>(
        p, scores, dscores, (const float *)x->lse, x->o, g->dout);
    LAUNCH_CHECK();
    for (size_t member = 0; member < group; member++) {
        const Matrices<const real> P = score_matrices<const real>(scores, p, member);
        const Matrices<const real> dS = score_matrices<const real>(dscores, p, member);
        const Product over_queries = {p.B,  p.NKV, p.TK, p.HS, p.TQ,
                                      1.0f, member > 0 ? 1.0f : 0.0f};
        multiply(dV, transpose(P), view_matrices<const real>(g->dout, p, member, group),
                 over_queries, stream);
        multiply(dK, transpose(dS), view_matrices<const real>(x->q, p, member, group),
                 over_queries, stream);
        multiply(view_matrices<real>(g->dq, p, member, group), dS, K,
                 {p.B, p.NKV, p.TQ, p.HS, p.TK, 1.0f, 0.0f}, stream);
    }
}
