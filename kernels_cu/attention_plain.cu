// Purpose: attention written to be read: the formulas of refimpl/attention.py, one thread a query row and head. What the tuned
// kernels are compared with on a device, and what computes head dims that they do not take: any Dqk and Dv.
//
// Launch: one thread a (row, head), heads inside, blocks of 128: ceil(rows_q * heads_q / 128).
//
// clauses: A1 A2 A3 A4 A5 A6 K1 K4 K5 N3
// versions:
//   1  a thread walks over its keys three times: for the largest score, for the sum of the exponentials, for the output. It
//      recomputes the scores rather than keep them, as the tuned kernels do, and reads only rows of its own document, so
//      nothing that padding holds can reach a result.

#include "attention.cuh"

using namespace thdcp;

constexpr int kThreads = 128;
constexpr int kColumns = 32;  // columns of the output that a thread sums up in one walk

template <typename T>
THDCP_DEVICE float dot(const T* a, const T* b, int count) {
  float sum = 0;
  for (int c = 0; c < count; c++) sum = multiply_add(to_float(a[c]), to_float(b[c]), sum);
  return sum;
}

template <typename T>
THDCP_DEVICE void attention_row(const T* q, const T* k, const T* v, const Step& step, int64 row, int head, T* out,
                                float* lse) {
  T* out_row = out + step.at_out(row, head);
  float* row_lse = lse + step.at_lse(row, head);
  const int d = document_of(step.cu_q_padded, step.documents, row);
  const Document document = document_at(step, d);
  const int64 i = row - step.cu_q_padded[d];
  const Range seen = i < document.queries ? document.keys_seen(i) : Range{0, 0};
  if (seen.empty()) {  // Padding, or a query that sees no key.
    for (int c = 0; c < step.dim_v; c++) out_row[c] = from_float<T>(0.f);
    *row_lse = negative_infinity();
    return;
  }
  const int head_kv = step.key_head(head);
  const T* q_row = q + step.at_q(row, head);
  const auto score = [&](int j) {
    return step.softmax_scale * dot(q_row, k + step.at_k(document.k_row + j, head_kv), step.dim_qk);
  };
  float largest = negative_infinity();
  for (int j = seen.first; j < seen.last; j++) largest = maximum(largest, score(j));
  float total = 0;
  for (int j = seen.first; j < seen.last; j++) total += exp2_approx((score(j) - largest) * kLog2E);
  for (int column = 0; column < step.dim_v; column += kColumns) {
    const int count = minimum(kColumns, step.dim_v - column);
    float sums[kColumns] = {};
    for (int j = seen.first; j < seen.last; j++) {
      const float weight = exp2_approx((score(j) - largest) * kLog2E);
      const T* v_row = v + step.at_v(document.k_row + j, head_kv) + column;
#pragma unroll
      for (int c = 0; c < kColumns; c++)
        if (c < count) sums[c] = multiply_add(weight, to_float(v_row[c]), sums[c]);
    }
#pragma unroll
    for (int c = 0; c < kColumns; c++)
      if (c < count) out_row[column + c] = from_float<T>(sums[c] / total);
  }
  *row_lse = largest + log2_approx(total) * kLn2;
}

#define ATTENTION_PLAIN(name, T)                                                                                     \
  THDCP_KERNEL(name, kThreads, 1, const T* q, const T* k, const T* v, THDCP_STEP_PARAMETERS, T* out, float* lse) { \
    const Step step = THDCP_STEP;                                                                                    \
    const int64 i = int64(blockIdx.x) * kThreads + threadIdx.x;                                                      \
    if (i < rows_q * heads_q) attention_row(q, k, v, step, i / heads_q, int(i % heads_q), out, lse);                 \
  }
ATTENTION_PLAIN(attention_plain_float32, float)
ATTENTION_PLAIN(attention_plain_bfloat16, bf16)
ATTENTION_PLAIN(attention_plain_float16, fp16)
