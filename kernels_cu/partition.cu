// Purpose: rows between sequence order and rank order: which rows a rank holds, and moving rows there and back.
//
// Launch:
//   rank_rows       one thread a row, blocks of 256: ceil(count / 256)
//   invert_rows     one thread a row, blocks of 256: ceil(count / 256)
//   gather_rows_N   blocks of 256; `threads_per_row`, a power of two up to 256, threads move one row: ceil(count /
//   scatter_rows_N  (256 / threads_per_row)) blocks. N bytes an access, which divide the size of a row and both addresses;
//                   about as many threads a row as it has accesses.
//
// No launch size depends on what the offsets hold, and nothing comes back to the host: a captured graph replays on others.
//
// clauses: P1 P2 P3 P4 P5 P7 P8 C1 C2 N3
// versions:
//   1  one thread an access, which finds its row by a 64-bit division.
//   2  some threads a row, the row's index read once by each, 16-byte accesses, four of them in flight.

#include "policy.cuh"

using namespace thdcp;

// rows[i] = the physical row that is row (first + i) of all ranks' buffers, one behind the other: for one rank, first is
// rank * total / cp_size and count is total / cp_size; for the order of the gathered buffer, 0 and total.
THDCP_KERNEL(rank_rows, 256, 1, const int32* padded, int documents, int64 total, int per_document, int chunks_per_rank,
             int cp_size, int64 first, int64 count, int64* rows) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Cut cut = {per_document != 0, chunks_per_rank, cp_size};
  const int64 per_rank = total / cp_size;
  const int rank = int((first + i) / per_rank);
  rows[i] = row_of(cut, padded, documents, total, rank, (first + i) % per_rank);
}

// inverse[rows[i]] = i.
THDCP_KERNEL(invert_rows, 256, 1, const int64* rows, int64 count, int64* inverse) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) inverse[rows[i]] = i;
}

template <typename Unit>
THDCP_DEVICE Unit load_unit(const Unit* from) {
  return *from;
}
template <>
THDCP_DEVICE Vec16 load_unit<Vec16>(const Vec16* from) {
  return load16(from);
}
template <typename Unit>
THDCP_DEVICE void store_unit(Unit* to, const Unit& unit) {
  *to = unit;
}
template <>
THDCP_DEVICE void store_unit<Vec16>(Vec16* to, const Vec16& unit) {
  store16(to, unit);
}

// y[to] = x[from], where one of the two is i and the other rows[i]. `units` a row.
template <typename Unit, bool kScatter>
THDCP_DEVICE void move_rows(const Unit* x, const int64* rows, Unit* y, int64 count, int64 units, int threads_per_row) {
  const int64 i = int64(blockIdx.x) * (blockDim.x / threads_per_row) + threadIdx.x / threads_per_row;
  if (i >= count) return;
  const int64 row = rows[i];
  const Unit* from = x + (kScatter ? i : row) * units;
  Unit* to = y + (kScatter ? row : i) * units;
  int64 unit = threadIdx.x % threads_per_row;
  constexpr int kInFlight = 4;
  for (; unit + (kInFlight - 1) * threads_per_row < units; unit += kInFlight * threads_per_row) {
    Unit held[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; j++) held[j] = load_unit(from + unit + j * threads_per_row);
#pragma unroll
    for (int j = 0; j < kInFlight; j++) store_unit(to + unit + j * threads_per_row, held[j]);
  }
  for (; unit < units; unit += threads_per_row) store_unit(to + unit, load_unit(from + unit));
}

#define MOVE_ROWS(bytes, Unit)                                                                                       \
  THDCP_KERNEL(gather_rows_##bytes, 256, 1, const Unit* x, const int64* rows, Unit* y, int64 count, int64 units,     \
               int threads_per_row) {                                                                                \
    move_rows<Unit, false>(x, rows, y, count, units, threads_per_row);                                               \
  }                                                                                                                  \
  THDCP_KERNEL(scatter_rows_##bytes, 256, 1, const Unit* x, const int64* rows, Unit* y, int64 count, int64 units,    \
               int threads_per_row) {                                                                                \
    move_rows<Unit, true>(x, rows, y, count, units, threads_per_row);                                                \
  }
MOVE_ROWS(16, Vec16)
MOVE_ROWS(8, uint64)
MOVE_ROWS(4, uint32)
MOVE_ROWS(2, uint16)
MOVE_ROWS(1, uint8)
