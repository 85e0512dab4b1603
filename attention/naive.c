/* Attention by its definition on the CPU, the baseline of every comparison: the whole score
 * matrices of all heads, (B,NH,TQ,TK), are written to the workspace.
 *
 *   forward    S = scale · Q Kᵀ + mask,  P = softmax(S) in place,  O = (P ∘ Z) V
 *   backward   P = exp(S - LSE),  dP = dO Vᵀ,  dS = scale · P ∘ (Z ∘ dP - D),  D = rowsum(dO ∘ O)
 *              dV = (P ∘ Z)ᵀ dO,  dQ = dS K,  dK = dSᵀ Q
 *
 * Z are the dropout factors. These are Algorithm 0, and Algorithm 3 with P recomputed from LSE, of
 * Dao et al. 2022 (arXiv 2205.14135), with scale, mask and dropout; D equals the rowsum(P ∘ Z ∘ dP)
 * of the second. Heads run in parallel, each product is one BLAS call. */
#include <math.h>
#ifdef TILEGPT_BLAS
#include <cblas.h>
#endif

#include "attention/dropout_row.h"
#include "attention/family.h"
#include "attention/mask.h"
#include "runtime/vector_math.h"

/* A matrix by rows, `row` elements apart, and whether it is used transposed. */
typedef struct {
    real *data;
    size_t row;
    int transposed;
} Matrix;

/* C (M,N) = alpha A B + beta C, with A (M,K) and B (K,N) after their transposes. beta = 0
 * overwrites C whatever it holds. */
static void product(Matrix C, Matrix A, Matrix B, size_t M, size_t N, size_t K, real alpha,
                    real beta) {
#ifdef TILEGPT_BLAS
#ifdef REAL_F64
#define gemm cblas_dgemm
#else
#define gemm cblas_sgemm
#endif
    gemm(CblasRowMajor, A.transposed ? CblasTrans : CblasNoTrans,
         B.transposed ? CblasTrans : CblasNoTrans, (int)M, (int)N, (int)K, alpha, A.data,
         (int)A.row, B.data, (int)B.row, beta, C.data, (int)C.row);
#else
    const size_t a_row = A.transposed ? 1 : A.row, a_column = A.transposed ? A.row : 1;
    const size_t b_row = B.transposed ? 1 : B.row, b_column = B.transposed ? B.row : 1;
    for (size_t m = 0; m < M; m++) {
        real *c = C.data + m * C.row;
        for (size_t n = 0; n < N; n++) c[n] = beta == 0 ? 0 : beta * c[n];
        for (size_t k = 0; k < K; k++) {
            const real a = alpha * A.data[m * a_row + k * a_column];
            for (size_t n = 0; n < N; n++) c[n] += a * B.data[k * b_row + n * b_column];
        }
    }
#endif
}

/* The (T,HS) matrix of one head. A single token's stride means nothing, and may be one that BLAS
 * refuses. */
static Matrix head(AttentionView view, size_t b, size_t h, size_t T, size_t HS) {
    real *data = (real *)view.data + b * view.batch + h * view.head;
    return (Matrix){data, T > 1 ? view.token : HS, 0};
}

static Matrix transpose(Matrix m) { return (Matrix){m.data, m.row, !m.transposed}; }

/* The head's (TQ,TK) matrix in the workspace. */
static Matrix scores(const Attention *p, void *workspace, size_t bh) {
    return (Matrix){(real *)workspace + bh * p->TQ * p->TK, p->TK, 0};
}

static size_t score_bytes(const Attention *p) {
    return p->B * p->NH * p->TQ * p->TK * sizeof(real);
}

/* s[0 … TK): scores to softmax over the keys seen, then dropout. Returns the LSE. */
static real softmax_row(const Attention *p, real *s, size_t bh, size_t i) {
    const size_t seen = keys_seen(p->mask, i, p->TQ, p->TK);
    real max = -(real)INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
    for (size_t j = 0; j < seen; j++) max = s[j] > max ? s[j] : max;
#pragma omp simd reduction(+ : sum)
    for (size_t j = 0; j < seen; j++) {
        s[j] = real_exp(s[j] - max);
        sum += s[j];
    }
    const real inverse = 1 / sum;
    for (size_t j = 0; j < seen; j++) s[j] *= inverse;
    for (size_t j = seen; j < p->TK; j++) s[j] = 0;
    if (p->dropout.probability > 0)
        for (size_t first = 0; first < seen; first += DROPOUT_BLOCK) {
            real factor[DROPOUT_BLOCK];
            dropout_row(factor, p->dropout, bh, i, first);
            for (size_t j = first; j < seen && j < first + DROPOUT_BLOCK; j++)
                s[j] *= factor[j - first];
        }
    return max + (real)log((double)sum);
}

size_t LAYER(naive_forward_workspace)(const Attention *p) { return score_bytes(p); }

void LAYER(naive_forward)(const Attention *p, const AttentionTensors *x, void *workspace,
                          void *stream) {
    (void)stream;
    const size_t TQ = p->TQ, TK = p->TK, HS = p->HS, heads = p->B * p->NH;
    /* A BLAS call inside a parallel region keeps to its thread; a single head gets all threads. */
#pragma omp parallel for if (heads > 1)
    for (size_t bh = 0; bh < heads; bh++) {
        const size_t b = bh / p->NH, h = bh % p->NH, kv = h / (p->NH / p->NKV);
        const Matrix S = scores(p, workspace, bh);
        const Matrix Q = head(x->q, b, h, TQ, HS), O = head(x->o, b, h, TQ, HS);
        const Matrix K = head(x->k, b, kv, TK, HS), V = head(x->v, b, kv, TK, HS);
        product(S, Q, transpose(K), TQ, TK, HS, (real)p->scale, 0);
        for (size_t i = 0; i < TQ; i++)
            ((real *)x->lse)[bh * TQ + i] = softmax_row(p, S.data + i * TK, bh, i);
        product(O, S, V, TQ, HS, TK, 1, 0);
    }
}

/* s[0 … TK): scores to P ∘ Z. dp: dP to dS. */
static void softmax_row_backward(const Attention *p, real *s, real *dp, const real *o,
                                 const real *dout, real lse, size_t bh, size_t i) {
    const size_t seen = keys_seen(p->mask, i, p->TQ, p->TK);
    const real scale = (real)p->scale;
    real d = 0;
#pragma omp simd reduction(+ : d)
    for (size_t c = 0; c < p->HS; c++) d += o[c] * dout[c];
#pragma omp simd
    for (size_t j = 0; j < seen; j++) s[j] = real_exp(s[j] - lse);
    if (p->dropout.probability > 0) {
        for (size_t first = 0; first < seen; first += DROPOUT_BLOCK) {
            real factor[DROPOUT_BLOCK];
            dropout_row(factor, p->dropout, bh, i, first);
            for (size_t j = first; j < seen && j < first + DROPOUT_BLOCK; j++) {
                dp[j] = scale * s[j] * (factor[j - first] * dp[j] - d);
                s[j] *= factor[j - first];
            }
        }
    } else {
        for (size_t j = 0; j < seen; j++) dp[j] = scale * s[j] * (dp[j] - d);
    }
    for (size_t j = seen; j < p->TK; j++) s[j] = dp[j] = 0;
}

size_t LAYER(naive_backward_workspace)(const Attention *p) { return 2 * score_bytes(p); }

void LAYER(naive_backward)(const Attention *p, const AttentionTensors *x,
                           const AttentionGradients *g, void *workspace, void *stream) {
    (void)stream;
    const size_t TQ = p->TQ, TK = p->TK, HS = p->HS, group = p->NH / p->NKV;
    /* Heads that share keys and values run one after another and add to the same dK and dV. */
#pragma omp parallel for if (p->B * p->NKV > 1)
    for (size_t task = 0; task < p->B * p->NKV; task++) {
        const size_t b = task / p->NKV, kv = task % p->NKV;
        const Matrix K = head(x->k, b, kv, TK, HS), V = head(x->v, b, kv, TK, HS);
        const Matrix dK = head(g->dk, b, kv, TK, HS), dV = head(g->dv, b, kv, TK, HS);
        for (size_t member = 0; member < group; member++) {
            const size_t h = kv * group + member, bh = b * p->NH + h;
            const Matrix Q = head(x->q, b, h, TQ, HS), dO = head(g->dout, b, h, TQ, HS);
            const Matrix O = head(x->o, b, h, TQ, HS), dQ = head(g->dq, b, h, TQ, HS);
            const Matrix P = scores(p, workspace, bh);
            const Matrix dP = scores(p, (char *)workspace + score_bytes(p), bh);
            const real *lse = (const real *)x->lse + bh * TQ, beta = member > 0;
            product(P, Q, transpose(K), TQ, TK, HS, (real)p->scale, 0);
            product(dP, dO, transpose(V), TQ, TK, HS, 1, 0);
            for (size_t i = 0; i < TQ; i++)
                softmax_row_backward(p, P.data + i * TK, dP.data + i * TK, O.data + i * O.row,
                                     dO.data + i * dO.row, lse[i], bh, i);
            product(dV, transpose(P), dO, TK, HS, TQ, 1, beta);
            product(dQ, dP, K, TQ, HS, TK, 1, 0);
            product(dK, transpose(dP), Q, TK, HS, TQ, 1, beta);
        }
    }
}
