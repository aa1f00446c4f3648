// Purpose: which rows a rank holds, for every policy: the device's form of refimpl/partition.py. Included by partition.cu and
// metadata.cu.
//
// A policy is two numbers, so a new one that cuts evenly is a new pair: whether every document is cut or the whole buffer, and
// how many chunks a rank holds. A rank attends for its chunks in as many steps: of one chunk, `cp_rank`; of two,
// `cp_rank` and `2 * cp_size - 1 - cp_rank`.
//
//   dual_chunk_swap           per_document 1   chunks_per_rank 2
//   packed_contiguous         per_document 0   chunks_per_rank 1
//   packed_dual_chunk_swap    per_document 0   chunks_per_rank 2
//
// Offsets are int32, as kernels everywhere take them; rows are computed in 64 bits.
//
// clauses: P1 P2 P3 P4 P5 P8

#pragma once

#include "primitives.cuh"

namespace thdcp {

struct Cut {
  bool per_document;
  int chunks_per_rank;
  int cp_size;

  THDCP_DEVICE int chunks() const { return chunks_per_rank * cp_size; }
  THDCP_DEVICE int chunk_of(int rank, int step) const { return step == 0 ? rank : 2 * cp_size - 1 - rank; }
};

// The physical rows [start, end) of a document that a rank attends for in one step.
struct Window {
  int64 start;
  int64 end;
};

// The extent of a document; document `documents` is the tail behind the last offset.
THDCP_DEVICE int64 extent_end(const int32* padded, int documents, int64 total, int document) {
  return document < documents ? int64(padded[document + 1]) : total;
}

THDCP_DEVICE Window window_of(const Cut& cut, int chunk, int64 total, int64 start, int64 end) {
  if (cut.per_document) {
    const int64 size = (end - start) / cut.chunks();
    return {start + chunk * size, start + (chunk + 1) * size};
  }
  const int64 size = total / cut.chunks(), first = chunk * size, last = first + size;
  return {minimum(maximum(start, first), last), minimum(maximum(end, first), last)};
}

// The document that owns a physical row: the last one whose start is not behind it; `documents` for the tail.
THDCP_DEVICE int document_of(const int32* padded, int documents, int64 row) {
  int low = 0, high = documents;  // padded[low] <= row, and padded[high + 1] > row if there were one.
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (padded[middle] <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The physical row that is row `local` of a rank's buffer.
THDCP_DEVICE int64 row_of(const Cut& cut, const int32* padded, int documents, int64 total, int rank, int64 local) {
  int64 start = 0, end = total;
  if (cut.per_document) {
    // A rank holds the same share of every document, so its row `local` lies in the document of row local * cp_size.
    const int document = document_of(padded, documents, local * cut.cp_size);
    start = padded[document];
    end = extent_end(padded, documents, total, document);
  }
  const int64 size = (end - start) / cut.chunks(), inside = local - start / cut.cp_size;
  const int64 row = inside < size ? start + cut.chunk_of(rank, 0) * size + inside
                                  : start + cut.chunk_of(rank, 1) * size + inside - size;
  return minimum(maximum(row, int64(0)), total - 1);  // Offsets that cannot be cut give wrong rows, but never outside.
}

}  // namespace thdcp
