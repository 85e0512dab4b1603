/* The instructions of the sm_90a path (PTX ISA, "Asynchronous warpgroup matrix instructions",
 * "Asynchronous copy", "mbarrier"), one function each.
 *
 * A warpgroup is 4 warps whose first index is a multiple of 4. Warp w of it holds rows 16w …
 * 16w+15 of a 64-row accumulator, and lane l of a warp holds of these the elements acc[0][n][2i +
 * c], i, c in {0,1}: row l/4 + 8i, column 8n + 2(l%4) + c. That is mma.cuh's layout with M = 1,
 * and the accumulator of one product, packed, is the A operand of the next.
 *
 * A tile of ROWS rows in shared memory is stored as blocks of 64 columns, each ROWS × 128 bytes at
 * a multiple of 1024, with the 16-byte chunks of row r permuted by c ^ (r % 8): the 128-byte
 * swizzle, which the copy engine writes and the tensor cores read. */
#ifndef ATTENTION_HOPPER_CUH
#define ATTENTION_HOPPER_CUH

#include <cuda.h>

#include "attention/mma_accumulator.cuh"

enum { WARPGROUP = 128 };

/* --- tiles and matrix products --- */

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

/* --- barriers and roles --- */

/* x, which is the same in all lanes, in a way that tells the compiler so: what it computes from it
 * goes to the uniform registers, where wgmma wants its descriptors. */
__device__ __forceinline__ unsigned uniform(unsigned x) { return __shfl_sync(~0u, x, 0); }

/* Shared memory written by ordinary stores before this is seen by wgmma and the copy engine. */
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

/* An mbarrier in shared memory. Phases count from 0; wait(phase) returns when that phase, by its
 * parity, has ended: a phase ends when `count` arrivals and all announced bytes have come. */
struct Barrier {
    uint32_t address;

    __device__ __forceinline__ void init(int count) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(address), "r"(count)
                     : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(address) : "memory");
    }
    __device__ __forceinline__ void arrive_expecting(uint32_t bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(address),
                     "r"(bytes)
                     : "memory");
    }
    __device__ __forceinline__ void wait(uint32_t phase) const {
        asm volatile("{\n.reg .pred done;\n"
                     "again:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}\n" ::"r"(address),
                     "r"(phase & 1)
                     : "memory");
    }
};

/* After the inits, before the barrier that shows them to the block. */
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

/* Named barriers: `threads` in all, of which some wait and some only arrive. */
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/* All warps of a warpgroup give up, or wait for, registers; REGISTERS a thread remain. */
template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

/* The kernel that was launched to start under this one may start; until this one has ended and what
 * it wrote is seen, that one waits (PTX ISA, "griddepcontrol"). */
__device__ __forceinline__ void allow_next_kernel() {
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
__device__ __forceinline__ void wait_for_last_kernel() {
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

/* --- bulk copies --- */

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

/* The map's box at (column, row, head, batch) into shared memory; its bytes, of which those outside
 * the tensor are zeros, count at the barrier. */
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap *map, Barrier barrier,
                                         int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(target),
                 "l"(map), "r"(barrier.address), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

/* `bytes` (a multiple of 16) from global to shared memory, both aligned to 16. */
__device__ __forceinline__ void copy_bytes(uint32_t target, const void *source, uint32_t bytes,
                                           Barrier barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];\n" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier.address)
                 : "memory");
}

/* Shared memory to the map's box; what lies outside the tensor is dropped. */
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t source, int column,
                                          int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], "
                 "[%1];\n" ::"l"(map),
                 "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void store_commit() {
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
/* This thread's committed stores have read their shared memory. */
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

/* They are complete: what they wrote is seen by this thread. */
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}
/* Global memory read or written by ordinary accesses before this, and by bulk copies after it. */
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

/* `bytes` of floats (a multiple of 16) in shared memory are added to those at target, which is
 * aligned to 16; committed and waited for like a store. */
__device__ __forceinline__ void add_bytes(float *target, uint32_t source, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                 "[%0], [%1], %2;\n" ::"l"(target),
                 "r"(source), "r"(bytes)
                 : "memory");
}

#endif
