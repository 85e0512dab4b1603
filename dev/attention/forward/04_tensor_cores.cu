/* Rung 4: both products on the tensor cores (mma.sync, bf16 factors, float sums).
 *
 * The change: a block is 4 warps, each of which owns 16 queries and computes 16×64 scores at a time
 * by m16n8k16 products. The layout of an accumulator is that of an A operand, so P, rounded to
 * bf16, goes from the registers of S straight into P V: no score is ever stored, not even on chip.
 * The scale is folded into the exponential, exp(scale · (s - m)) = exp2(c·s - c·m) with
 * c = scale · log2 e: one fused multiply-add and one ex2.
 *
 * What limits it: a block loads a tile, waits, computes, and loads the next; and feeding B operands
 * through 32- and 16-bit loads takes more instructions than multiplying.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 105 (15%), HS=64 137 (20%). */
#include "attention/mma_mask.cuh"
#include "dev/attention/padded_tile.cuh"
#include "dev/attention/softmax_rows.cuh"

namespace {

enum { THREADS = 128, QUERIES = 64, KEYS = 64 };

template <int HS>
__global__ void __launch_bounds__(THREADS) forward_kernel(const Problem p) {
    if (!HAS_MMA)
        return;
    extern __shared__ __align__(16) unsigned char memory[];
    const PaddedTile<HS> k_tile = {(bf16 *)memory}, v_tile = {k_tile.base + KEYS * k_tile.PITCH};
    const int i0 = (gridDim.x - 1 - blockIdx.x) * QUERIES, bh = blockIdx.y; /* longest first */
    const int warp_i0 = i0 + threadIdx.x / 32 * 16;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const Mask mask = {p.T, p.causal ? 0 : 1 << 30};

    load_rows<QUERIES, THREADS, false>(k_tile, p.q + head, p, i0);
    __syncthreads();
    const auto q = row_fragments(k_tile, warp_i0 - i0);
    OnlineSoftmax<1> softmax;
    float out[1][HS / 8][4], correction[1][2];
    clear(out);

    const int keys = p.causal ? min(p.T, i0 + QUERIES) : p.T;
    for (int j0 = 0; j0 < keys; j0 += KEYS) {
        __syncthreads();
        load_rows<KEYS, THREADS, false>(k_tile, p.k + head, p, j0);
        load_rows<KEYS, THREADS, false>(v_tile, p.v + head, p, j0);
        __syncthreads();
        float scores[1][KEYS / 8][4];
        clear(scores);
        multiply_transposed(scores, q, k_tile, 0);
        if (mask.cuts(warp_i0, j0, KEYS))
            mask.apply(scores, warp_i0, j0);
        softmax_step(softmax, scores, correction, p.scale_log2);
        softmax.correct(out, correction);
        multiply(out, pack_fragments(scores), v_tile, 0, 0);
    }

    store_output(out, softmax, p, bh, warp_i0);
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_kernel(forward_kernel<HS>, dim3(count_tiles(p.T, QUERIES), p.B * p.NH), THREADS,
                  2 * PaddedTile<HS>::bytes(KEYS), stream, p);
}

} // namespace

const Rung forward_04 = {"04_tensor_cores", NEEDS_MMA, NULL, NULL, BY_HEAD_SIZE(launch)};
