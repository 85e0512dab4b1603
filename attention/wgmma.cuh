/* Matrix products by warpgroups on sm_90a (PTX ISA, "Asynchronous warpgroup matrix instructions"),
 * and the tiles in shared memory that they read.
 *
 * A warpgroup is 4 warps whose first index is a multiple of 4. Warp w of it holds rows 16w …
 * 16w+15 of a 64-row accumulator, and lane l of a warp holds of these the elements acc[0][n][2i +
 * c], i, c in {0,1}: row l/4 + 8i, column 8n + 2(l%4) + c. That is mma.cuh's layout with M = 1,
 * and the accumulator of one product, packed, is the A operand of the next.
 *
 * A tile of ROWS rows in shared memory is stored as blocks of 64 columns, each ROWS × 128 bytes at
 * a multiple of 1024, with the 16-byte chunks of row r permuted by c ^ (r % 8): the 128-byte
 * swizzle, which the copy engine writes and the tensor cores read. */
#ifndef ATTENTION_WGMMA_CUH
#define ATTENTION_WGMMA_CUH

#include "attention/mma_accumulator.cuh"

enum { WARPGROUP = 128 };

/* Which index of a product runs along a tile's rows: its own (M or N) with the summed index K along
 * the columns, or K itself. */
enum Major { K_ALONG_COLUMNS = 0, K_ALONG_ROWS = 1 };

template <int ROWS_, int COLUMNS_>
struct Blocks {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr uint32_t BLOCK_BYTES = 128 * ROWS, BYTES = COLUMNS / 64 * BLOCK_BYTES;
    static_assert(ROWS % 8 == 0 && COLUMNS % 64 == 0, "whole swizzle patterns");

    uint32_t base; /* shared address, a multiple of 1024 */

    /* Address of chunk c (8 columns) of a row. */
    __device__ __forceinline__ uint32_t chunk(int row, int c) const {
        return base + c / 8 * BLOCK_BYTES + 128 * row + 16 * ((c ^ row) % 8);
    }

    /* What wgmma reads of the tile from (row, column) on; row a multiple of 8, column of 16, and of
     * 64 if K runs along the rows. The low half of a descriptor: HIGH is the same for all. */
    __device__ __forceinline__ uint32_t operand(int row, int column) const {
        const uint32_t start = base + 128 * row + column / 64 * BLOCK_BYTES + column % 64 * 2;
        return (start & 0x3FFFF) >> 4 | BLOCK_BYTES >> 4 << 16;
    }

    /* From an operand to the one that is k further along K. */
    static __device__ __forceinline__ constexpr uint32_t advance(Major major, int k) {
        return (major == K_ALONG_ROWS ? 128 * k : k / 64 * BLOCK_BYTES + k % 64 * 2) >> 4;
    }
};

/* x, which is the same in all lanes, in a way that tells the compiler so: what it computes from it
 * goes to the uniform registers, where wgmma wants its descriptors. */
__device__ __forceinline__ unsigned uniform(unsigned x) { return __shfl_sync(~0u, x, 0); }

/* Bits 32 … 63 of a descriptor: 8 rows are 1024 bytes, swizzled by 128. */
#define WGMMA_HIGH "0x40000040"

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
/* Until at most PENDING of the committed groups are still running. */
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}
/* After a wait: no use of the accumulator moves above it. */
template <int N>
__device__ __forceinline__ void pin(float (&acc)[1][N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("" : "+f"(acc[0][n][e])::"memory");
}

/* The compiler moves waits up over arithmetic, and so what should run under a product to behind
 * it. It does not move them over a store to shared memory: this one needs x, and so all that x is
 * computed from. It never happens, as long as the caller's x is at most 2^127 (or NaN); `shared`
 * is any address. */
__device__ __forceinline__ void finish_before_wait(float x, uint32_t shared) {
    asm volatile("{\n.reg .pred p;\n"
                 "setp.gt.f32 p, %0, 0f7F000000;\n"
                 "@p st.shared.f32 [%1], %0;\n}\n" ::"f"(x),
                 "r"(shared)
                 : "memory");
}

#define WGMMA_D0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_4(n) "+f"(d[0][n][0]), "+f"(d[0][n][1]), "+f"(d[0][n][2]), "+f"(d[0][n][3])
#define WGMMA_16(n) WGMMA_4(n), WGMMA_4(n + 1), WGMMA_4(n + 2), WGMMA_4(n + 3)
#define WGMMA_32(n) WGMMA_16(n), WGMMA_16(n + 4)

/* A in shared memory (a descriptor), or in registers (a fragment of 16 columns). `sum` false: d is
 * overwritten. */
#define WGMMA(N, LIST, OUTPUTS, A, B, SUM, TA, TB)                                                \
    template <Major A_MAJOR, Major B_MAJOR>                                                       \
    __device__ __forceinline__ void wgmma(float (&d)[1][N / 8][4], uint32_t a, uint32_t b,        \
                                          bool sum) {                                             \
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #SUM ", 0;\n"          \
                     "mov.b64 a, {%" #A ", " WGMMA_HIGH "};\n"                                    \
                     "mov.b64 b, {%" #B ", " WGMMA_HIGH "};\n"                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST            \
                     "}, a, b, p, 1, 1, %" #TA ", %" #TB ";\n}\n"                                 \
                     : OUTPUTS                                                                    \
                     : "r"(a), "r"(b), "r"((int)sum), "n"((int)A_MAJOR), "n"((int)B_MAJOR));      \
    }
#define WGMMA_REGISTERS(N, LIST, OUTPUTS, A0, A1, A2, A3, B, SUM, TB)                             \
    template <Major B_MAJOR>                                                                      \
    __device__ __forceinline__ void wgmma(float (&d)[1][N / 8][4], const uint32_t (&a)[4],        \
                                          uint32_t b, bool sum) {                                 \
        asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" #SUM ", 0;\n"             \
                     "mov.b64 b, {%" #B ", " WGMMA_HIGH "};\n"                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST            \
                     "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1, %" #TB ";\n}\n"    \
                     : OUTPUTS                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((int)sum),         \
                       "n"((int)B_MAJOR));                                                        \
    }
#define WGMMA_LIST_64 WGMMA_D0 ", " WGMMA_D16
#define WGMMA_LIST_128 WGMMA_LIST_64 ", " WGMMA_D32 ", " WGMMA_D48
#define WGMMA_OUTPUTS_64 WGMMA_32(0)
#define WGMMA_OUTPUTS_128 WGMMA_32(0), WGMMA_32(8)
WGMMA(64, WGMMA_LIST_64, WGMMA_OUTPUTS_64, 32, 33, 34, 35, 36)
WGMMA(128, WGMMA_LIST_128, WGMMA_OUTPUTS_128, 64, 65, 66, 67, 68)
WGMMA_REGISTERS(64, WGMMA_LIST_64, WGMMA_OUTPUTS_64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_REGISTERS(128, WGMMA_LIST_128, WGMMA_OUTPUTS_128, 64, 65, 66, 67, 68, 69, 70)
#undef WGMMA
#undef WGMMA_REGISTERS

/* d (64 × 8N) = A · B (+ d if sum), K columns summed; A and B from these places of their tiles.
 * Started, not finished: commit and wait. */
template <int K, Major A_MAJOR, Major B_MAJOR, int N, class A, class B>
__device__ __forceinline__ void start_product(float (&d)[1][N][4], A a, int a_row, int a_column,
                                              B b, int b_row, int b_column, bool sum) {
    const uint32_t a0 = a.operand(a_row, a_column), b0 = b.operand(b_row, b_column);
#pragma unroll
    for (int k = 0; k < K; k += 16)
        wgmma<A_MAJOR, B_MAJOR>(d, a0 + A::advance(A_MAJOR, k), b0 + B::advance(B_MAJOR, k),
                                sum || k > 0);
}

/* The same with A in registers. */
template <Major B_MAJOR, int STEPS, int N, class B>
__device__ __forceinline__ void start_product(float (&d)[1][N][4], const Fragments<1, STEPS> &a,
                                              B b, int b_row, int b_column, bool sum) {
    const uint32_t b0 = b.operand(b_row, b_column);
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        wgmma<B_MAJOR>(d, a.x[k][0], b0 + B::advance(B_MAJOR, 16 * k), sum || k > 0);
}

/* Rows row0 … row0+63 of a tile as the A operand, of all its columns. */
template <class Tile>
__device__ __forceinline__ Fragments<1, Tile::COLUMNS / 16> load_operand(Tile tile, int row0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = row0 + 16 * warp + lane % 16;
    Fragments<1, Tile::COLUMNS / 16> a;
#pragma unroll
    for (int k = 0; k < Tile::COLUMNS / 16; k++)
        load_matrices(a.x[k][0], tile.chunk(row, 2 * k + lane / 16));
    return a;
}

/* A packed accumulator into rows row0 … row0+63 of a tile, from its first column on. */
template <int STEPS, class Tile>
__device__ __forceinline__ void store_matrices(Tile tile, int row0, const Fragments<1, STEPS> &a) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = row0 + 16 * warp + lane % 16;
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                         tile.chunk(row, 2 * k + lane / 16)),
                     "r"(a.x[k][0][0]), "r"(a.x[k][0][1]), "r"(a.x[k][0][2]),
                     "r"(a.x[k][0][3])
                     : "memory");
}

#endif
