/* The ceiling that a rung is held against: the vendor's bf16 matrix product of 8192³ on random
 * numbers, measured in the same run, since the clock that a GPU holds depends on the day. */
#include <cublasLt.h>

#include "dev/attention/harness.cuh"

#define CUBLAS_CHECK(call)                                                               \
    do {                                                                                 \
        cublasStatus_t status_ = (call);                                                 \
        if (status_ != CUBLAS_STATUS_SUCCESS)                                            \
            error_fatal(__FILE__, __LINE__, "%s: %s", #call, cublasLtGetStatusName(status_)); \
    } while (0)

double measure_ceiling(cudaStream_t stream) {
    const size_t n = 8192, workspace_bytes = 64 << 20;
    bf16 *a, *b, *c;
    void *workspace;
    for (bf16 **x : {&a, &b, &c})
        CUDA_CHECK(cudaMalloc(x, n * n * sizeof(bf16)));
    CUDA_CHECK(cudaMalloc(&workspace, workspace_bytes));
    fill_normal(a, n * n, 1);
    fill_normal(b, n * n, 2);
    CUDA_CHECK(cudaDeviceSynchronize());

    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t layout;
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtCreate(&handle));
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                sizeof transposed));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, n, n, (int64_t)n));
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference,
                                                      CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &workspace_bytes, sizeof workspace_bytes));
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(handle, operation, layout, layout, layout, layout,
                                                preference, 1, &found, &count));
    if (count == 0)
        error_fatal(__FILE__, __LINE__, "cuBLASLt has no algorithm for a bf16 product of 8192³");

    const double seconds = median_seconds(stream, 1, [&](int) {
        const float one = 1, zero = 0;
        CUBLAS_CHECK(cublasLtMatmul(handle, operation, &one, a, layout, b, layout, &zero, c, layout,
                                    c, layout, &found.algo, workspace, workspace_bytes, stream));
    });

    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(layout));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(operation));
    CUBLAS_CHECK(cublasLtDestroy(handle));
    for (void *x : {(void *)a, (void *)b, (void *)c, workspace})
        CUDA_CHECK(cudaFree(x));
    return 2.0 * n * n * n / seconds / 1e12;
}
