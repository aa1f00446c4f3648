// Purpose: the last step of dk and dv: they are summed over steps and ranks in float and rounded once, here.
//
// Launch: one thread four elements, blocks of 256: ceil(count / 1024). Arrays begin at multiples of 16 bytes.
//   add_floats       sum += x
//   cast_bfloat16    y = x rounded to nearest, ties to even
//   cast_float16     the same
//
// clauses: N1 N3
// versions:
//   1  one thread an element.
//   2  16 bytes a read: these kernels do nothing but move memory.

#include "primitives.cuh"

using namespace thdcp;

struct alignas(16) Four {
  float at[4];
};
template <typename T>
struct alignas(8) FourOf {
  T at[4];
};

THDCP_KERNEL(add_floats, 256, 1, const float* x, int64 count, float* sum) {
  const int64 first = (int64(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (first + 4 <= count) {
    const Four more = *reinterpret_cast<const Four*>(x + first);
    Four four = *reinterpret_cast<Four*>(sum + first);
#pragma unroll
    for (int i = 0; i < 4; i++) four.at[i] += more.at[i];
    *reinterpret_cast<Four*>(sum + first) = four;
    return;
  }
  for (int64 i = first; i < count; i++) sum[i] += x[i];
}

template <typename T>
THDCP_DEVICE void cast(const float* x, int64 count, T* y) {
  const int64 first = (int64(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (first + 4 <= count) {
    const Four four = *reinterpret_cast<const Four*>(x + first);
    FourOf<T> rounded;
#pragma unroll
    for (int i = 0; i < 4; i++) rounded.at[i] = from_float<T>(four.at[i]);
    *reinterpret_cast<FourOf<T>*>(y + first) = rounded;
    return;
  }
  for (int64 i = first; i < count; i++) y[i] = from_float<T>(x[i]);
}

THDCP_KERNEL(cast_bfloat16, 256, 1, const float* x, int64 count, bf16* y) { cast(x, count, y); }
THDCP_KERNEL(cast_float16, 256, 1, const float* x, int64 count, fp16* y) { cast(x, count, y); }
