// Purpose: attention forward in float32 by fused multiply-adds: tensor cores have no product of that precision.
//
// Launch: grid (tile_slots(rows_q, documents, TILE_Q), heads_q), blocks of 256, dynamic shared memory of
// 4 * ((TILE_Q + TILE_K) * (DIM_QK + 4) + TILE_K * DIM_V + TILE_Q * (TILE_K + 4)) bytes. Head dims are multiples of 4 up to
// the build's; columns beyond them are 0 in shared memory and are not written. All tensors begin at multiples of 16 bytes.
//
// A block owns TILE_Q rows of one document and one head. Its threads stand in 16 groups of 16: a group owns every sixteenth
// row, and a thread of it every sixteenth key and every sixteenth column of the output. So the threads of a group share their
// rows' q and p (broadcasts) and read neighbours of v; what they exchange stays inside half a warp.
//
// clauses: A1 A2 A3 A4 A5 A6 K1 K4 K5 L5 N2 N3
// versions:
//   1  attention_plain.cu.
//   2  tiles in shared memory: a value read from global memory serves a whole tile; softmax online.
//   3  rows of q and k are 16 bytes longer than they need be, so that the threads of a group, which read one column of 16
//      keys, meet no bank conflict; q and k are read 16 bytes at a time.
//
// build: DIM_QK=32 DIM_V=32 TILE_Q=64 TILE_K=32
// build: DIM_QK=64 DIM_V=64 TILE_Q=64 TILE_K=32
// build: DIM_QK=96 DIM_V=96 TILE_Q=64 TILE_K=32
// build: DIM_QK=128 DIM_V=128 TILE_Q=64 TILE_K=32
// build: DIM_QK=192 DIM_V=192 TILE_Q=64 TILE_K=32
// build: DIM_QK=256 DIM_V=256 TILE_Q=64 TILE_K=32

#include "attention.cuh"

using namespace thdcp;

constexpr int kThreads = 256;
constexpr int kGroup = 16;  // threads that share rows, and groups
constexpr int kDimQk = DIM_QK;
constexpr int kDimV = DIM_V;
constexpr int kTileQ = TILE_Q;
constexpr int kTileK = TILE_K;
constexpr int kRows = kTileQ / kGroup;     // that a thread works on
constexpr int kKeys = kTileK / kGroup;     // of a tile
constexpr int kColumns = kDimV / kGroup;   // of the output
constexpr int kStrideQk = kDimQk + 4;
constexpr int kStrideP = kTileK + 4;

// Fill [kTileRows, kTileColumns] of shared memory, rows `kStride` apart; what lies beyond `rows` and `columns` becomes 0.
template <int kTileRows, int kTileColumns, int kStride>
THDCP_DEVICE void load_floats(float* tile, const float* source, int64 stride, int rows, int columns) {
  constexpr int kChunks = kTileColumns / 4;
  for (int i = thread_id(); i < kTileRows * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * 4;
    const bool exists = row < rows && column < columns;
    cp_async_16(tile + row * kStride + column, exists ? source + row * stride + column : source, exists);
  }
}

THDCP_KERNEL(attention_forward_float32, kThreads, 1, const float* q, const float* k, const float* v, THDCP_STEP_PARAMETERS,
             float* out, float* lse) {
  const Step step = THDCP_STEP;
  SharedCarver carver;
  float* q_tile = carver.take<float>(kTileQ * kStrideQk, "q");
  float* k_tile = carver.take<float>(kTileK * kStrideQk, "k");
  float* v_tile = carver.take<float>(kTileK * kDimV, "v");
  float* p_tile = carver.take<float>(kTileQ * kStrideP, "p");
  const Tile tile = query_tile(step, kTileQ, blockIdx.x);
  if (tile.rows == 0) return;
  const Document document = document_at(step, tile.document);
  const int head = int(blockIdx.y), head_kv = step.key_head(head);
  const int group = thread_id() / kGroup, place = thread_id() % kGroup;
  const Range keys = tile.real > 0 ? document.keys_of_any(tile.offset, tile.real) : Range{0, 0};
  const Range all = tile.real > 0 ? document.keys_of_all(tile.offset, tile.real) : Range{0, 0};
  const float c = softmax_scale * kLog2E;

  float sums[kRows][kColumns], largest[kRows], total[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    largest[r] = negative_infinity(), total[r] = 0;
#pragma unroll
    for (int e = 0; e < kColumns; e++) sums[r][e] = 0;
  }
  if (!keys.empty())
    load_floats<kTileQ, kDimQk, kStrideQk>(q_tile, q + step.at_q(tile.row, head), int64(heads_q) * dim_qk, tile.real,
                                           dim_qk);
  for (int first = keys.first; first < keys.last; first += kTileK) {
    const int64 row = document.k_row + first;
    barrier();  // The tile before this one is done with.
    load_floats<kTileK, kDimQk, kStrideQk>(k_tile, k + step.at_k(row, head_kv), int64(heads_kv) * dim_qk,
                                           keys.last - first, dim_qk);
    load_floats<kTileK, kDimV, kDimV>(v_tile, v + step.at_v(row, head_kv), int64(heads_kv) * dim_v, keys.last - first,
                                      dim_v);
    cp_async_commit();
    cp_async_wait<0>();
    barrier();

    float scores[kRows][kKeys] = {};
#pragma unroll 2
    for (int depth = 0; depth < kDimQk; depth += 4) {
      Vec16 q_values[kRows], k_values[kKeys];
#pragma unroll
      for (int r = 0; r < kRows; r++) q_values[r] = load16(q_tile + (group + r * kGroup) * kStrideQk + depth);
#pragma unroll
      for (int j = 0; j < kKeys; j++) k_values[j] = load16(k_tile + (place + j * kGroup) * kStrideQk + depth);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
          for (int j = 0; j < kKeys; j++)
            scores[r][j] =
                multiply_add(bits_float(q_values[r].words[i]), bits_float(k_values[j].words[i]), scores[r][j]);
    }
    const bool masked = first < all.first || first + kTileK > all.last;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const Range seen = document.keys_seen(tile.offset + group + r * kGroup);
      float highest = largest[r];
#pragma unroll
      for (int j = 0; j < kKeys; j++) {
        const int key = first + place + j * kGroup;
        scores[r][j] *= c;
        if (masked && (key < seen.first || key >= seen.last)) scores[r][j] = negative_infinity();
        highest = maximum(highest, scores[r][j]);
      }
#pragma unroll
      for (int distance = kGroup / 2; distance > 0; distance /= 2)
        highest = maximum(highest, shuffle_xor(kFullWarp, highest, distance));
      const float base = is_negative_infinity(highest) ? 0.f : highest;  // A row that saw no key yet.
      const float shrink = exp2_approx(largest[r] - base);
      largest[r] = highest;
      total[r] *= shrink;
#pragma unroll
      for (int j = 0; j < kKeys; j++) {
        const float p = exp2_approx(scores[r][j] - base);
        total[r] += p;
        p_tile[(group + r * kGroup) * kStrideP + place + j * kGroup] = p;
      }
#pragma unroll
      for (int e = 0; e < kColumns; e++) sums[r][e] *= shrink;
    }
    warp_barrier();  // The group's p is there; no other group reads it.
    for (int j = 0; j < kTileK; j++) {
      float p[kRows];
#pragma unroll
      for (int r = 0; r < kRows; r++) p[r] = p_tile[(group + r * kGroup) * kStrideP + j];
#pragma unroll
      for (int e = 0; e < kColumns; e++) {
        const float value = v_tile[j * kDimV + place + e * kGroup];
#pragma unroll
        for (int r = 0; r < kRows; r++) sums[r][e] = multiply_add(p[r], value, sums[r][e]);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int row = group + r * kGroup;
#pragma unroll
    for (int distance = kGroup / 2; distance > 0; distance /= 2) total[r] += shuffle_xor(kFullWarp, total[r], distance);
    if (row >= tile.rows) continue;
    const bool sees = row < tile.real && !document.keys_seen(tile.offset + row).empty();
    float* to = out + step.at_out(tile.row + row, head);
#pragma unroll
    for (int e = 0; e < kColumns; e++)
      if (place + e * kGroup < dim_v) to[place + e * kGroup] = sees ? sums[r][e] / total[r] : 0.f;
    if (place == 0)
      lse[step.at_lse(tile.row + row, head)] =
          sees ? (largest[r] + log2_approx(total[r])) * kLn2 : negative_infinity();
  }
}
