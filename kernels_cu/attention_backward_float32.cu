// Purpose: the gradients of attention in float32, by plain multiply-adds: tensor cores would round the products' operands.
//
// Launch, in this order:
//   delta    blocks of 256, 32 (row, head) each: ceil(rows_q * heads_q / 32)
//   dq       grid (tile_slots(rows_q, documents, 32), heads_q), blocks of 256, dynamic shared memory of
//            256 * (DIM_QK + DIM_V + 8) + 4608 bytes
//   dk_dv    grid (tile_slots(rows_k, documents, 32), heads_kv), blocks of 256, dynamic shared memory of
//            256 * (DIM_QK + DIM_V + 8) + 9216 bytes
//
// delta, dq, dk and dv as in attention_backward.cu, dq in float. Head dims are multiples of 8 up to the build's; columns beyond
// them are 0 in shared memory and are not written. All tensors begin at multiples of 16 bytes.
//
// A block owns 32 rows (queries, or keys) of one document and head and walks over the rows of the other side, 32 at a time. Eight
// threads share a row: each computes four of its 32 scores, and every eighth four columns of its sums. In the pass over keys the
// scores are transposed: keys are rows, queries columns.
//
// clauses: A1 A2 B1 B2 B3 B4 K1 K4 K5 L5 N1 N2 N3
// versions:
//   1  attention_backward_plain.cu: each pair's two dot products once for each 32 columns of the results.
//   2  tiles in shared memory, each pair's dot products once; a row is read once a tile of the other side.
//   3  16-byte accesses to shared memory, rows four elements longer than their columns, so that eight rows lie in different
//      banks. p and ds pass from the threads of a row to each other by shared memory of their own warp: no barrier.
//
// build: DIM_QK=32 DIM_V=32
// build: DIM_QK=64 DIM_V=64
// build: DIM_QK=96 DIM_V=96
// build: DIM_QK=128 DIM_V=128
// build: DIM_QK=192 DIM_V=128
// build: DIM_QK=192 DIM_V=192
// build: DIM_QK=256 DIM_V=256

#include "attention.cuh"

using namespace thdcp;

constexpr int kThreads = 256;
constexpr int kTile = 32;                  // rows of a tile, owned or walked over
constexpr int kThreadsPerRow = kThreads / kTile;
constexpr int kScores = kTile / kThreadsPerRow;
constexpr int kDimQk = DIM_QK;
constexpr int kDimV = DIM_V;
constexpr int kWeightStride = kTile + 4;
static_assert(DIM_QK % 32 == 0 && DIM_V % 32 == 0, "eight threads own four columns each of 32");

struct alignas(16) Four {
  float at[4];
};

// Where a row of a tile begins.
template <int kColumns>
THDCP_DEVICE int at_row(int row) {
  return row * (kColumns + 4);
}

THDCP_DEVICE Four four_at(const float* address) { return *reinterpret_cast<const Four*>(address); }

// The row that a thread works for, and its place among the threads of that row.
THDCP_DEVICE int own_row() { return thread_id() / kThreadsPerRow; }
THDCP_DEVICE int place_in_row() { return thread_id() % kThreadsPerRow; }

// Fill a tile by asynchronous copies; the caller waits. Row r comes from `source + r * stride`; rows from `rows` on and columns
// from `columns` on become 0 and are never read.
template <int kColumns>
THDCP_DEVICE void load_rows(float* tile, const float* source, int64 stride, int rows, int columns) {
  constexpr int kChunks = kColumns / 4;
#pragma unroll 1
  for (int i = thread_id(); i < kTile * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * 4;
    const bool exists = row < rows && column < columns;
    cp_async_16(tile + at_row<kColumns>(row) + column, exists ? source + row * stride + column : source, exists);
  }
}

// products[s] = own row of `own` . row place + 8 s of `walk`.
template <int kColumns>
THDCP_DEVICE void multiply(float (&products)[kScores], const float* own, const float* walk) {
#pragma unroll
  for (int s = 0; s < kScores; s++) products[s] = 0;
#pragma unroll 4
  for (int column = 0; column < kColumns; column += 4) {
    const Four a = four_at(own + at_row<kColumns>(own_row()) + column);
#pragma unroll
    for (int s = 0; s < kScores; s++) {
      const Four b = four_at(walk + at_row<kColumns>(place_in_row() + s * kThreadsPerRow) + column);
#pragma unroll
      for (int i = 0; i < 4; i++) products[s] = multiply_add(a.at[i], b.at[i], products[s]);
    }
  }
}

// sums += weights of the own row * walk; a thread sums the four columns from 4 * place + 32 n on.
template <int kColumns>
THDCP_DEVICE void add_product(float (&sums)[kColumns / kThreadsPerRow], const float* weights, const float* walk) {
#pragma unroll 2
  for (int j = 0; j < kTile; j++) {
    const float weight = weights[own_row() * kWeightStride + j];
#pragma unroll
    for (int n = 0; n < kColumns / 32; n++) {
      const Four b = four_at(walk + at_row<kColumns>(j) + n * 32 + place_in_row() * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) sums[n * 4 + i] = multiply_add(weight, b.at[i], sums[n * 4 + i]);
    }
  }
}

// Write a row of a result: 0 is chosen, not computed, where nothing sees it or is seen.
template <int kColumns>
THDCP_DEVICE void write_row(const float (&sums)[kColumns / kThreadsPerRow], bool sees, float factor, int columns,
                            float* to) {
#pragma unroll
  for (int n = 0; n < kColumns / 32; n++) {
    const int column = n * 32 + place_in_row() * 4;
    Four four;
#pragma unroll
    for (int i = 0; i < 4; i++) four.at[i] = sees ? sums[n * 4 + i] * factor : 0.f;
    if (column < columns) *reinterpret_cast<Four*>(to + column) = four;
  }
}

// Eight lanes a (row, head). Padding, and rows that see no key, are not read.
THDCP_DEVICE void delta_rows(const float* dout, const float* out, const Step& step, float* delta) {
  const int64 i = int64(blockIdx.x) * kTile + own_row();
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
      for (int column = place_in_row(); column < step.dim_v; column += kThreadsPerRow)
        sum = multiply_add(dout[at + column], out[at + column], sum);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kThreadsPerRow; distance *= 2) sum += shuffle_xor(kFullWarp, sum, distance);
  if (exists && place_in_row() == 0) delta[step.at_lse(row, head)] = sum;
}

THDCP_DEVICE void attention_dq(const float* dout, const float* q, const float* k, const float* v, const float* lse,
                               const float* delta, const Step& step, float* dq) {
  SharedCarver carver;
  float* q_tile = carver.take<float>(at_row<kDimQk>(kTile), "q");
  float* dout_tile = carver.take<float>(at_row<kDimV>(kTile), "dout");
  float* k_tile = carver.take<float>(at_row<kDimQk>(kTile), "k");
  float* v_tile = carver.take<float>(at_row<kDimV>(kTile), "v");
  float* gradients = carver.take<float>(kTile * kWeightStride, "ds");
  const Tile tile = query_tile(step, kTile, blockIdx.x);
  if (tile.rows == 0) return;
  const Document document = document_at(step, tile.document);
  const int head = int(blockIdx.y), head_kv = step.key_head(head);
  const Range keys = tile.real > 0 ? document.keys_of_any(tile.offset, tile.real) : Range{0, 0};
  const Range seen = own_row() < tile.real ? document.keys_seen(tile.offset + own_row()) : Range{0, 0};
  const int64 row = tile.row + own_row();
  const float row_lse = seen.empty() ? 0.f : lse[step.at_lse(row, head)] * kLog2E;
  const float row_delta = seen.empty() ? 0.f : delta[step.at_lse(row, head)];
  const float c = step.softmax_scale * kLog2E;
  const int64 stride_k = int64(step.heads_kv) * step.dim_qk, stride_v = int64(step.heads_kv) * step.dim_v;

  float sums[kDimQk / kThreadsPerRow] = {};
  if (!keys.empty()) {
    load_rows<kDimQk>(q_tile, q + step.at_q(tile.row, head), int64(step.heads_q) * step.dim_qk, tile.real, step.dim_qk);
    load_rows<kDimV>(dout_tile, dout + step.at_out(tile.row, head), int64(step.heads_q) * step.dim_v, tile.real,
                     step.dim_v);
  }
  for (int first = keys.first; first < keys.last; first += kTile) {
    const int count = keys.last - first;
    load_rows<kDimQk>(k_tile, k + step.at_k(document.k_row + first, head_kv), stride_k, count, step.dim_qk);
    load_rows<kDimV>(v_tile, v + step.at_v(document.k_row + first, head_kv), stride_v, count, step.dim_v);
    cp_async_commit();
    cp_async_wait<0>();
    barrier();  // Everyone's copies are there.
    float scores[kScores], dp[kScores];
    multiply<kDimQk>(scores, q_tile, k_tile);
    multiply<kDimV>(dp, dout_tile, v_tile);
#pragma unroll
    for (int s = 0; s < kScores; s++) {
      const int column = place_in_row() + s * kThreadsPerRow, key = first + column;
      const float p = exp2_approx(multiply_add(scores[s], c, -row_lse));
      gradients[own_row() * kWeightStride + column] = key < seen.first || key >= seen.last ? 0.f : p * (dp[s] - row_delta);
    }
    warp_barrier();  // A row's weights are written and read by one warp.
    add_product<kDimQk>(sums, gradients, k_tile);
    barrier();  // Nobody reads these tiles any more.
  }
  if (own_row() < tile.rows) write_row<kDimQk>(sums, !seen.empty(), step.softmax_scale, step.dim_qk, dq + step.at_q(row, head));
}

THDCP_DEVICE void attention_dk_dv(const float* dout, const float* q, const float* k, const float* v, const float* lse,
                                  const float* delta, const Step& step, float* dk, float* dv) {
  SharedCarver carver;
  float* k_tile = carver.take<float>(at_row<kDimQk>(kTile), "k");
  float* v_tile = carver.take<float>(at_row<kDimV>(kTile), "v");
  float* q_tile = carver.take<float>(at_row<kDimQk>(kTile), "q");
  float* dout_tile = carver.take<float>(at_row<kDimV>(kTile), "dout");
  float* weights = carver.take<float>(kTile * kWeightStride, "p");
  float* gradients = carver.take<float>(kTile * kWeightStride, "ds");
  const Tile tile = key_tile(step, kTile, blockIdx.x);
  if (tile.rows == 0) return;
  const Document document = document_at(step, tile.document);
  const int head_kv = int(blockIdx.y), first_head = head_kv * step.group();
  const Range queries = tile.real > 0 ? document.queries_of_any(tile.offset, tile.real) : Range{0, 0};
  const Range seeing = own_row() < tile.real ? document.queries_seeing(tile.offset + own_row()) : Range{0, 0};
  const float c = step.softmax_scale * kLog2E;
  const int64 stride_q = int64(step.heads_q) * step.dim_qk, stride_out = int64(step.heads_q) * step.dim_v;

  float dk_sums[kDimQk / kThreadsPerRow] = {}, dv_sums[kDimV / kThreadsPerRow] = {};
  if (!queries.empty()) {
    load_rows<kDimQk>(k_tile, k + step.at_k(tile.row, head_kv), int64(step.heads_kv) * step.dim_qk, tile.real, step.dim_qk);
    load_rows<kDimV>(v_tile, v + step.at_v(tile.row, head_kv), int64(step.heads_kv) * step.dim_v, tile.real, step.dim_v);
  }
  for (int head = first_head; head < first_head + step.group(); head++)
    for (int first = queries.first; first < queries.last; first += kTile) {
      const int count = queries.last - first;
      const int64 row = document.q_row + first;
      load_rows<kDimQk>(q_tile, q + step.at_q(row, head), stride_q, count, step.dim_qk);
      load_rows<kDimV>(dout_tile, dout + step.at_out(row, head), stride_out, count, step.dim_v);
      cp_async_commit();
      cp_async_wait<0>();
      barrier();  // Everyone's copies are there.
      float scores[kScores], dp[kScores];
      multiply<kDimQk>(scores, k_tile, q_tile);
      multiply<kDimV>(dp, v_tile, dout_tile);
#pragma unroll
      for (int s = 0; s < kScores; s++) {
        const int column = place_in_row() + s * kThreadsPerRow, query = first + column;
        const int at = own_row() * kWeightStride + column;
        const bool sees = query >= seeing.first && query < seeing.last;
        const int64 from = step.at_lse(document.q_row + query, head);
        const float p = sees ? exp2_approx(multiply_add(scores[s], c, -lse[from] * kLog2E)) : 0.f;
        weights[at] = p;
        gradients[at] = sees ? p * (dp[s] - delta[from]) : 0.f;
      }
      warp_barrier();  // A row's weights are written and read by one warp.
      add_product<kDimV>(dv_sums, weights, dout_tile);
      add_product<kDimQk>(dk_sums, gradients, q_tile);
      barrier();  // Nobody reads these tiles any more.
    }
  if (own_row() >= tile.rows) return;
  const int64 row = tile.row + own_row();
  write_row<kDimQk>(dk_sums, !seeing.empty(), step.softmax_scale, step.dim_qk, dk + step.at_k(row, head_kv));
  write_row<kDimV>(dv_sums, !seeing.empty(), 1.f, step.dim_v, dv + step.at_v(row, head_kv));
}

THDCP_KERNEL(delta_float32, kThreads, 1, const float* dout, const float* out, THDCP_STEP_PARAMETERS, float* delta) {
  const Step step = THDCP_STEP;
  delta_rows(dout, out, step, delta);
}
THDCP_KERNEL(dq_float32, kThreads, 1, const float* dout, const float* q, const float* k, const float* v,
             const float* lse, const float* delta, THDCP_STEP_PARAMETERS, float* dq) {
  const Step step = THDCP_STEP;
  attention_dq(dout, q, k, v, lse, delta, step, dq);
}
THDCP_KERNEL(dk_dv_float32, kThreads, 1, const float* dout, const float* q, const float* k, const float* v,
             const float* lse, const float* delta, THDCP_STEP_PARAMETERS, float* dk, float* dv) {
  const Step step = THDCP_STEP;
  attention_dk_dv(dout, q, k, v, lse, delta, step, dk, dv);
}
