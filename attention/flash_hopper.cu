/* flash_hopper, what its forward and backward share on the host: which problems the family takes,
 * and how the copy engine finds a tensor. */
#include <cudaTypedefs.h>

#include "attention/flash_hopper.cuh"

CUtensorMap flash_hopper_map(AttentionView view, size_t B, size_t T, size_t heads, size_t HS,
                             unsigned rows) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode;
    if (!encode) {
        void *symbol = NULL;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000,
                                                    cudaEnableDefault, &found));
#else
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &symbol, cudaEnableDefault,
                                           &found));
#endif
        encode = (PFN_cuTensorMapEncodeTiled_v12000)symbol;
    }
    CUtensorMap map;
    /* The stride of an axis of one element is free, and may be anything in the view. */
    const cuuint64_t sizes[4] = {HS, T, heads, B};
    const cuuint64_t strides[3] = {2 * (T > 1 ? view.token : HS), 2 * (heads > 1 ? view.head : HS),
                                   2 * (B > 1 ? view.batch : HS)};
    const cuuint32_t box[4] = {64, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    const CUresult result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, view.data, sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        error_fatal(__FILE__, __LINE__, "cuTensorMapEncodeTiled: error %d", (int)result);
    return map;
}

/* The driver loads one of the images in the program (sm_80, sm_90a, PTX, …). Each has this variable
 * with its own answer: what an sm_90 GPU got may be compiled from PTX, with empty kernels. */
static __device__ bool loaded_image_has_kernels = HOPPER_KERNELS_EXIST;

/* Nonzero if the current GPU runs this problem with this family. */
extern "C" int flash_hopper_supported(const Attention *problem) {
    int device, major;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
        cudaGetLastError(); /* no usable GPU is an answer, not an error for the next check */
        return 0;
    }
    if (major != 9 || problem->HS % 8 != 0 || problem->HS > 128)
        return 0;
    static const bool built = [] {
        bool answer;
        CUDA_CHECK(cudaMemcpyFromSymbol(&answer, loaded_image_has_kernels, sizeof answer));
        return answer;
    }();
    return built && flash_mma_supported(problem);
}
