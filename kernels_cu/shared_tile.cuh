// Purpose: tiles of 16-bit rows in shared memory as tensor cores want them: how they are stored, filled and read.
//
// A tile is [kRows, kColumns], kColumns a multiple of 32. ldmatrix reads eight rows of 16 bytes at a time, and a column of
// a plain row-major tile lies in the same banks row after row: eight passes instead of one. So the 16-byte chunks of a row
// change places by an exclusive or with the row's number. Rows of 128 bytes (or a multiple) need all eight places; rows of 64
// bytes (or an odd multiple) already alternate between two, and need four.
//
// Which rows and columns a lane points ldmatrix at, for m16n8k16 (PTX ISA, "Matrix fragments"):
//
//   a  [16 rows of the tile, 16 columns]      rows lane % 16, columns 8 * (lane / 16)          straight
//   b  the tile's rows are the product's n    rows lane % 8 + 8 * (lane / 16), columns 8 * (lane / 8 % 2)    straight, 16 n
//   b  the tile's rows are the product's k    rows lane % 16, columns 8 * (lane / 16)          transposed, 16 n
//
// clauses: A5
// versions:
//   1  row-major: seven extra passes an ldmatrix.
//   2  eight elements of padding behind every row: none, but a sixteenth (D = 128) of the memory more, and no power of two.
//   3  exclusive or: none, and no memory.

#pragma once

#include "primitives.cuh"

namespace thdcp {

// Where the element lies, counted in elements.
template <int kColumns>
THDCP_DEVICE int swizzled(int row, int column) {
  constexpr int kChunks = kColumns / 8;
  static_assert(kColumns % 32 == 0, "a row is a multiple of 64 bytes");
  const int chunk = column / 8;
  const int place = kChunks % 8 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
  return row * kColumns + place * 8 + column % 8;
}

// Fill a tile by asynchronous copies of `kThreads` threads; the caller commits and waits. Row r comes from `source + r * stride`;
// rows from `rows` on and columns from `columns` (a multiple of 8) on become 0 and are never read.
template <int kRows, int kColumns, int kThreads, typename T>
THDCP_DEVICE void load_tile(T* tile, const T* source, int stride, int rows, int columns) {
  static_assert(sizeof(T) == 2, "a chunk is eight elements");
  constexpr int kChunks = kColumns / 8;
  // Not unrolled: the addresses of all copies at once would fill registers that the sums need.
#pragma unroll 1
  for (int i = thread_id(); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * 8;
    const bool exists = row < rows && column < columns;
    cp_async_16(tile + swizzled<kColumns>(row, column), exists ? source + row * stride + column : source, exists);
  }
}

// Where a lane points ldmatrix: element (row + lane_row, column + lane_column) of a tile, row a multiple of 8 and column of 16,
// lane_column 0 or 8. The same as swizzled(), split into what a lane keeps and what is a constant.
template <int kColumns>
THDCP_DEVICE int fragment_at(int row, int column, int lane_row, int lane_column) {
  constexpr int kTurned = kColumns % 64 == 0 ? 56 : 24;  // the bits of a column that the exclusive or changes
  const int turn = kColumns % 64 == 0 ? lane_row % 8 * 8 : lane_row / 2 % 4 * 8;
  const int kept = lane_row * kColumns + (turn ^ lane_column);
  return (kept ^ (column & kTurned)) + row * kColumns + (column & ~kTurned);
}

// The fragments at (row, column) of a tile: a [16, 16]; b of 16 n and 16 k, as two products take them, b[0] b[1] and b[2] b[3].
template <int kColumns, typename T>
THDCP_DEVICE void load_a(uint32 (&a)[4], const T* tile, int row, int column) {
  const int lane = lane_id();
  ldmatrix_x4(a[0], a[1], a[2], a[3], tile + fragment_at<kColumns>(row, column, lane % 16, lane / 16 * 8));
}
template <int kColumns, typename T>
THDCP_DEVICE void load_b_rows_n(uint32 (&b)[4], const T* tile, int row, int column) {
  const int lane = lane_id();
  ldmatrix_x4(b[0], b[1], b[2], b[3],
              tile + fragment_at<kColumns>(row, column, lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
}
template <int kColumns, typename T>
THDCP_DEVICE void load_b_rows_k(uint32 (&b)[4], const T* tile, int row, int column) {
  const int lane = lane_id();
  ldmatrix_x4_trans(b[0], b[1], b[2], b[3], tile + fragment_at<kColumns>(row, column, lane % 16, lane / 16 * 8));
}

}  // namespace thdcp
