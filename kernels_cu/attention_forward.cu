// Purpose: attention forward in bfloat16 and float16 on tensor cores: FlashAttention's online softmax over packed documents.
//
// Launch: grid (tile_slots(rows_q, documents, TILE_Q), heads_q), blocks of 128, dynamic shared memory of
// 2 * (TILE_Q * DIM_QK + STAGES * TILE_K * (DIM_QK + DIM_V)) bytes. Head dims are multiples of 8 up to the build's; columns
// beyond them are 0 in shared memory and are not written. All tensors begin at multiples of 16 bytes.
//
// A block owns TILE_Q rows of one document and one head; a warp 16 or 32 of them, with their scores, sums and output in
// registers. It walks over the keys that any of its rows sees, TILE_K at a time, from a ring of STAGES tiles of K and V that
// asynchronous copies fill. A warp leaves out tiles that none of its rows sees, and masks only those that some row sees in part.
//
// Scores are kept unscaled; p = 2^(c s - c m) with c = scale * log2(e) costs one multiply-add. For that c must be positive: a
// negative scale flips the signs of q instead, and a scale of 0 makes q 0.
//
// clauses: A1 A2 A3 A4 A5 A6 K1 K4 K5 L5 N2 N3
// versions:
//   1  attention_plain.cu.
//   2  tiles of scores by mma, softmax online: each of K and V is read once a tile of queries, nothing of size Tq x Tk is
//      stored. P stays in registers: the layout of a product is that of the next one's left operand.
//   3  swizzled tiles: no bank conflict of ldmatrix.
//   4  asynchronous copies into a ring: loads go on while the tensor cores work; one barrier a tile.
//   5  32 rows a warp for head dims up to 128: a fragment of K or V feeds two products, or reading shared memory takes longer
//      than the products. Beyond, the output alone would need all registers.
//   6  late tiles of queries first; tiles that no row sees skipped, tiles that all rows see unmasked.
//
// build: DIM_QK=32 DIM_V=32 TILE_Q=128 TILE_K=64 STAGES=3
// build: DIM_QK=64 DIM_V=64 TILE_Q=128 TILE_K=64 STAGES=3
// build: DIM_QK=96 DIM_V=96 TILE_Q=128 TILE_K=32 STAGES=3
// build: DIM_QK=128 DIM_V=128 TILE_Q=128 TILE_K=32 STAGES=3
// build: DIM_QK=192 DIM_V=128 TILE_Q=64 TILE_K=64 STAGES=2
// build: DIM_QK=192 DIM_V=192 TILE_Q=64 TILE_K=64 STAGES=2
// build: DIM_QK=256 DIM_V=256 TILE_Q=64 TILE_K=32 STAGES=2

#include "attention.cuh"
#include "shared_tile.cuh"

using namespace thdcp;

constexpr int kThreads = 128;
constexpr int kDimQk = DIM_QK;
constexpr int kDimV = DIM_V;
constexpr int kTileQ = TILE_Q;
constexpr int kTileK = TILE_K;
constexpr int kStages = STAGES;
constexpr int kBlocks16 = kTileQ / (kThreads / kWarpSize) / 16;  // blocks of 16 rows that a warp owns
constexpr int kWarpRows = kBlocks16 * 16;
static_assert(kDimV <= kDimQk, "the output passes through the memory of q");
static_assert(kTileQ == kWarpRows * kThreads / kWarpSize && kTileK % 16 == 0 && kStages >= 2, "see the launch above");

// What a lane holds of its warp's rows: of each block of 16 the rows lane / 4 and lane / 4 + 8, of each 8 columns two.
struct Rows {
  float out[kBlocks16][kDimV / 8][4];
  float largest[kBlocks16][2];  // the largest unscaled score so far
  float total[kBlocks16][2];    // this lane's share of the sum of p
};

// The row in its warp's rows of half `half` of block `block`.
THDCP_DEVICE int row_in_warp(int block, int half) { return block * 16 + half * 8 + lane_id() / 4; }

// scores = q k^T, for a warp's rows and a tile of keys. `keep` and `flip` give q the scale's sign.
template <typename T>
THDCP_DEVICE void score_tile(float (&scores)[kBlocks16][kTileK / 8][4], const T* q_tile, const T* k_tile, int warp_row,
                             uint32 keep, uint32 flip) {
#pragma unroll
  for (int b = 0; b < kBlocks16; b++)
#pragma unroll
    for (int n = 0; n < kTileK / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[b][n][i] = 0;
#pragma unroll
  for (int depth = 0; depth < kDimQk; depth += 16) {
    uint32 q[kBlocks16][4];
#pragma unroll
    for (int b = 0; b < kBlocks16; b++) {
      load_a<kDimQk>(q[b], q_tile, warp_row + b * 16, depth);
#pragma unroll
      for (int i = 0; i < 4; i++) q[b][i] = (q[b][i] & keep) ^ flip;
    }
#pragma unroll
    for (int n = 0; n < kTileK / 8; n += 2) {
      uint32 k[4];
      load_b_rows_n<kDimQk>(k, k_tile, n * 8, depth);
#pragma unroll
      for (int b = 0; b < kBlocks16; b++) {
        mma_m16n8k16<T>(scores[b][n], q[b], k[0], k[1]);
        mma_m16n8k16<T>(scores[b][n + 1], q[b], k[2], k[3]);
      }
    }
  }
}

// -inf where a row does not see the key. `first_row` is the number in the document of the warp's first row, `first_key` that
// of the tile's first key.
THDCP_DEVICE void mask_tile(float (&scores)[kBlocks16][kTileK / 8][4], const Document& document, int first_row,
                            int first_key) {
#pragma unroll
  for (int b = 0; b < kBlocks16; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Range seen = document.keys_seen(first_row + row_in_warp(b, half));
      const int key = first_key + lane_id() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kTileK / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int j = key + n * 8 + i;
          if (j < seen.first || j >= seen.last) scores[b][n][half * 2 + i] = negative_infinity();
        }
    }
}

// Turn scores into p, and make sums and output so far relative to the new largest score.
THDCP_DEVICE void softmax_tile(float (&scores)[kBlocks16][kTileK / 8][4], Rows& rows, float c) {
#pragma unroll
  for (int b = 0; b < kBlocks16; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float largest = rows.largest[b][half];
#pragma unroll
      for (int n = 0; n < kTileK / 8; n++)
        largest = maximum(largest, maximum(scores[b][n][half * 2], scores[b][n][half * 2 + 1]));
      largest = maximum(largest, shuffle_xor(kFullWarp, largest, 1));
      largest = maximum(largest, shuffle_xor(kFullWarp, largest, 2));
      // A row that saw no key yet: -inf - -inf would be NaN.
      const float base = is_negative_infinity(largest) ? 0.f : largest * c;
      const float shrink = exp2_approx(multiply_add(rows.largest[b][half], c, -base));
      rows.largest[b][half] = largest;
      float total = rows.total[b][half] * shrink;
#pragma unroll
      for (int n = 0; n < kTileK / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float& score = scores[b][n][half * 2 + i];
          score = exp2_approx(multiply_add(score, c, -base));
          total += score;
        }
      rows.total[b][half] = total;
#pragma unroll
      for (int n = 0; n < kDimV / 8; n++) rows.out[b][n][half * 2] *= shrink, rows.out[b][n][half * 2 + 1] *= shrink;
    }
}

// out += p v.
template <typename T>
THDCP_DEVICE void add_values(Rows& rows, const float (&p)[kBlocks16][kTileK / 8][4], const T* v_tile) {
#pragma unroll
  for (int n = 0; n < kTileK / 8; n += 2) {
    uint32 weights[kBlocks16][4];
#pragma unroll
    for (int b = 0; b < kBlocks16; b++) {
      weights[b][0] = pack<T>(p[b][n][0], p[b][n][1]);
      weights[b][1] = pack<T>(p[b][n][2], p[b][n][3]);
      weights[b][2] = pack<T>(p[b][n + 1][0], p[b][n + 1][1]);
      weights[b][3] = pack<T>(p[b][n + 1][2], p[b][n + 1][3]);
    }
#pragma unroll
    for (int column = 0; column < kDimV / 8; column += 2) {
      uint32 v[4];
      load_b_rows_k<kDimV>(v, v_tile, n * 8, column * 8);
#pragma unroll
      for (int b = 0; b < kBlocks16; b++) {
        mma_m16n8k16<T>(rows.out[b][column], weights[b], v[0], v[1]);
        mma_m16n8k16<T>(rows.out[b][column + 1], weights[b], v[2], v[3]);
      }
    }
  }
}

// Write the warp's rows, out through its own part of q's memory so that a store is 16 bytes. Padding and rows that see no key
// are chosen by the mask, and 0 is written, not computed.
template <typename T>
THDCP_DEVICE void write_rows(const Step& step, const Document& document, const Tile& tile, Rows& rows, int head,
                             int warp_row, float c, T* staging, T* out, float* lse) {
#pragma unroll
  for (int b = 0; b < kBlocks16; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row_in_warp(b, half), row_in_tile = warp_row + row;
      float total = rows.total[b][half];
      total += shuffle_xor(kFullWarp, total, 1);
      total += shuffle_xor(kFullWarp, total, 2);
      const bool sees = row_in_tile < tile.real && !document.keys_seen(tile.offset + row_in_tile).empty();
      const float inverse = 1.f / total;
#pragma unroll
      for (int n = 0; n < kDimV / 8; n++) {
        const float low = rows.out[b][n][half * 2] * inverse, high = rows.out[b][n][half * 2 + 1] * inverse;
        const int at = swizzled<kDimV>(row, n * 8 + lane_id() % 4 * 2);
        *reinterpret_cast<uint32*>(staging + at) = sees ? pack<T>(low, high) : 0;
      }
      if (lane_id() % 4 == 0 && row_in_tile < tile.rows)
        lse[step.at_lse(tile.row + row_in_tile, head)] =
            sees ? multiply_add(rows.largest[b][half], c, log2_approx(total)) * kLn2 : negative_infinity();
    }
  warp_barrier();
  constexpr int kChunks = kDimV / 8;
  for (int i = lane_id(); i < kWarpRows * kChunks; i += kWarpSize) {
    const int row = i / kChunks, column = i % kChunks * 8;
    if (warp_row + row < tile.rows && column < step.dim_v)
      store16(out + step.at_out(tile.row + warp_row + row, head) + column, load16(staging + swizzled<kDimV>(row, column)));
  }
}

template <typename T>
THDCP_DEVICE void attention_forward(const T* q, const T* k, const T* v, const Step& step, T* out, float* lse) {
  SharedCarver carver;
  T* q_tile = carver.take<T>(kTileQ * kDimQk, "q");
  T* k_tiles = carver.take<T>(kStages * kTileK * kDimQk, "k");
  T* v_tiles = carver.take<T>(kStages * kTileK * kDimV, "v");
  const Tile tile = query_tile(step, kTileQ, blockIdx.x);
  if (tile.rows == 0) return;
  const Document document = document_at(step, tile.document);
  const int head = int(blockIdx.y), head_kv = step.key_head(head), warp_row = warp_id() * kWarpRows;
  const float scale = step.softmax_scale, c = scale == 0.f ? 1.f : (scale < 0.f ? -scale : scale) * kLog2E;
  const uint32 keep = scale == 0.f ? 0 : 0xffffffffu, flip = scale < 0.f ? 0x80008000u : 0;

  const Range keys = tile.real > 0 ? document.keys_of_any(tile.offset, tile.real) : Range{0, 0};
  const int warp_real = minimum(kWarpRows, tile.real - warp_row);  // 0 or less for a warp of padding
  const int first_row = tile.offset + warp_row;
  const Range some = warp_real > 0 ? document.keys_of_any(first_row, warp_real) : Range{0, 0};
  const Range all = warp_real > 0 ? document.keys_of_all(first_row, warp_real) : Range{0, 0};

  // Inside a tile 32 bits reach every element. A group is committed for every tile, also behind the last, so that the same
  // number is always in flight.
  const int stride_k = step.heads_kv * step.dim_qk, stride_v = step.heads_kv * step.dim_v;
  int next = keys.first;
  const auto load_keys = [&](int stage) {
    if (next < keys.last) {
      const int64 row = document.k_row + next;
      load_tile<kTileK, kDimQk, kThreads>(k_tiles + stage * kTileK * kDimQk, k + step.at_k(row, head_kv), stride_k,
                                          keys.last - next, step.dim_qk);
      load_tile<kTileK, kDimV, kThreads>(v_tiles + stage * kTileK * kDimV, v + step.at_v(row, head_kv), stride_v,
                                         keys.last - next, step.dim_v);
      next += kTileK;
    }
    cp_async_commit();
  };

  Rows rows;
#pragma unroll
  for (int b = 0; b < kBlocks16; b++) {
#pragma unroll
    for (int half = 0; half < 2; half++) rows.largest[b][half] = negative_infinity(), rows.total[b][half] = 0;
#pragma unroll
    for (int n = 0; n < kDimV / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) rows.out[b][n][i] = 0;
  }

  if (!keys.empty())
    load_tile<kTileQ, kDimQk, kThreads>(q_tile, q + step.at_q(tile.row, head), step.heads_q * step.dim_qk, tile.real,
                                        step.dim_qk);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; stage++) load_keys(stage);
  int stage = 0;
  for (int first = keys.first; first < keys.last; first += kTileK) {
    cp_async_wait<kStages - 2>();
    barrier();  // Everyone's copies for this tile are there; nobody reads the tile before it any more.
    load_keys(stage == 0 ? kStages - 1 : stage - 1);
    if (first < some.last && first + kTileK > some.first) {
      float scores[kBlocks16][kTileK / 8][4];
      score_tile(scores, q_tile, k_tiles + stage * kTileK * kDimQk, warp_row, keep, flip);
      if (first < all.first || first + kTileK > all.last) mask_tile(scores, document, first_row, first);
      softmax_tile(scores, rows, c);
      add_values(rows, scores, v_tiles + stage * kTileK * kDimV);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  warp_barrier();  // The warp's lanes are done with its part of q.
  write_rows(step, document, tile, rows, head, warp_row, c, q_tile + warp_row * kDimQk, out, lse);
}

#define ATTENTION_FORWARD(name, T)                                                                                   \
  THDCP_KERNEL(name, kThreads, 1, const T* q, const T* k, const T* v, THDCP_STEP_PARAMETERS, T* out, float* lse) { \
    const Step step = THDCP_STEP;                                                                                    \
    attention_forward(q, k, v, step, out, lse);                                                                      \
  }
ATTENTION_FORWARD(attention_forward_bfloat16, bf16)
ATTENTION_FORWARD(attention_forward_float16, fp16)
