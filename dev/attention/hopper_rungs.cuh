/* What the forward rungs with wgmma have in common: the tile, its places in shared memory, the maps
 * by which the copy engine finds the tensors. */
#ifndef DEV_ATTENTION_HOPPER_RUNGS_CUH
#define DEV_ATTENTION_HOPPER_RUNGS_CUH

#include "attention/flash_hopper.cuh"
#include "dev/attention/softmax_rows.cuh"

/* The map of a (B,T,NH,HS) tensor for boxes of `rows` rows and 64 columns. */
inline CUtensorMap tensor_map(const Problem &p, const bf16 *tensor, int rows) {
    const AttentionView view = attention_view((void *)tensor, p.T, p.NH, p.HS);
    return flash_hopper_map(view, p.B, p.T, p.NH, p.HS, rows);
}

__device__ __forceinline__ Mask mask_of(const Problem &p) {
    return {p.T, p.causal ? 0 : MAX_LENGTH};
}

/* 128 queries, 64 for each of two warpgroups, and two stages of 128 keys. */
enum { CONSUMERS = 2, QUERIES = 64 * CONSUMERS, KEYS = 128, STAGES = 2 };

struct ForwardCall {
    CUtensorMap q, k, v, o;
    Problem p;
};

inline ForwardCall forward_call(const Problem &p) {
    return {tensor_map(p, p.q, QUERIES), tensor_map(p, p.k, KEYS), tensor_map(p, p.v, KEYS),
            tensor_map(p, p.o, 64), p};
}

/* K and V have barriers of their own: a K is given back before its V. */
template <int HS>
struct ForwardPlaces {
    using Queries = Blocks<QUERIES, HS>;
    using Keys = Blocks<KEYS, HS>;
    static constexpr uint32_t K = Queries::BYTES, V = K + STAGES * Keys::BYTES;
    static constexpr uint32_t Q_RING = V + STAGES * Keys::BYTES;
    static constexpr uint32_t K_RING = Q_RING + Ring<1>::BYTES;
    static constexpr uint32_t V_RING = K_RING + Ring<STAGES>::BYTES;
    static constexpr uint32_t BYTES = V_RING + Ring<STAGES>::BYTES;

    uint32_t base; /* shared address, a multiple of 1024 */

    __device__ __forceinline__ Queries q_tile() const { return {base}; }
    __device__ __forceinline__ Keys k_tile(unsigned use) const {
        return {base + K + use % STAGES * Keys::BYTES};
    }
    __device__ __forceinline__ Keys v_tile(unsigned use) const {
        return {base + V + use % STAGES * Keys::BYTES};
    }
    __device__ __forceinline__ Ring<1> q_ring() const { return {base + Q_RING}; }
    __device__ __forceinline__ Ring<STAGES> k_ring() const { return {base + K_RING}; }
    __device__ __forceinline__ Ring<STAGES> v_ring() const { return {base + V_RING}; }
    /* By one thread: each warp that consumes gives a place back once. */
    __device__ __forceinline__ void init() const {
        q_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        k_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        v_ring().init(1, 4 * CONSUMERS * WARP_ARRIVALS);
        fence_barrier_init();
    }
};

struct BackwardCall {
    CUtensorMap q, k, v, dout;
    Problem p;
};

/* The backward's: 128 keys, 64 for each warpgroup; stages of Q, dO, LSE and D; two images of dS; a
 * piece of dQ for each warpgroup. */
template <int HS>
struct BackwardPlaces {
    static constexpr int TILE = HS == 64 ? 128 : 64; /* queries in a stage */
    using Keys = Blocks<KEYS, HS>;
    using Queries = Blocks<TILE, HS>;
    using Scores = Blocks<KEYS, TILE>;
    static constexpr uint32_t ROW_BYTES = TILE * sizeof(float);
    static constexpr uint32_t V = Keys::BYTES, Q = 2 * Keys::BYTES;
    static constexpr uint32_t DOUT = Q + STAGES * Queries::BYTES;
    static constexpr uint32_t DS = DOUT + STAGES * Queries::BYTES;
    static constexpr uint32_t LSE2 = DS + 2 * Scores::BYTES, DELTA = LSE2 + STAGES * ROW_BYTES;
    static constexpr uint32_t PIECE_BYTES = 64 * 64 * sizeof(float);
    static constexpr uint32_t DQ = DELTA + STAGES * ROW_BYTES;
    static constexpr uint32_t KV_RING = DQ + CONSUMERS * PIECE_BYTES;
    static constexpr uint32_t RING = KV_RING + Ring<1>::BYTES, BYTES = RING + Ring<STAGES>::BYTES;

    uint32_t base; /* shared address, a multiple of 1024 */

    __device__ __forceinline__ Keys k_tile() const { return {base}; }
    __device__ __forceinline__ Keys v_tile() const { return {base + V}; }
    __device__ __forceinline__ Queries q_tile(unsigned use) const {
        return {base + Q + use % STAGES * Queries::BYTES};
    }
    __device__ __forceinline__ Queries dout_tile(unsigned use) const {
        return {base + DOUT + use % STAGES * Queries::BYTES};
    }
    __device__ __forceinline__ Scores ds_tile(unsigned use) const {
        return {base + DS + use % 2 * Scores::BYTES};
    }
    __device__ __forceinline__ uint32_t lse2(unsigned use) const {
        return base + LSE2 + use % STAGES * ROW_BYTES;
    }
    __device__ __forceinline__ uint32_t delta(unsigned use) const {
        return base + DELTA + use % STAGES * ROW_BYTES;
    }
    __device__ __forceinline__ uint32_t dq(int group) const {
        return base + DQ + group * PIECE_BYTES;
    }
    __device__ __forceinline__ Ring<1> kv_ring() const { return {base + KV_RING}; }
    __device__ __forceinline__ Ring<STAGES> ring() const { return {base + RING}; }
};

/* Starts the copy of the tile of rows row … into its place, whose bytes end the phase of `full`. */
template <class Tile>
__device__ __forceinline__ void load(Tile tile, const CUtensorMap &map, Barrier full, int row,
                                     int head, int batch) {
    full.arrive_expecting(Tile::BYTES);
    copy_tile(tile, &map, full, row, head, batch);
}

/* Once K has come, starts S = Q Kᵀ for a warpgroup's 64 queries. */
template <int HS>
__device__ __forceinline__ void start_scores(float (&scores)[1][KEYS / 8][4],
                                             ForwardPlaces<HS> at, int group, unsigned use) {
    at.k_ring().wait_full(use);
    wgmma_fence();
    start_product<HS, K_ALONG_COLUMNS, K_ALONG_COLUMNS>(scores, at.q_tile(), 64 * group, 0,
                                                        at.k_tile(use), 0, 0, false);
    wgmma_commit();
}

/* Once V has come, starts O += P V. */
template <int HS>
__device__ __forceinline__ void start_output(float (&out)[1][HS / 8][4],
                                             const Fragments<1, KEYS / 16> &probabilities,
                                             ForwardPlaces<HS> at, unsigned use) {
    at.v_ring().wait_full(use);
    wgmma_fence();
    start_product<K_ALONG_ROWS>(out, probabilities, at.v_tile(use), 0, 0, true);
    wgmma_commit();
}

/* Starts the copy of 64 rows of a tile to rows row … of a head; nothing past row T. */
template <class Tile>
__device__ __forceinline__ void store_64(Tile tile, int tile_row, const CUtensorMap &map, int row,
                                         int head, int batch) {
#pragma unroll
    for (int c = 0; c < Tile::COLUMNS / 64; c++)
        store_box(&map, tile.chunk(tile_row, 8 * c), 64 * c, row, head, batch);
    store_commit();
}

/* A warpgroup's 64×64 floats, in the order of its registers, are added to those at target by the
 * copy engine, through a place in shared memory; `barrier` is the warpgroup's own. */
__device__ __forceinline__ void add_piece(float *target, uint32_t place,
                                          const float (&acc)[1][8][4], int barrier) {
    const int thread = threadIdx.x % WARPGROUP;
    if (thread == 0)
        store_wait_read(); /* the piece before has left the place */
    barrier_sync(barrier, WARPGROUP);
#pragma unroll
    for (int n = 0; n < 8; n++)
        store_shared_16(place + 16 * (n * WARPGROUP + thread),
                        make_uint4(__float_as_uint(acc[0][n][0]), __float_as_uint(acc[0][n][1]),
                                   __float_as_uint(acc[0][n][2]), __float_as_uint(acc[0][n][3])));
    fence_async();
    barrier_sync(barrier, WARPGROUP);
    if (thread == 0) {
        add_bytes(target, place, 64 * 64 * sizeof(float));
        store_commit();
    }
}

#endif
