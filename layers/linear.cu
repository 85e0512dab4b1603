/* out = x W + b and its gradients: matrix products by cuBLASLt, bias and GELU in its epilogues.
 *
 * cuBLASLt counts by columns, so it sees a matrix of ours, (R,C) by rows, as (C,R) with leading
 * dimension C: the transpose. D = A B is therefore asked for as Dᵀ = Bᵀ Aᵀ, that is with the two
 * operands exchanged and their own transpositions kept.
 *
 * An algorithm is chosen once for each shape, always the heuristic's first: timing candidates could
 * choose differently in the next process, and a resumed run would no longer repeat bit for bit. On
 * an H200 it would gain 2% of a GPT-2 step, the clock being held down by power. The plans live as
 * long as the process; calls come from one thread.
 *
 * Epilogues are used in bf16 where everything is aligned for them; other shapes, and fp32, the type
 * for checking, take the plain product with elementwise kernels around it. */
#include "layers/linear.h"

#include <cublasLt.h>
#include <stdlib.h>

#include "layers/cuda_common.cuh"
#include "layers/gelu.h"

/* False if cuBLASLt cannot do this product; any other failure is fatal. */
#define CUBLASLT_SUPPORTS(call) cublaslt_supports((call), #call, __LINE__)
#define CUBLASLT_CHECK(call)                                                         \
    do {                                                                             \
        if (!CUBLASLT_SUPPORTS(call))                                                \
            error_fatal(__FILE__, __LINE__, "%s: not supported by cuBLASLt", #call); \
    } while (0)

namespace {

bool cublaslt_supports(cublasStatus_t status, const char *call, int line) {
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED)
        error_fatal(__FILE__, line, "%s: %s", call, cublasLtGetStatusString(status));
    return status == CUBLAS_STATUS_SUCCESS;
}

/* With more, the heuristic splits the weight gradients' long sums further and is slower: on an H200
 * (16384,768)ᵀ(16384,2304) reached 643, 564, 542 TFLOP/s with 32, 64, 128 MiB. */
constexpr size_t WORKSPACE_BYTES = (size_t)32 << 20;
static_assert(WORKSPACE_BYTES <= SCRATCH_FIXED_BYTES, "the workspace is in the scratch");

#ifdef REAL_BF16
constexpr bool HAS_EPILOGUES = true;
constexpr cudaDataType_t REAL_TYPE = CUDA_R_16BF;
#else
constexpr bool HAS_EPILOGUES = false;
constexpr cudaDataType_t REAL_TYPE = CUDA_R_32F;
#endif

/* What D = A B is asked for: A (rows,depth), B (depth,columns) and D, all by rows. */
typedef struct {
    size_t rows, columns, depth;
    bool transpose_a; /* A is stored as (depth,rows) */
    bool transpose_b; /* B is stored as (columns,depth) */
    bool accumulate;  /* D += A B */
    cudaDataType_t type_d;
    cublasLtEpilogue_t epilogue;
} Product;

/* Memory of one product. bias (columns) and gelu (rows,columns), the input of GELU that the forward
 * writes and the backward reads, belong to the epilogue; NULL without. */
typedef struct {
    void *d;
    const void *a, *b, *bias, *gelu;
} Operands;

typedef struct {
    uint32_t a, b, d; /* bytes, up to 16: more makes nothing faster */
} Alignment;

typedef enum { PLAN_NEW, PLAN_READY, PLAN_REFUSED } PlanState;

/* A product in cuBLASLt's terms, whose A is our B and whose B is our A. */
typedef struct Plan {
    struct Plan *next;
    Product product;
    Alignment alignment;
    int ordinal;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t a, b, d;
    PlanState state;
    cublasLtMatmulAlgo_t algorithm;
} Plan;

Plan *plans;

bool product_equal(const Product *x, const Product *y) {
    return x->rows == y->rows && x->columns == y->columns && x->depth == y->depth &&
           x->transpose_a == y->transpose_a && x->transpose_b == y->transpose_b &&
           x->accumulate == y->accumulate && x->type_d == y->type_d && x->epilogue == y->epilogue;
}

uint32_t alignment_of(const void *address) {
    const uintptr_t lowest_bit = (uintptr_t)address & -(uintptr_t)address;
    return lowest_bit == 0 || lowest_bit > 16 ? 16 : (uint32_t)lowest_bit;
}

/* A matrix of ours, (rows,columns) by rows. */
cublasLtMatrixLayout_t layout_create(cudaDataType_t type, size_t rows, size_t columns) {
    cublasLtMatrixLayout_t layout;
    CUBLASLT_CHECK(cublasLtMatrixLayoutCreate(&layout, type, columns, rows, (int64_t)columns));
    return layout;
}

template <typename T>
void describe(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLASLT_CHECK(
        cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof value));
}

template <typename T>
void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
            T value) {
    CUBLASLT_CHECK(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

Plan *plan_create(const Product *product, Alignment alignment, const Device *device) {
    Plan *plan = (Plan *)calloc(1, sizeof *plan);
    if (plan == NULL) error_fatal(__FILE__, __LINE__, "no host memory for a matrix product's plan");
    plan->product = *product;
    plan->alignment = alignment;
    plan->ordinal = device->ordinal;

    const size_t rows = product->rows, columns = product->columns, depth = product->depth;
    plan->a = product->transpose_b ? layout_create(REAL_TYPE, columns, depth)
                                   : layout_create(REAL_TYPE, depth, columns);
    plan->b = product->transpose_a ? layout_create(REAL_TYPE, depth, rows)
                                   : layout_create(REAL_TYPE, rows, depth);
    plan->d = layout_create(product->type_d, rows, columns);

    CUBLASLT_CHECK(
        cublasLtMatmulDescCreate(&plan->description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    describe(plan->description, CUBLASLT_MATMUL_DESC_TRANSA,
             product->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    describe(plan->description, CUBLASLT_MATMUL_DESC_TRANSB,
             product->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    describe(plan->description, CUBLASLT_MATMUL_DESC_EPILOGUE, product->epilogue);

    for (const Plan *other = plans; other != NULL && plan->handle == NULL; other = other->next)
        if (other->ordinal == plan->ordinal) plan->handle = other->handle;
    if (plan->handle == NULL) CUBLASLT_CHECK(cublasLtCreate(&plan->handle));
    plan->next = plans;
    plans = plan;
    return plan;
}

/* Asks the heuristic. The plan's pointers are set, since it may look at them. */
void plan_choose(Plan *plan) {
    cublasLtMatmulPreference_t preference;
    CUBLASLT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)WORKSPACE_BYTES);
    /* A sum split over blocks may only be added up in a step of its own, in float: in place the
     * order could depend on timing, and in the output's type bits would be lost. */
    prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan->alignment.b);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan->alignment.a);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan->alignment.d);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan->alignment.d);

    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const bool ready = CUBLASLT_SUPPORTS(cublasLtMatmulAlgoGetHeuristic(
                           plan->handle, plan->description, plan->a, plan->b, plan->d, plan->d,
                           preference, 1, &result, &found)) &&
                       found == 1 && result.state == CUBLAS_STATUS_SUCCESS;
    plan->state = ready ? PLAN_READY : PLAN_REFUSED;
    if (ready) plan->algorithm = result.algo;
    CUBLASLT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
}

/* D = A B with the epilogue, or false and nothing done if cuBLASLt cannot. */
bool multiply(const Product *product, const Operands *memory, Device *device) {
    const Alignment alignment = {alignment_of(memory->a), alignment_of(memory->b),
                                 alignment_of(memory->d)};
    Plan *plan = plans;
    while (plan != NULL &&
           !(plan->ordinal == device->ordinal && product_equal(&plan->product, product) &&
             plan->alignment.a == alignment.a && plan->alignment.b == alignment.b &&
             plan->alignment.d == alignment.d))
        plan = plan->next;
    if (plan == NULL) plan = plan_create(product, alignment, device);

    if (product->epilogue != CUBLASLT_EPILOGUE_DEFAULT && memory->bias) {
        describe(plan->description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, REAL_TYPE);
        describe(plan->description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, memory->bias);
    }
    if (product->epilogue != CUBLASLT_EPILOGUE_DEFAULT && memory->gelu) {
        describe(plan->description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
                 (int64_t)product->columns);
        describe(plan->description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, memory->gelu);
    }
    if (plan->state == PLAN_NEW) plan_choose(plan);
    if (plan->state == PLAN_REFUSED) return false;

    const float alpha = 1.0f, beta = product->accumulate ? 1.0f : 0.0f;
    const bool done = CUBLASLT_SUPPORTS(cublasLtMatmul(
        plan->handle, plan->description, &alpha, memory->b, plan->a, memory->a, plan->b, &beta,
        memory->d, plan->d, memory->d, plan->d, &plan->algorithm,
        scratch_of(device, WORKSPACE_BYTES), WORKSPACE_BYTES, stream_of(device)));
    if (!done) plan->state = PLAN_REFUSED; /* some limits are found only here */
    return done;
}

constexpr int THREADS = 256;

/* For the odd shapes that cuBLASLt refuses: one thread an element of D. */
template <typename T>
__global__ __launch_bounds__(THREADS) void multiply_kernel(T *__restrict__ d,
                                                           const real *__restrict__ a,
                                                           const real *__restrict__ b,
                                                           Product product) {
    const size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
    if (i >= product.rows * product.columns) return;
    const size_t row = i / product.columns, column = i % product.columns;
    float sum = 0.0f;
    for (size_t k = 0; k < product.depth; k++) {
        const real from_a = product.transpose_a ? a[k * product.rows + row]
                                                : a[row * product.depth + k];
        const real from_b = product.transpose_b ? b[column * product.depth + k]
                                                : b[k * product.columns + column];
        sum += to_float(from_a) * to_float(from_b);
    }
    d[i] = from_float<T>(product.accumulate ? to_float(d[i]) + sum : sum);
}

/* D = A B without an epilogue, whatever the shape. */
void multiply_plain(const Product *product, const Operands *memory, Device *device) {
    Product plain = *product;
    plain.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    if (multiply(&plain, memory, device)) return;
    const real *a = (const real *)memory->a, *b = (const real *)memory->b;
    const unsigned blocks = blocks_for(plain.rows * plain.columns, THREADS);
    if (plain.type_d == REAL_TYPE)
        multiply_kernel<<<blocks, THREADS, 0, stream_of(device)>>>((real *)memory->d, a, b, plain);
    else
        multiply_kernel<<<blocks, THREADS, 0, stream_of(device)>>>((acc *)memory->d, a, b, plain);
    LAUNCH_CHECK();
}

/* out[n,c] = row[c], out (N,C). */
template <int W>
__global__ __launch_bounds__(THREADS) void fill_rows_kernel(real *__restrict__ out,
                                                            const real *__restrict__ row, size_t N,
                                                            size_t C) {
    const size_t i = (blockIdx.x * (size_t)THREADS + threadIdx.x) * W;
    if (i >= N * C) return;
    float value[W];
    load<W>(value, row + i % C);
    store<W>(out + i, value);
}

template <int W> void fill_rows(real *out, const real *row, size_t N, size_t C, Device *device) {
    fill_rows_kernel<W><<<blocks_for(N * C, THREADS * W), THREADS, 0, stream_of(device)>>>(out, row,
                                                                                          N, C);
    LAUNCH_CHECK();
}

/* sum[j] += x[j] + x[stride + j] + … over ROWS rows, all loads in flight together. */
template <int ROWS, int W>
__device__ __forceinline__ void add_rows(float (&sum)[W], const real *x, size_t stride) {
    float value[ROWS][W];
#pragma unroll
    for (int row = 0; row < ROWS; row++) load<W>(value[row], x + row * stride);
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int j = 0; j < W; j++) sum[j] += value[row][j];
}

/* partials[s,c] = the sum of x[n,c] over the rows n of slice s, x (N,C). A warp reads WARP * W
 * columns of a row at a time; the warps of a block take turns at the rows of its slice. */
template <int W>
__global__ __launch_bounds__(THREADS) void sum_rows_kernel(acc *__restrict__ partials,
                                                           const real *__restrict__ x, size_t N,
                                                           size_t C, size_t slice_rows) {
    constexpr int WARPS = THREADS / WARP;
    constexpr int IN_FLIGHT = 4;
    __shared__ acc sums[WARPS][WARP * W];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t first = blockIdx.x * (size_t)(WARP * W), c = first + lane * W;
    const size_t begin = blockIdx.y * slice_rows, end = min(begin + slice_rows, N);

    float sum[W] = {};
    if (c < C) {
        size_t n = begin + warp;
        for (; n + (IN_FLIGHT - 1) * WARPS < end; n += IN_FLIGHT * WARPS)
            add_rows<IN_FLIGHT>(sum, x + n * C + c, WARPS * C);
        for (; n < end; n += WARPS) add_rows<1>(sum, x + n * C + c, WARPS * C);
    }
#pragma unroll
    for (int j = 0; j < W; j++) sums[warp][lane * W + j] = sum[j];
    __syncthreads();
    for (int column = threadIdx.x; column < WARP * W && first + column < C; column += THREADS) {
        acc total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][column];
        partials[blockIdx.y * C + first + column] = total;
    }
}

template <int W> void sum_rows(acc *sums, const real *x, size_t N, size_t C, Device *device) {
    /* Blocks in all: two waves on an H200 at four a multiprocessor. The number is fixed so that
     * sums do not depend on the GPU; with 64 rows the partial sums are a small part of the bytes. */
    constexpr size_t BLOCKS = 1024, MIN_ROWS = 64;
    const unsigned tiles = blocks_for(C, WARP * W);
    const size_t most = div_up(N, MIN_ROWS);
    size_t slices = div_up(BLOCKS, (size_t)tiles);
    if (slices > most) slices = most;
    const size_t slice_rows = div_up(N, slices);
    slices = div_up(N, slice_rows); /* none is empty */

    acc *partials = (acc *)scratch_of(device, slices * C * sizeof(acc));
    sum_rows_kernel<W><<<dim3(tiles, (unsigned)slices), THREADS, 0, stream_of(device)>>>(
        partials, x, N, C, slice_rows);
    LAUNCH_CHECK();
    add_partials(sums, partials, slices, C, device);
}

} // namespace

void LAYER(linear_forward)(void *out, void *pre_gelu, const void *x, const void *weight,
                           const void *bias, size_t N, size_t IC, size_t OC, WeightLayout layout,
                           Device *device) {
    Product product = {};
    product.rows = N, product.columns = OC, product.depth = IC;
    product.type_d = REAL_TYPE;
    product.transpose_b = layout == WEIGHT_OUT_IN;
    product.epilogue = pre_gelu && bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                       : pre_gelu       ? CUBLASLT_EPILOGUE_GELU_AUX
                       : bias           ? CUBLASLT_EPILOGUE_BIAS
                                        : CUBLASLT_EPILOGUE_DEFAULT;
    Operands memory = {out, x, weight, bias, pre_gelu};
    if (HAS_EPILOGUES && vectorisable(OC, {out, weight, bias, pre_gelu}) && vectorisable(IC, {x}) &&
        multiply(&product, &memory, device))
        return;

    memory.d = pre_gelu ? pre_gelu : out;
    if (bias) { /* adding to it rounds once; adding it afterwards would round twice */
        auto fill = vectorisable(OC, {memory.d, bias}) ? fill_rows<VECTOR> : fill_rows<1>;
        fill((real *)memory.d, (const real *)bias, N, OC, device);
        product.accumulate = true;
    }
    multiply_plain(&product, &memory, device);
    if (pre_gelu) LAYER(gelu_forward)(out, pre_gelu, N * OC, device);
}

/* The bias gradient is never an epilogue: those cost twice a kernel of its own (weight gradients)
 * or four times the product (with GELU's derivative), measured on an H200. */
void LAYER(linear_backward)(void *dx, void *dweight, void *dbias, const void *dout, const void *x,
                            const void *weight, const void *pre_gelu, size_t N, size_t IC,
                            size_t OC, WeightLayout layout, Device *device) {
    if (dx) {
        Product product = {};
        product.rows = N, product.columns = IC, product.depth = OC;
        product.type_d = REAL_TYPE;
        product.transpose_b = layout == WEIGHT_IN_OUT;
        product.epilogue = pre_gelu ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DEFAULT;
        const Operands memory = {dx, dout, weight, NULL, pre_gelu};
        const bool fused = HAS_EPILOGUES && vectorisable(IC, {dx, weight, pre_gelu}) &&
                           vectorisable(OC, {dout}) && multiply(&product, &memory, device);
        if (!fused) {
            multiply_plain(&product, &memory, device);
            if (pre_gelu) LAYER(gelu_backward)(dx, dx, pre_gelu, N * IC, device);
        }
    }

    const bool in_out = layout == WEIGHT_IN_OUT;
    Product product = {};
    product.rows = in_out ? IC : OC, product.columns = in_out ? OC : IC, product.depth = N;
    product.transpose_a = true;
    product.type_d = CUDA_R_32F;
    product.accumulate = true;
    const Operands memory = {dweight, in_out ? x : dout, in_out ? dout : x, NULL, NULL};
    multiply_plain(&product, &memory, device);

    if (dbias) {
        auto sum = vectorisable(OC, {dout}) ? sum_rows<VECTOR> : sum_rows<1>;
        sum((acc *)dbias, (const real *)dout, N, OC, device);
    }
}
