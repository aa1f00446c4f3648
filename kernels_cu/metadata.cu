// Purpose: what a rank tells its attention kernels, made on the device from offsets on the device: checks, the offsets of each
// step, positions, labels. The device's form of refimpl/metadata.py.
//
// Launch:
//   check_offsets   one block of 256
//   step_metadata   chunks_per_rank blocks of 256, one for each attention step
//   row_positions   one thread a row, blocks of 256
//   row_labels_N    one thread a row, blocks of 256; ids of N bits
//
// No launch size depends on what the offsets hold, and nothing comes back to the host: a captured graph replays on others. A
// batch with fewer documents repeats the last offset. So a refusal cannot be an exception here: check_offsets leaves it in
// `status`, step_metadata then describes a step without queries, and who has time to look raises it.
//
// clauses: L2 L3 L4 L5 L6 L7 P5 P6 P10 R1 R2 R3 R4 R5 R6 K2
// versions:
//   1  one thread adds up the offsets, one document after another.
//   2  a block scans 256 documents at a time.

#include "policy.cuh"

using namespace thdcp;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// status[0] of check_offsets; the names are codes of refimpl/errors.py, host code translates in this order.
enum Status : int32 {
  kFine = 0,
  kOffsetsStart,
  kOffsetsDecreasing,
  kRealExceedsPhysical,
  kTotalTokens,
  kNotDivisible,
};

// Inclusive sums over the block, and what the whole block adds up to. `sums` holds kWarps values; all threads call it.
THDCP_DEVICE int32 block_scan(int32 value, int32* sums, int32& total) {
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const int32 before = shuffle_up(kFullWarp, value, delta);
    if (lane_id() >= delta) value += before;
  }
  if (lane_id() == kWarpSize - 1) sums[warp_id()] = value;
  barrier();
  total = 0;
  for (int warp = 0; warp < kWarps; warp++) {
    if (warp == warp_id()) value += total;
    total += sums[warp];
  }
  barrier();  // The next call writes `sums` again.
  return value;
}

// The smallest value in the block; as block_scan.
THDCP_DEVICE int64 block_minimum(int64 value, int64* smallest) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value = minimum(value, shuffle_xor(kFullWarp, value, distance));
  if (lane_id() == 0) smallest[warp_id()] = value;
  barrier();
  for (int warp = 0; warp < kWarps; warp++) value = minimum(value, smallest[warp]);
  barrier();
  return value;
}

THDCP_DEVICE Status fault_of(const int32* cu, const int32* padded, int documents, int64 total, const Cut& cut, int document) {
  if (document == documents) {  // The tail.
    if (total < padded[documents]) return kTotalTokens;
    const int64 rows = cut.per_document ? total - padded[documents] : total;
    return rows % cut.chunks() != 0 ? kNotDivisible : kFine;
  }
  if (document == 0 && (cu[0] != 0 || padded[0] != 0)) return kOffsetsStart;
  const int64 real = int64(cu[document + 1]) - cu[document], rows = int64(padded[document + 1]) - padded[document];
  if (real < 0 || rows < 0) return kOffsetsDecreasing;
  if (real > rows) return kRealExceedsPhysical;
  return cut.per_document && rows % cut.chunks() != 0 ? kNotDivisible : kFine;
}

// status[0] is what is wrong, kFine if nothing; status[1] the document where, or `documents` for the tail. The gravest fault
// is told, the order that of Status, and of equals the first.
THDCP_KERNEL(check_offsets, kThreads, 1, const int32* cu, const int32* padded, int documents, int64 total, int per_document,
             int chunks_per_rank, int cp_size, int32* status) {
  THDCP_SHARED_ARRAY(int64, smallest, kWarps);
  const Cut cut = {per_document != 0, chunks_per_rank, cp_size};
  constexpr int64 kNone = int64(1) << 62;
  int64 gravest = kNone;
  for (int d = thread_id(); d <= documents; d += kThreads) {
    const Status fault = fault_of(cu, padded, documents, total, cut, d);
    if (fault != kFine) gravest = minimum(gravest, int64(fault) << 32 | d);
  }
  gravest = block_minimum(gravest, smallest);
  if (thread_id() > 0) return;
  status[0] = gravest == kNone ? int32(kFine) : int32(gravest >> 32);
  status[1] = gravest == kNone ? 0 : int32(gravest & 0xffffffff);
}

// The offsets of step `blockIdx.x`, one behind the other in each result:
//   cu_q, cu_q_padded, cu_kv    [steps, documents + 1]  as StepMetadata has them; cu_kv_padded is `padded`
//   first_query                 [steps, documents]      StepMetadata.first_query_positions
//   local_start                 [steps, documents]      the row of the rank's buffer where the document's window begins, for
//                                                       kernels that read a step's queries in place
//   maxima                      [steps, 2]              max_seqlen_q, max_seqlen_kv
// `left` and `right` are the mask's bounds, right 0 when it is causal.
THDCP_KERNEL(step_metadata, kThreads, 1, const int32* cu, const int32* padded, int documents, int64 total, int per_document,
             int chunks_per_rank, int cp_size, int cp_rank, int left, int right, const int32* status, int32* cu_q,
             int32* cu_q_padded, int32* cu_kv, int32* first_query, int32* local_start, int32* maxima) {
  THDCP_SHARED_ARRAY(int32, sums, kWarps);
  THDCP_SHARED_ARRAY(int64, smallest, kWarps);
  const Cut cut = {per_document != 0, chunks_per_rank, cp_size};
  const int step = int(blockIdx.x), chunk = cut.chunk_of(cp_rank, step);
  const bool refused = status[0] != kFine;
  const bool bottom_right = right == 0 || (right < 0 && left < 0);
  const int64 offsets = int64(step) * (documents + 1), entries = int64(step) * documents;
  int32 queries_before = 0, rows_before = 0, keys_before = 0;
  int32 most_queries = 0, most_keys = 0;
  if (thread_id() == 0) cu_q[offsets] = cu_q_padded[offsets] = cu_kv[offsets] = 0;
  for (int base = 0; base < documents; base += kThreads) {
    const int d = base + thread_id();
    int64 queries = 0, rows = 0, keys = 0, first = 0, local = 0;
    if (d < documents && !refused) {
      const int64 start = padded[d], real = int64(cu[d + 1]) - cu[d];
      const Window window = window_of(cut, chunk, total, start, padded[d + 1]);
      const int64 first_row = minimum(maximum(start, window.start), window.end);
      const int64 last_row = minimum(maximum(start + real, window.start), window.end);
      queries = last_row - first_row;
      rows = window.end - window.start;
      if (window.end > start) keys = right < 0 ? real : minimum(real, window.end - start + right);
      first = bottom_right ? keys - queries : first_row - start;
      // What the rank holds before this window: of a document, its share and the earlier chunk; of the buffer, the same.
      const int64 size = cut.per_document ? rows : total / cut.chunks();
      local = cut.per_document ? start / cp_size + step * size : window.start - chunk * size + step * size;
    }
    int32 all_queries, all_rows, all_keys;
    const int32 queries_sum = queries_before + block_scan(int32(queries), sums, all_queries);
    const int32 rows_sum = rows_before + block_scan(int32(rows), sums, all_rows);
    const int32 keys_sum = keys_before + block_scan(int32(keys), sums, all_keys);
    if (d < documents) {
      cu_q[offsets + d + 1] = queries_sum;
      cu_q_padded[offsets + d + 1] = rows_sum;
      cu_kv[offsets + d + 1] = keys_sum;
      first_query[entries + d] = int32(first);
      local_start[entries + d] = int32(local);
    }
    most_queries = maximum(most_queries, int32(queries));
    most_keys = maximum(most_keys, int32(keys));
    queries_before += all_queries;
    rows_before += all_rows;
    keys_before += all_keys;
  }
  most_queries = int32(-block_minimum(-int64(most_queries), smallest));
  most_keys = int32(-block_minimum(-int64(most_keys), smallest));
  if (thread_id() == 0) maxima[step * 2] = most_queries, maxima[step * 2 + 1] = most_keys;
}

// The document (-1 for padding) and the position of physical row rows[i], or of row i when `rows` is null.
THDCP_KERNEL(row_positions, kThreads, 1, const int32* cu, const int32* padded, int documents, const int64* rows, int64 count,
             int32* document, int64* position) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64 row = rows == nullptr ? i : rows[i];
  const int d = document_of(padded, documents, row);
  const int64 inside = row - padded[d];
  document[i] = d < documents && inside < int64(cu[d + 1]) - cu[d] ? d : -1;
  position[i] = inside;
}

// The label of physical row rows[i], or of row i: the id of the next real token of its document, else `ignore`.
template <typename Id>
THDCP_DEVICE void label_rows(const int32* cu, const int32* padded, int documents, const Id* ids, const int64* rows,
                             int64 count, Id ignore, Id* labels) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64 row = rows == nullptr ? i : rows[i];
  const int d = document_of(padded, documents, row);
  const bool has_next = d < documents && row + 1 - padded[d] < int64(cu[d + 1]) - cu[d];
  labels[i] = has_next ? ids[row + 1] : ignore;
}
THDCP_KERNEL(row_labels_32, kThreads, 1, const int32* cu, const int32* padded, int documents, const int32* ids,
             const int64* rows, int64 count, int32 ignore, int32* labels) {
  label_rows(cu, padded, documents, ids, rows, count, ignore, labels);
}
THDCP_KERNEL(row_labels_64, kThreads, 1, const int32* cu, const int32* padded, int documents, const int64* ids,
             const int64* rows, int64 count, int64 ignore, int64* labels) {
  label_rows(cu, padded, documents, ids, rows, count, ignore, labels);
}
