/* What the layers' CUDA twins share: 16-byte accesses, sums in a fixed order, launch arithmetic.
 *
 * A kernel on rows is a template on W, the elements that a thread handles at a time: VECTOR if
 * every row starts on a 16-byte boundary (vectorisable), else 1. A row is then a whole number of
 * accesses and no tail exists. A kernel on a flat array takes W = VECTOR and ends with load_some
 * and store_some.
 *
 * Everything here has internal linkage or is a template on its types, since each layer is compiled
 * once for every `real`. */
#ifndef LAYERS_CUDA_COMMON_CUH
#define LAYERS_CUDA_COMMON_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include <initializer_list>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "runtime/real.h"

enum { WARP = 32 };
enum { VECTOR = 16 / (int)sizeof(real) }; /* elements of a 16-byte access */

/* Bytes of scratch that every layer can count on, whatever its shapes (layers_scratch_bytes). */
constexpr size_t SCRATCH_FIXED_BYTES = (size_t)64 << 20;

/* After every launch. */
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())

static inline cudaStream_t stream_of(const Device *device) {
    return (cudaStream_t)device->stream;
}

/* The device's scratch, which must hold this many bytes. */
static inline void *scratch_of(const Device *device, size_t bytes) {
    if (bytes > device->scratch_bytes)
        error_fatal(__FILE__, __LINE__,
                    "a layer needs %zu bytes of scratch and the device has %zu; see "
                    "device_reserve_scratch and layers_scratch_bytes",
                    bytes, device->scratch_bytes);
    return device->scratch;
}

template <typename T>
static __host__ __device__ __forceinline__ constexpr T div_up(T n, T by) {
    return n / by + (n % by != 0);
}

/* Blocks for n items at `per_block` each. */
static inline unsigned blocks_for(size_t n, size_t per_block) {
    size_t blocks = div_up(n, per_block);
    if (blocks > 0x7fffffff)
        error_fatal(__FILE__, __LINE__, "%zu blocks exceed a CUDA grid", blocks);
    return (unsigned)blocks;
}

/* Whether rows of `length` elements at all these addresses can be read 16 bytes at a time. NULL is
 * allowed and counts as aligned. */
static inline bool vectorisable(size_t length, std::initializer_list<const void *> addresses) {
    bool yes = length % VECTOR == 0;
    for (const void *address : addresses) yes = yes && (uintptr_t)address % 16 == 0;
    return yes;
}

static __device__ __forceinline__ float to_float(float x) { return x; }
template <typename T> static __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
#ifdef REAL_BF16
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
#endif

/* The widest type of one access to `BYTES` bytes. */
template <int BYTES> struct Word { static_assert(BYTES % 16 == 0, ""); typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef uint32_t type; };
template <> struct Word<2> { typedef uint16_t type; };

/* value[0..W) = p[0..W). p is aligned to W * sizeof(T) bytes, 16 at most. */
template <int W, typename T>
static __device__ __forceinline__ void load(float (&value)[W], const T *p) {
    typedef typename Word<W * sizeof(T)>::type Access;
    constexpr int ACCESSES = W * sizeof(T) / sizeof(Access);
    union {
        Access access[ACCESSES];
        uint8_t bytes[W * sizeof(T)];
    } raw;
#pragma unroll
    for (int i = 0; i < ACCESSES; i++) raw.access[i] = ((const Access *)p)[i];
#pragma unroll
    for (int i = 0; i < W; i++) value[i] = to_float(((const T *)raw.bytes)[i]);
}

template <int W, typename T>
static __device__ __forceinline__ void store(T *p, const float (&value)[W]) {
    typedef typename Word<W * sizeof(T)>::type Access;
    constexpr int ACCESSES = W * sizeof(T) / sizeof(Access);
    union {
        Access access[ACCESSES];
        uint8_t bytes[W * sizeof(T)];
    } raw;
#pragma unroll
    for (int i = 0; i < W; i++) ((T *)raw.bytes)[i] = from_float<T>(value[i]);
#pragma unroll
    for (int i = 0; i < ACCESSES; i++) ((Access *)p)[i] = raw.access[i];
}

/* The same for the end of an array: only `count` elements exist; the missing values are 0. If there
 * are W of them, p is aligned as above. */
template <int W, typename T>
static __device__ __forceinline__ void load_some(float (&value)[W], const T *p, size_t count) {
    if (count >= W) {
        load<W>(value, p);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) value[i] = i < count ? to_float(p[i]) : 0.0f;
    }
}

template <int W, typename T>
static __device__ __forceinline__ void store_some(T *p, const float (&value)[W], size_t count) {
    if (count >= W) {
        store<W>(p, value);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            if (i < count) p[i] = from_float<T>(value[i]);
    }
}

/* Drops and scales elements index … index + W - 1 of a tensor; W is a power of two up to 16 that
 * divides index. */
template <int W>
static __device__ __forceinline__ void dropout_apply(float (&value)[W], uint64_t index,
                                                     Dropout dropout) {
    static_assert(16 % W == 0, "the elements must come from one draw");
    if (dropout.probability <= 0.0f) return;
    Philox draw = dropout_draw(dropout.key, index);
    /* The W bytes wanted, moved to the front by selections: registers cannot be indexed. */
    if (W <= 8 && index % 16 >= 8) draw.word[0] = draw.word[2], draw.word[1] = draw.word[3];
    if (W <= 4 && index % 8 >= 4) draw.word[0] = draw.word[1];
    if (W <= 2) draw.word[0] >>= 8 * (index % 4);
    const unsigned threshold = dropout_threshold(dropout.probability);
    const float scale = dropout_scale(dropout.probability);
#pragma unroll
    for (int i = 0; i < W; i++)
        value[i] = philox_byte(&draw, i) < threshold ? 0.0f : value[i] * scale;
}

/* Over the 32 lanes; every lane gets the same bits, since each step adds the same two numbers. */
static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

/* Over a block of THREADS; every thread calls it and every thread gets the sum. */
template <int THREADS> static __device__ __forceinline__ float block_sum(float x) {
    static_assert(THREADS % WARP == 0 && THREADS <= WARP * WARP, "one warp adds the warps' sums");
    __shared__ float sums[WARP];
    x = warp_sum(x);
    __syncthreads(); /* the sums of an earlier call have been read */
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    return warp_sum(lane < THREADS / WARP ? sums[lane] : 0.0f);
}

template <int THREADS> static __device__ __forceinline__ float block_max(float x) {
    static_assert(THREADS % WARP == 0 && THREADS <= WARP * WARP, "one warp takes the maxima");
    __shared__ float maxima[WARP];
    x = warp_max(x);
    __syncthreads(); /* the maxima of an earlier call have been read */
    if (threadIdx.x % WARP == 0) maxima[threadIdx.x / WARP] = x;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    return warp_max(maxima[lane < THREADS / WARP ? lane : 0]);
}

/* The last of two stages of a sum over rows: out[c] += Σ_p partials[p,c], partials (P,C). */
template <int WARPS>
static __global__ __launch_bounds__(WARP *WARPS) void add_partials_kernel(
    acc *__restrict__ out, const acc *__restrict__ partials, size_t P, size_t C) {
    __shared__ acc sums[WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t c = blockIdx.x * (size_t)WARP + lane;
    acc sum = 0;
    if (c < C) {
#pragma unroll 4
        for (size_t p = warp; p < P; p += WARPS) sum += partials[p * C + c];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum += sums[other][lane];
    out[c] += sum;
}

/* Few columns: the rows must give the parallelism. A template so that only its users compile it. */
template <int WARPS = 32>
static inline void add_partials(acc *out, const acc *partials, size_t P, size_t C,
                                Device *device) {
    add_partials_kernel<WARPS>
        <<<blocks_for(C, WARP), WARP * WARPS, 0, stream_of(device)>>>(out, partials, P, C);
    LAUNCH_CHECK();
}

#endif
