// Purpose: what the attention kernels share, forward and backward: the step they compute, the rows that a block owns, and the
// keys that queries see. The device's form of StepMetadata (refimpl/metadata.py) and of AttentionMask (refimpl/mask.py).
//
// A kernel takes its tensors, then THDCP_STEP_PARAMETERS, and gathers these as `const Step step = THDCP_STEP;`.
//
//   q [rows_q, heads_q, dim_qk]   k [rows_k, heads_kv, dim_qk]   v [rows_k, heads_kv, dim_v]    inputs, contiguous
//   out [rows_q, heads_q, dim_v]  lse [heads_q, rows_q] float    results; dout, dq, dk, dv have the shapes of out, q, k, v
//
// Every row of a result is written, padding too: a block owns *physical* rows. Those of the query buffer are cut into tiles
// document by document, the tail behind the last document like one more document, and so are those of K and V in a pass over
// keys. A launch has tile_slots(rows, documents, tile) slots, which depends on nothing that the offsets hold; a slot finds its
// document by bisection. Some slots have no rows, less than two a document.
//
// Offsets are int32; rows, positions and strides are 64 bits.
//
// clauses: A2 A4 A5 K1 K2 K3 K4 K5 L1 L4 L5 R2 R4 R5 N3

#pragma once

#include "policy.cuh"

namespace thdcp {

// One attention step. Document d has cu_q[d + 1] - cu_q[d] queries, the first at row cu_q_padded[d] of the query buffer and at
// position first_query[d] of the document's keys; these are cu_kv[d + 1] - cu_kv[d], the first at row cu_kv_padded[d] of K
// and V. `left` and `right` are the mask's bounds, -1 unlimited; right is 0 when it is causal.
struct Step {
  const int32* cu_q;
  const int32* cu_q_padded;
  const int32* cu_kv;
  const int32* cu_kv_padded;
  const int32* first_query;
  int documents;
  int64 rows_q;
  int64 rows_k;
  int heads_q;
  int heads_kv;
  int dim_qk;
  int dim_v;
  int64 left;
  int64 right;
  float softmax_scale;

  THDCP_DEVICE int group() const { return heads_q / heads_kv; }
  THDCP_DEVICE int key_head(int head) const { return head / group(); }
  // Where a row of a head begins.
  THDCP_DEVICE int64 at_q(int64 row, int head) const { return (row * heads_q + head) * dim_qk; }
  THDCP_DEVICE int64 at_out(int64 row, int head) const { return (row * heads_q + head) * dim_v; }
  THDCP_DEVICE int64 at_k(int64 row, int head_kv) const { return (row * heads_kv + head_kv) * dim_qk; }
  THDCP_DEVICE int64 at_v(int64 row, int head_kv) const { return (row * heads_kv + head_kv) * dim_v; }
  THDCP_DEVICE int64 at_lse(int64 row, int head) const { return head * rows_q + row; }
};

#define THDCP_STEP_PARAMETERS                                                                                             \
  const int32 *cu_q, const int32 *cu_q_padded, const int32 *cu_kv, const int32 *cu_kv_padded, const int32 *first_query, \
      int documents, int64 rows_q, int64 rows_k, int heads_q, int heads_kv, int dim_qk, int dim_v, int64 left,           \
      int64 right, float softmax_scale
#define THDCP_STEP                                                                                                    \
  Step {                                                                                                              \
    cu_q, cu_q_padded, cu_kv, cu_kv_padded, first_query, documents, rows_q, rows_k, heads_q, heads_kv, dim_qk, dim_v, \
        left, right, softmax_scale                                                                                    \
  }

// Rows of one document that a block owns: physical rows [row, row + rows) of a buffer, of which the first `real` hold a token;
// `offset` is the first of them counted in the document. Document `documents` is the tail. rows is 0 where a slot is idle.
struct Tile {
  int document;
  int64 row;
  int offset;
  int rows;
  int real;
};

// How many slots the tiles of `rows` rows take. Mirrored in cupy_backend/attention.py.
THDCP_DEVICE int64 tile_slots(int64 rows, int documents, int tile) { return rows / tile + documents + 1; }

// The tile of a slot. Document d has the slots from padded[d] / tile + d on: at least as many as it has tiles, because
// floor(b / t) - floor(a / t) + 1 >= ceil((b - a) / t).
THDCP_DEVICE Tile tile_of(const int32* cu, const int32* padded, int documents, int64 rows, int tile, int64 slot) {
  int low = 0, high = documents;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (padded[middle] / tile + int64(middle) <= slot)
      low = middle;
    else
      high = middle - 1;
  }
  const int64 start = padded[low], end = low < documents ? int64(padded[low + 1]) : rows;
  const int64 real = low < documents ? int64(cu[low + 1]) - cu[low] : 0;
  const int64 offset = (slot - (start / tile + low)) * tile;
  Tile result;
  result.document = low;
  result.row = start + offset;
  result.offset = int(offset);
  result.rows = int(maximum(int64(0), minimum(int64(tile), end - start - offset)));
  result.real = int(maximum(int64(0), minimum(int64(result.rows), real - offset)));
  return result;
}

// The tile of query rows, and of rows of K and V, that a block owns. Late tiles come first: under a causal mask they are the
// longest, and what starts last should be short.
THDCP_DEVICE Tile query_tile(const Step& step, int tile, int64 slot) {
  slot = tile_slots(step.rows_q, step.documents, tile) - 1 - slot;
  return tile_of(step.cu_q, step.cu_q_padded, step.documents, step.rows_q, tile, slot);
}
// Of keys the early tiles are the longest.
THDCP_DEVICE Tile key_tile(const Step& step, int tile, int64 slot) {
  return tile_of(step.cu_kv, step.cu_kv_padded, step.documents, step.rows_k, tile, slot);
}

// Neighbours [first, last) among the keys, or the queries, of a document; first <= last.
struct Range {
  int first;
  int last;

  THDCP_DEVICE bool empty() const { return first == last; }
};

THDCP_DEVICE int clipped(int64 x, int64 limit) { return int(minimum(maximum(x, int64(0)), limit)); }

// One document of a step: its queries and keys by number, and which see which. Query i stands at position first_query + i, key
// j at position j.
struct Document {
  int64 q_row;  // of the first query
  int64 k_row;  // of the first key
  int queries;
  int keys;
  int32 first_query;
  int64 left;
  int64 right;

  // The keys that query i sees: the visibility predicate, solved.
  THDCP_DEVICE Range keys_seen(int64 i) const {
    const int64 position = int64(first_query) + i;
    const int last = right < 0 ? keys : clipped(position + right + 1, keys);
    const int first = left < 0 ? 0 : clipped(position - left, keys);
    return {minimum(first, last), last};
  }
  // Keys that some of the queries [i, i + count) see; a tile of keys outside is skipped. count >= 1
  THDCP_DEVICE Range keys_of_any(int64 i, int count) const {
    const int last = keys_seen(i + count - 1).last;
    return {minimum(keys_seen(i).first, last), last};
  }
  // Keys that each of them sees; a tile of keys inside needs no mask.
  THDCP_DEVICE Range keys_of_all(int64 i, int count) const {
    const int last = keys_seen(i).last;
    return {minimum(keys_seen(i + count - 1).first, last), last};
  }
  // The queries that see key j.
  THDCP_DEVICE Range queries_seeing(int64 j) const {
    const int64 i = j - first_query;
    const int first = right < 0 ? 0 : clipped(i - right, queries);
    const int last = left < 0 ? queries : clipped(i + left + 1, queries);
    return {minimum(first, last), last};
  }
  // Queries that see some, and each, of the keys [j, j + count). count >= 1
  THDCP_DEVICE Range queries_of_any(int64 j, int count) const {
    const int last = queries_seeing(j + count - 1).last;
    return {minimum(queries_seeing(j).first, last), last};
  }
  THDCP_DEVICE Range queries_of_all(int64 j, int count) const {
    const int last = queries_seeing(j).last;
    return {minimum(queries_seeing(j + count - 1).first, last), last};
  }
};

// Document d of a step; the tail, `documents`, has neither queries nor keys.
THDCP_DEVICE Document document_at(const Step& step, int d) {
  Document document = {0, 0, 0, 0, 0, step.left, step.right};
  if (d == step.documents) return document;
  document.q_row = step.cu_q_padded[d];
  document.k_row = step.cu_kv_padded[d];
  document.queries = step.cu_q[d + 1] - step.cu_q[d];
  document.keys = step.cu_kv[d + 1] - step.cu_kv[d];
  document.first_query = step.first_query[d];
  return document;
}

}  // namespace thdcp
