// Purpose: the gradients of attention in bfloat16 and float16 on tensor cores, without atomics: a repeated run gives the same
// bits, whatever the order of blocks.
//
// Launch, in this order:
//   delta    blocks of 128, 16 (row, head) each: ceil(rows_q * heads_q / 16)
//   dq       grid (tile_slots(rows_q, documents, OWN_Q), heads_q), blocks of 128, dynamic shared memory of
//            2 * (OWN_Q + 2 * WALK_K) * (DIM_QK + DIM_V) bytes
//   dk_dv    grid (tile_slots(rows_k, documents, OWN_K), heads_kv), blocks of 128 * SPLIT, dynamic shared memory of
//            2 * (OWN_K + 2 * WALK_Q) * (DIM_QK + DIM_V) + 16 * WALK_Q bytes
//
// delta [heads_q, rows_q] float is rowsum(dout * out). dq has the type of q; dk and dv are float, because they are summed over
// steps and ranks before they are rounded. Head dims are multiples of 8 up to the build's; columns beyond them are 0 in shared
// memory and are not written. All tensors begin at multiples of 16 bytes.
//
// Both passes are one shape. A block owns rows (queries, or keys) of one document and head, a warp 16 or 32 of them, and walks
// over the tiles of the other side that any of its rows meets: tiles of K and V, or for every head of the group in turn of q and
// dout. Two products of owned and walked rows give the scores and dp; p comes from lse, ds from p, dp and delta, in registers,
// and multiplies the walked rows into the sums, in registers too, since the layout of a product is that of the next one's
// left operand. In the pass over keys the products are transposed: keys are rows, queries columns.
//
// clauses: A1 A2 B1 B2 B3 B4 K1 K4 K5 L5 N1 N2 N3
// versions:
//   1  attention_backward_plain.cu.
//   2  tiles of scores by mma. dq and dk, dv in passes of their own: each result has one owner that adds in a fixed order. It
//      costs 7 products a pair of tiles where one pass with atomics takes 5, and nothing has to be cleared or converted.
//   3  swizzled tiles: no bank conflict of ldmatrix. The other side's tile is read twice, straight as the scores' right operand
//      and transposed as that of the sums, so one copy of it serves both.
//   4  asynchronous copies into two tiles in turn; one barrier a tile. lse and delta of the next queries wait in a register.
//   5  32 rows a warp where the sums leave registers for it: a fragment of the other side feeds two products.
//   6  SPLIT 2 for wide heads: two warps share 16 keys, each with half of the columns of dk and dv, because all of them are more
//      than a thread's registers. Both compute the scores.
//   7  tiles that no row meets skipped, tiles that all rows meet unmasked.
//
// build: DIM_QK=32 DIM_V=32 OWN_Q=128 WALK_K=32 OWN_K=128 WALK_Q=32 SPLIT=1
// build: DIM_QK=64 DIM_V=64 OWN_Q=128 WALK_K=32 OWN_K=64 WALK_Q=64 SPLIT=1
// build: DIM_QK=96 DIM_V=96 OWN_Q=128 WALK_K=32 OWN_K=64 WALK_Q=64 SPLIT=1
// build: DIM_QK=128 DIM_V=128 OWN_Q=64 WALK_K=64 OWN_K=64 WALK_Q=32 SPLIT=1
// build: DIM_QK=192 DIM_V=128 OWN_Q=64 WALK_K=32 OWN_K=64 WALK_Q=32 SPLIT=2
// build: DIM_QK=192 DIM_V=192 OWN_Q=64 WALK_K=32 OWN_K=64 WALK_Q=32 SPLIT=2
// build: DIM_QK=256 DIM_V=256 OWN_Q=64 WALK_K=32 OWN_K=64 WALK_Q=32 SPLIT=2

#include "attention.cuh"
#include "shared_tile.cuh"

using namespace thdcp;

constexpr int kRowWarps = 4;
constexpr int kThreadsQ = kRowWarps * kWarpSize;
constexpr int kThreadsK = kRowWarps * kWarpSize * SPLIT;
constexpr int kDimQk = DIM_QK;
constexpr int kDimV = DIM_V;
constexpr int kStages = 2;
static_assert(OWN_Q % 64 == 0 && OWN_K % 64 == 0 && WALK_Q % 16 == 0 && WALK_K % 16 == 0, "see the launch above");
static_assert(DIM_QK % (16 * SPLIT) == 0 && DIM_V % (16 * SPLIT) == 0, "a warp owns pairs of 8 columns");
static_assert(WALK_Q <= kThreadsK, "a thread brings lse and delta of one query");

// A warp's part of a product: kBlocks blocks of 16 rows, kCount blocks of 8 columns. A lane holds of each block the rows
// lane / 4 and lane / 4 + 8, of each 8 columns two.
template <int kBlocks, int kCount>
struct Part {
  float at[kBlocks][kCount][4];

  THDCP_DEVICE void clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int n = 0; n < kCount; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) at[b][n][i] = 0;
  }
};

// The row in its warp's rows of half `half` of block `block`, and the column of element `i` of 8-column block `n`.
THDCP_DEVICE int row_in_warp(int block, int half) { return block * 16 + half * 8 + lane_id() / 4; }
THDCP_DEVICE int column_in_tile(int n, int i) { return n * 8 + lane_id() % 4 * 2 + i; }

// product = own walk^T, for the warp's rows of a tile [*, kDim] and a tile of kCount * 8 rows.
template <typename T, int kDim, int kBlocks, int kCount>
THDCP_DEVICE void multiply(Part<kBlocks, kCount>& product, const T* own, const T* walk, int warp_row) {
  product.clear();
  // Not unrolled whole: the addresses of all depths at once would fill registers that the sums need.
#pragma unroll kBlocks == 1 ? 2 : 1
  for (int depth = 0; depth < kDim; depth += 16) {
    uint32 a[kBlocks][4];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) load_a<kDim>(a[b], own, warp_row + b * 16, depth);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      uint32 right[4];
      load_b_rows_n<kDim>(right, walk, n * 8, depth);
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        mma_m16n8k16<T>(product.at[b][n], a[b], right[0], right[1]);
        mma_m16n8k16<T>(product.at[b][n + 1], a[b], right[2], right[3]);
      }
    }
  }
}

// sums += weights walk, for the columns from `first_column` on of a tile [kCount * 8, kDim].
template <typename T, int kDim, int kBlocks, int kCount, int kColumns>
THDCP_DEVICE void add_product(Part<kBlocks, kColumns>& sums, const Part<kBlocks, kCount>& weights, const T* walk,
                              int first_column) {
#pragma unroll
  for (int n = 0; n < kCount; n += 2) {
    uint32 a[kBlocks][4];
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) a[b][i] = pack<T>(weights.at[b][n + i / 2][i % 2 * 2], weights.at[b][n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int column = 0; column < kColumns; column += 2) {
      uint32 right[4];
      load_b_rows_k<kDim>(right, walk, n * 8, first_column + column * 8);
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        mma_m16n8k16<T>(sums.at[b][column], a[b], right[0], right[1]);
        mma_m16n8k16<T>(sums.at[b][column + 1], a[b], right[2], right[3]);
      }
    }
  }
}

// delta

// The dot product of what two 16-byte chunks hold.
template <typename T>
THDCP_DEVICE float dot16(const Vec16& a, const Vec16& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = multiply_add(unpack_low<T>(a.words[i]), unpack_low<T>(b.words[i]), sum);
    sum = multiply_add(unpack_high<T>(a.words[i]), unpack_high<T>(b.words[i]), sum);
  }
  return sum;
}

// Eight lanes a (row, head). Padding, and rows that see no key, are not read.
template <typename T>
THDCP_DEVICE void delta_rows(const T* dout, const T* out, const Step& step, float* delta) {
  const int64 i = int64(blockIdx.x) * (kThreadsQ / 8) + thread_id() / 8;
  const int64 row = i / step.heads_q;
  const int head = int(i % step.heads_q);
  const bool exists = row < step.rows_q;
  float sum = 0;
  if (exists) {
    const int d = document_of(step.cu_q_padded, step.documents, row);
    const Document document = document_at(step, d);
    const int64 query = row - step.cu_q_padded[d];
    if (query < document.queries && !document.keys_seen(query).empty()) {
      const int64 at = step.at_out(row, head);
      for (int column = thread_id() % 8 * 8; column < step.dim_v; column += 64)
        sum += dot16<T>(load16(dout + at + column), load16(out + at + column));
    }
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) sum += shuffle_xor(kFullWarp, sum, distance);
  if (exists && thread_id() % 8 == 0) delta[step.at_lse(row, head)] = sum;
}

// dq

constexpr int kBlocksQ = OWN_Q / (16 * kRowWarps);
constexpr int kWarpRowsQ = 16 * kBlocksQ;

// lse (base 2) and delta of a lane's rows; 0 for padding and for rows that see no key.
struct QueryRows {
  float lse[kBlocksQ][2];
  float delta[kBlocksQ][2];
};

// The keys that a query of the warp sees; none for padding. Computed anew where it is asked for: registers are scarce.
THDCP_DEVICE Range keys_of_row(const Document& document, int64 first_row, int warp_real, int row) {
  return row < warp_real ? document.keys_seen(first_row + row) : Range{0, 0};
}

// Scores to ds: p = 2^(c s - lse), ds = p (dp - delta).
THDCP_DEVICE void score_gradients(Part<kBlocksQ, WALK_K / 8>& scores, const Part<kBlocksQ, WALK_K / 8>& dp,
                                  const QueryRows& rows, float c) {
#pragma unroll
  for (int b = 0; b < kBlocksQ; b++)
#pragma unroll
    for (int n = 0; n < WALK_K / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float p = exp2_approx(multiply_add(scores.at[b][n][i], c, -rows.lse[b][i / 2]));
        scores.at[b][n][i] = p * (dp.at[b][n][i] - rows.delta[b][i / 2]);
      }
}

// 0 in the columns outside of what a row meets, chosen and not multiplied: there may be anything.
template <int kBlocks, int kCount>
THDCP_DEVICE void keep_columns(Part<kBlocks, kCount>& part, int block, int half, const Range& met, int first_column) {
#pragma unroll
  for (int n = 0; n < kCount; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = first_column + column_in_tile(n, i);
      if (column < met.first || column >= met.last) part.at[block][n][half * 2 + i] = 0;
    }
}

// Write the warp's rows of dq, through its own part of q's memory so that a store is 16 bytes.
template <typename T>
THDCP_DEVICE void write_dq(const Step& step, const Tile& tile, const Document& document, int warp_real,
                           const Part<kBlocksQ, kDimQk / 8>& sums, int head, int warp_row, T* staging, T* dq) {
#pragma unroll
  for (int b = 0; b < kBlocksQ; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const bool sees = !keys_of_row(document, tile.offset + warp_row, warp_real, row_in_warp(b, half)).empty();
#pragma unroll
      for (int n = 0; n < kDimQk / 8; n++) {
        const float low = sums.at[b][n][half * 2], high = sums.at[b][n][half * 2 + 1];
        const int at = swizzled<kDimQk>(row_in_warp(b, half), column_in_tile(n, 0));
        *reinterpret_cast<uint32*>(staging + at) =
            sees ? pack<T>(low * step.softmax_scale, high * step.softmax_scale) : 0;
      }
    }
  warp_barrier();
  constexpr int kChunks = kDimQk / 8;
  for (int i = lane_id(); i < kWarpRowsQ * kChunks; i += kWarpSize) {
    const int row = i / kChunks, column = i % kChunks * 8;
    if (warp_row + row < tile.rows && column < step.dim_qk)
      store16(dq + step.at_q(tile.row + warp_row + row, head) + column, load16(staging + swizzled<kDimQk>(row, column)));
  }
}

template <typename T>
THDCP_DEVICE void attention_dq(const T* dout, const T* q, const T* k, const T* v, const float* lse, const float* delta,
                               const Step& step, T* dq) {
  SharedCarver carver;
  T* q_tile = carver.take<T>(OWN_Q * kDimQk, "q");
  T* dout_tile = carver.take<T>(OWN_Q * kDimV, "dout");
  T* k_tiles = carver.take<T>(kStages * WALK_K * kDimQk, "k");
  T* v_tiles = carver.take<T>(kStages * WALK_K * kDimV, "v");
  const Tile tile = query_tile(step, OWN_Q, blockIdx.x);
  if (tile.rows == 0) return;
  const Document document = document_at(step, tile.document);
  const int head = int(blockIdx.y), head_kv = step.key_head(head), warp_row = warp_id() * kWarpRowsQ;
  const float c = step.softmax_scale * kLog2E;

  const Range keys = tile.real > 0 ? document.keys_of_any(tile.offset, tile.real) : Range{0, 0};
  const int tiles = (keys.last - keys.first + WALK_K - 1) / WALK_K;
  const int warp_real = minimum(kWarpRowsQ, tile.real - warp_row);  // 0 or less for a warp of padding
  const int64 first_row = tile.offset + warp_row;
  const Range some = warp_real > 0 ? document.keys_of_any(first_row, warp_real) : Range{0, 0};
  // Of the real rows alone: what the others sum up is not written.
  const Range all = warp_real > 0 ? document.keys_of_all(first_row, warp_real) : Range{0, 0};

  QueryRows rows;
#pragma unroll
  for (int b = 0; b < kBlocksQ; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row_in_warp(b, half);
      const bool sees = !keys_of_row(document, first_row, warp_real, row).empty();
      const int64 at = step.at_lse(tile.row + warp_row + row, head);
      rows.lse[b][half] = sees ? lse[at] * kLog2E : 0.f;
      rows.delta[b][half] = sees ? delta[at] : 0.f;
    }

  const T* k_head = k + step.at_k(document.k_row, head_kv);
  const T* v_head = v + step.at_v(document.k_row, head_kv);
  const int64 stride_k = int64(step.heads_kv) * step.dim_qk, stride_v = int64(step.heads_kv) * step.dim_v;
  const auto load_keys = [&](int t) {
    const int first = keys.first + t * WALK_K, count = keys.last - first, stage = t % kStages;
    load_tile<WALK_K, kDimQk, kThreadsQ>(k_tiles + stage * WALK_K * kDimQk, k_head + first * stride_k, stride_k, count,
                                         step.dim_qk);
    load_tile<WALK_K, kDimV, kThreadsQ>(v_tiles + stage * WALK_K * kDimV, v_head + first * stride_v, stride_v, count,
                                        step.dim_v);
    cp_async_commit();
  };

  Part<kBlocksQ, kDimQk / 8> sums;
  sums.clear();
  if (tiles > 0) {
    load_tile<OWN_Q, kDimQk, kThreadsQ>(q_tile, q + step.at_q(tile.row, head), int64(step.heads_q) * step.dim_qk,
                                        tile.real, step.dim_qk);
    load_tile<OWN_Q, kDimV, kThreadsQ>(dout_tile, dout + step.at_out(tile.row, head),
                                       int64(step.heads_q) * step.dim_v, tile.real, step.dim_v);
    load_keys(0);
  }
  for (int t = 0; t < tiles; t++) {
    cp_async_wait<0>();
    barrier();  // Everyone's copies for this tile are there; nobody reads the tile before it any more.
    if (t + 1 < tiles) load_keys(t + 1);
    const int first = keys.first + t * WALK_K, last = first + WALK_K, stage = t % kStages;
    if (last <= some.first || first >= some.last) continue;
    Part<kBlocksQ, WALK_K / 8> scores, dp;
    multiply<T, kDimQk>(scores, q_tile, k_tiles + stage * WALK_K * kDimQk, warp_row);
    multiply<T, kDimV>(dp, dout_tile, v_tiles + stage * WALK_K * kDimV, warp_row);
    score_gradients(scores, dp, rows, c);
    if (first < all.first || last > all.last) {
#pragma unroll
      for (int b = 0; b < kBlocksQ; b++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          keep_columns(scores, b, half, keys_of_row(document, first_row, warp_real, row_in_warp(b, half)), first);
    }
    add_product<T, kDimQk>(sums, scores, k_tiles + stage * WALK_K * kDimQk, 0);
  }
  warp_barrier();  // The warp's lanes are done with its part of q.
  write_dq(step, tile, document, warp_real, sums, head, warp_row, q_tile + warp_row * kDimQk, dq);
}

// dk and dv

constexpr int kBlocksK = OWN_K / (16 * kRowWarps);
constexpr int kWarpRowsK = 16 * kBlocksK;
constexpr int kColumnsQk = kDimQk / SPLIT;  // columns of dk, and of dv, that a warp owns
constexpr int kColumnsV = kDimV / SPLIT;

// The queries that see a key of the warp; none for padding.
THDCP_DEVICE Range queries_of_row(const Document& document, int64 first_row, int warp_real, int row) {
  return row < warp_real ? document.queries_seeing(first_row + row) : Range{0, 0};
}

// Scores to p, dp to ds. `lse` (base 2) and `delta` of the tile's queries, which are columns, are in shared memory.
THDCP_DEVICE void weights_and_gradients(Part<kBlocksK, WALK_Q / 8>& scores, Part<kBlocksK, WALK_Q / 8>& dp,
                                        const float* lse, const float* delta, float c) {
#pragma unroll
  for (int n = 0; n < WALK_Q / 8; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float column_lse = lse[column_in_tile(n, j)], column_delta = delta[column_in_tile(n, j)];
#pragma unroll
      for (int b = 0; b < kBlocksK; b++)
#pragma unroll
        for (int i = j; i < 4; i += 2) {
          scores.at[b][n][i] = exp2_approx(multiply_add(scores.at[b][n][i], c, -column_lse));
          dp.at[b][n][i] = scores.at[b][n][i] * (dp.at[b][n][i] - column_delta);
        }
    }
}

struct alignas(8) Pair {
  float low, high;
};

// Write the warp's rows and columns of dk or dv, 8 bytes a store, four lanes a sector of 32.
template <int kColumns>
THDCP_DEVICE void write_sums(const Part<kBlocksK, kColumns / 8>& sums, const Document& document, int64 first_row,
                             int warp_real, int rows, int columns, float factor, float* to, int64 stride) {
#pragma unroll
  for (int b = 0; b < kBlocksK; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row_in_warp(b, half);
      const bool seen = !queries_of_row(document, first_row, warp_real, row).empty();
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++) {
        const int column = column_in_tile(n, 0);
        const float low = sums.at[b][n][half * 2] * factor, high = sums.at[b][n][half * 2 + 1] * factor;
        if (row < rows && column < columns)
          *reinterpret_cast<Pair*>(to + row * stride + column) = seen ? Pair{low, high} : Pair{0.f, 0.f};
      }
    }
}

template <typename T>
THDCP_DEVICE void attention_dk_dv(const T* dout, const T* q, const T* k, const T* v, const float* lse,
                                  const float* delta, const Step& step, float* dk, float* dv) {
  SharedCarver carver;
  T* k_tile = carver.take<T>(OWN_K * kDimQk, "k");
  T* v_tile = carver.take<T>(OWN_K * kDimV, "v");
  T* q_tiles = carver.take<T>(kStages * WALK_Q * kDimQk, "q");
  T* dout_tiles = carver.take<T>(kStages * WALK_Q * kDimV, "dout");
  float* lse_tiles = carver.take<float>(kStages * WALK_Q, "lse");
  float* delta_tiles = carver.take<float>(kStages * WALK_Q, "delta");
  const Tile tile = key_tile(step, OWN_K, blockIdx.x);
  if (tile.rows == 0) return;
  const Document document = document_at(step, tile.document);
  const int head_kv = int(blockIdx.y), first_head = head_kv * step.group();
  const int warp_row = warp_id() % kRowWarps * kWarpRowsK, part = warp_id() / kRowWarps;
  const float c = step.softmax_scale * kLog2E;

  // The tile's keys that the step has, which may be fewer than the document's: later ones nobody sees.
  const Range queries = tile.real > 0 ? document.queries_of_any(tile.offset, tile.real) : Range{0, 0};
  const int tiles_a_head = (queries.last - queries.first + WALK_Q - 1) / WALK_Q;
  const int tiles = tiles_a_head * step.group();
  const int warp_real = minimum(kWarpRowsK, tile.real - warp_row);  // 0 or less for a warp of padding
  const int64 first_row = tile.offset + warp_row;
  const Range some = warp_real > 0 ? document.queries_of_any(first_row, warp_real) : Range{0, 0};
  // Of the real rows alone: what the others sum up is not written.
  const Range all = warp_real > 0 ? document.queries_of_all(first_row, warp_real) : Range{0, 0};

  const int64 stride_q = int64(step.heads_q) * step.dim_qk, stride_out = int64(step.heads_q) * step.dim_v;
  const auto load_queries = [&](int t) {
    const int first = queries.first + t % tiles_a_head * WALK_Q, count = queries.last - first, stage = t % kStages;
    const int head = first_head + t / tiles_a_head;
    const int64 row = document.q_row + first;
    load_tile<WALK_Q, kDimQk, kThreadsK>(q_tiles + stage * WALK_Q * kDimQk, q + step.at_q(row, head), stride_q, count,
                                         step.dim_qk);
    load_tile<WALK_Q, kDimV, kThreadsK>(dout_tiles + stage * WALK_Q * kDimV, dout + step.at_out(row, head), stride_out,
                                        count, step.dim_v);
    cp_async_commit();
  };
  // lse and delta go by way of a register of the thread that brings them: rows of lse begin anywhere, and asynchronous copies
  // want 16 bytes.
  float next_lse = 0, next_delta = 0;
  const auto fetch_rows = [&](int t) {
    const int query = queries.first + t % tiles_a_head * WALK_Q + thread_id();
    const bool exists = thread_id() < WALK_Q && query < queries.last;
    const int64 at = step.at_lse(document.q_row + query, first_head + t / tiles_a_head);
    next_lse = exists ? lse[at] * kLog2E : 0.f;
    next_delta = exists ? delta[at] : 0.f;
  };
  const auto store_rows = [&](int t) {
    if (thread_id() >= WALK_Q) return;
    const int at = t % kStages * WALK_Q + thread_id();
    lse_tiles[at] = next_lse;
    delta_tiles[at] = next_delta;
  };

  Part<kBlocksK, kColumnsQk / 8> dk_sums;
  Part<kBlocksK, kColumnsV / 8> dv_sums;
  dk_sums.clear();
  dv_sums.clear();
  if (tiles > 0) {
    load_tile<OWN_K, kDimQk, kThreadsK>(k_tile, k + step.at_k(tile.row, head_kv), int64(step.heads_kv) * step.dim_qk,
                                        tile.real, step.dim_qk);
    load_tile<OWN_K, kDimV, kThreadsK>(v_tile, v + step.at_v(tile.row, head_kv), int64(step.heads_kv) * step.dim_v,
                                       tile.real, step.dim_v);
    load_queries(0);
    fetch_rows(0);
    store_rows(0);
  }
  for (int t = 0; t < tiles; t++) {
    cp_async_wait<0>();
    barrier();  // Everyone's copies for this tile are there; nobody reads the tile before it any more.
    if (t + 1 < tiles) {
      load_queries(t + 1);
      fetch_rows(t + 1);
    }
    const int first = queries.first + t % tiles_a_head * WALK_Q, last = first + WALK_Q, stage = t % kStages;
    if (first < some.last && last > some.first) {
      const T* q_tile = q_tiles + stage * WALK_Q * kDimQk;
      const T* dout_tile = dout_tiles + stage * WALK_Q * kDimV;
      Part<kBlocksK, WALK_Q / 8> scores, dp;
      multiply<T, kDimQk>(scores, k_tile, q_tile, warp_row);
      multiply<T, kDimV>(dp, v_tile, dout_tile, warp_row);
      weights_and_gradients(scores, dp, lse_tiles + stage * WALK_Q, delta_tiles + stage * WALK_Q, c);
      if (first < all.first || last > all.last) {
#pragma unroll
        for (int b = 0; b < kBlocksK; b++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const Range met = queries_of_row(document, first_row, warp_real, row_in_warp(b, half));
            keep_columns(scores, b, half, met, first);
            keep_columns(dp, b, half, met, first);
          }
      }
      add_product<T, kDimV>(dv_sums, scores, dout_tile, part * kColumnsV);
      add_product<T, kDimQk>(dk_sums, dp, q_tile, part * kColumnsQk);
    }
    if (t + 1 < tiles) store_rows(t + 1);
  }
  const int rows = tile.rows - warp_row;
  const int64 row = tile.row + warp_row;
  const int column_k = part * kColumnsQk, column_v = part * kColumnsV;
  write_sums<kColumnsQk>(dk_sums, document, first_row, warp_real, rows, step.dim_qk - column_k, step.softmax_scale,
                         dk + step.at_k(row, head_kv) + column_k, int64(step.heads_kv) * step.dim_qk);
  write_sums<kColumnsV>(dv_sums, document, first_row, warp_real, rows, step.dim_v - column_v, 1.f, dv + step.at_v(row, head_kv) + column_v,
                        int64(step.heads_kv) * step.dim_v);
}

#define ATTENTION_BACKWARD(suffix, T)                                                                                  \
  THDCP_KERNEL(delta_##suffix, kThreadsQ, 1, const T* dout, const T* out, THDCP_STEP_PARAMETERS, float* delta) {       \
    const Step step = THDCP_STEP;                                                                                      \
    delta_rows(dout, out, step, delta);                                                                                \
  }                                                                                                                    \
  THDCP_KERNEL(dq_##suffix, kThreadsQ, 1, const T* dout, const T* q, const T* k, const T* v, const float* lse,         \
               const float* delta, THDCP_STEP_PARAMETERS, T* dq) {                                                     \
    const Step step = THDCP_STEP;                                                                                      \
    attention_dq(dout, q, k, v, lse, delta, step, dq);                                                                 \
  }                                                                                                                    \
  THDCP_KERNEL(dk_dv_##suffix, kThreadsK, 1, const T* dout, const T* q, const T* k, const T* v, const float* lse,      \
               const float* delta, THDCP_STEP_PARAMETERS, float* dk, float* dv) {                                      \
    const Step step = THDCP_STEP;                                                                                      \
    attention_dk_dv(dout, q, k, v, lse, delta, step, dk, dv);                                                          \
  }
ATTENTION_BACKWARD(bfloat16, bf16)
ATTENTION_BACKWARD(float16, fp16)
