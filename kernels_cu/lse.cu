// Purpose: log-sum-exp on the device, the form of refimpl/lse.py: partial results over disjoint keys merged into one, and lse in
// the conventions of other frameworks.
//
// Launch:
//   merge_T          a warp a (row, head), heads inside, blocks of 256: ceil(rows * heads / 8)
//   lse_convention   one thread an element, blocks of 256: ceil(heads * rows / 256)
//
// A part whose lse is -inf saw no key of that row: its `out` there may be anything and is not read. An lse of +inf, which is
// another framework's mark of such rows, is not looked for: that would make the host wait. It gives NaN, as
// an lse of NaN does.
//
// clauses: A6 A7 N3
// versions:
//   1  two parts at a time, as a ring does: a rounding of every sum for each part.
//   2  all parts at once: one maximum, one sum, one rounding.

#include "primitives.cuh"

using namespace thdcp;

constexpr int kWarps = 8;

// outs [parts, rows, heads, dim], lses [parts, heads, rows] natural; out [rows, heads, dim] and lse [heads, rows] in float.
template <typename T>
THDCP_DEVICE void merge(const T* outs, const float* lses, int parts, int64 rows, int heads, int dim, float* out, float* lse) {
  const int64 pair = int64(blockIdx.x) * kWarps + warp_id();
  if (pair >= rows * heads) return;
  const int64 row = pair / heads, of_all = rows * heads, at = (pair % heads) * rows + row;
  float largest = negative_infinity();
  bool empty = true;  // Not read off the largest: of NaN alone there is none.
  for (int p = 0; p < parts; p++) {
    largest = maximum(largest, lses[p * of_all + at]);
    empty = empty && is_negative_infinity(lses[p * of_all + at]);
  }
  float total = 0;
  for (int p = 0; p < parts && !empty; p++) total += exp2_approx((lses[p * of_all + at] - largest) * kLog2E);
  for (int c = lane_id(); c < dim; c += kWarpSize) {
    float sum = 0;
    for (int p = 0; p < parts && !empty; p++) {
      const float weight = exp2_approx((lses[p * of_all + at] - largest) * kLog2E);
      if (weight != 0) sum = multiply_add(weight, to_float(outs[(p * of_all + pair) * dim + c]), sum);
    }
    out[pair * dim + c] = empty ? 0.f : sum / total;
  }
  if (lane_id() == 0) lse[at] = empty ? negative_infinity() : largest + log2_approx(total) * kLn2;
}

#define MERGE(name, T)                                                                                                    \
  THDCP_KERNEL(name, 256, 1, const T* outs, const float* lses, int parts, int64 rows, int heads, int dim, float* out,     \
               float* lse) {                                                                                              \
    merge(outs, lses, parts, rows, heads, dim, out, lse);                                                                 \
  }
MERGE(merge_float32, float)
MERGE(merge_float16, fp16)
MERGE(merge_bfloat16, bf16)

// y [count / inner, inner] of x, transposed if `transposes`: then x is [inner, count / inner]. What equals `from_empty` becomes
// `to_empty`; a NaN equals a NaN here.
THDCP_KERNEL(lse_convention, 256, 1, const float* x, int64 count, int64 inner, int transposes, float factor,
             float from_empty, float to_empty, float* y) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float value = x[transposes ? (i % inner) * (count / inner) + i / inner : i];
  const bool is_empty = from_empty != from_empty ? value != value : value == from_empty;
  y[i] = is_empty ? to_empty : value * factor;
}
