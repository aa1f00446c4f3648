// Purpose: attention over disjoint keys put together: one more part into what is merged so far. The device's form of
// merge_partials (refimpl/lse.py), part by part in the order given, so the same bits every time.
//
// Launch: a warp a (row, head), heads inside, blocks of 256: ceil(rows * heads / 8).
//
//   part [rows, heads, dim]  part_lse [heads, rows]    a part; what `part` holds in rows of lse -inf is never used
//   sum  [rows, heads, dim]  lse [heads, rows]         float32, changed in place; `first` says that they hold nothing yet
//
// An lse of NaN, or of +inf (the mark of an empty row elsewhere, [A7]), makes the row NaN: it cannot be refused from here, and
// must not look like an answer.
//
// clauses: A6 A7 N1 N3
// versions:
//   1  a thread an element: each computes the weights anew, and nobody knows when all have read the old lse.
//   2  a warp a row and head: neighbours in memory, and the lse is written behind a barrier.

#include "primitives.cuh"

using namespace thdcp;

constexpr int kThreads = 256;

template <typename T>
THDCP_DEVICE void merge_row(const T* part, const float* part_lse, int64 rows, int heads, int dim, bool first, float* sum,
                            float* lse) {
  const int64 i = int64(blockIdx.x) * (kThreads / kWarpSize) + warp_id();
  if (i >= rows * heads) return;
  const int64 at_lse = i % heads * rows + i / heads, at = i * dim;
  const float before = first ? negative_infinity() : lse[at_lse], added = part_lse[at_lse];
  const float positive_infinity = -negative_infinity();
  const bool wrong = before != before || added != added || added == positive_infinity;
  const bool keeps = !is_negative_infinity(before), adds = !is_negative_infinity(added);
  const float largest = maximum(before, added);
  const float old_weight = keeps ? exp2_approx((before - largest) * 1.4426950408889634f) : 0.f;
  const float new_weight = adds ? exp2_approx((added - largest) * 1.4426950408889634f) : 0.f;
  const float total = old_weight + new_weight;
  warp_barrier();  // Everyone has read the lse.
  for (int c = lane_id(); c < dim; c += kWarpSize) {
    float value = 0;
    if (keeps) value = sum[at + c] * (old_weight / total);
    if (adds) value = multiply_add(to_float(part[at + c]), new_weight / total, value);
    sum[at + c] = wrong ? bits_float(0x7fffffffu) : value;
  }
  if (lane_id() == 0)
    lse[at_lse] = wrong            ? bits_float(0x7fffffffu)
                  : keeps || adds ? largest + log2_approx(total) * 0.6931471805599453f
                                  : negative_infinity();
}

#define MERGE_PART(name, T)                                                                                              \
  THDCP_KERNEL(name, kThreads, 1, const T* part, const float* part_lse, int64 rows, int heads, int dim, int first,     \
               float* sum, float* lse) {                                                                                 \
    merge_row(part, part_lse, rows, heads, dim, first != 0, sum, lse);                                                   \
  }
MERGE_PART(merge_part_float32, float)
MERGE_PART(merge_part_bfloat16, bf16)
MERGE_PART(merge_part_float16, fp16)
