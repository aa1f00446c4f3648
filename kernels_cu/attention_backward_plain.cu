// Purpose: the gradients of attention written to be read: the formulas of refimpl/attention.py, one thread a row and head. What
// the tuned kernels are compared with on a device, and what computes head dims that they do not take: any Dqk and Dv.
//
// Launch, in this order:
//   delta    one thread a (query row, head), heads inside, blocks of 128: ceil(rows_q * heads_q / 128)
//   dq       the same
//   dk_dv    one thread a (row of K and V, K/V head), heads inside, blocks of 128: ceil(rows_k * heads_kv / 128)
//
// delta [heads_q, rows_q] float is rowsum(dout * out). dq has the type of q; dk and dv are float, because they are summed over
// steps and ranks before they are rounded.
//
// clauses: A1 A2 B1 B2 B3 B4 K1 K4 K5 N1 N3
// versions:
//   1  a thread recomputes p from lse, pair by pair, once for each 32 columns of its results. A row of K and V walks over the
//      heads of its group and over the queries that see it in a fixed order, so nothing is added by two threads and a repeated
//      run gives the same bits. Only rows of the own document that are visible are read: nothing that padding holds can
//      reach a result.

#include "attention.cuh"

using namespace thdcp;

constexpr int kThreads = 128;
constexpr int kColumns = 32;  // columns of a result that a thread sums up in one walk

template <typename T>
THDCP_DEVICE float dot(const T* a, const T* b, int count) {
  float sum = 0;
  for (int c = 0; c < count; c++) sum = multiply_add(to_float(a[c]), to_float(b[c]), sum);
  return sum;
}

// The keys that the query of a row sees; none for padding.
THDCP_DEVICE Range keys_of_row(const Step& step, int64 row, Document& document) {
  const int d = document_of(step.cu_q_padded, step.documents, row);
  document = document_at(step, d);
  const int64 i = row - step.cu_q_padded[d];
  return i < document.queries ? document.keys_seen(i) : Range{0, 0};
}

// What one pair of query and key gives: p, and ds = p (dout . v - delta). `i` and `j` count in the document.
template <typename T>
struct Inputs {
  const T* dout;
  const T* q;
  const T* k;
  const T* v;
  const float* lse;
  const float* delta;

  THDCP_DEVICE float weight(const Step& step, int64 row, int64 key_row, int head) const {
    const float score = dot(q + step.at_q(row, head), k + step.at_k(key_row, step.key_head(head)), step.dim_qk);
    return exp2_approx((step.softmax_scale * score - lse[step.at_lse(row, head)]) * kLog2E);
  }
  THDCP_DEVICE float score_gradient(const Step& step, int64 row, int64 key_row, int head, float p) const {
    const float dp = dot(dout + step.at_out(row, head), v + step.at_v(key_row, step.key_head(head)), step.dim_v);
    return p * (dp - delta[step.at_lse(row, head)]);
  }
};

template <typename T>
THDCP_DEVICE void delta_row(const T* dout, const T* out, const Step& step, int64 row, int head, float* delta) {
  Document document;
  const int64 at = step.at_out(row, head);
  const bool sees = !keys_of_row(step, row, document).empty();
  delta[step.at_lse(row, head)] = sees ? dot(dout + at, out + at, step.dim_v) : 0.f;
}

template <typename T>
THDCP_DEVICE void dq_row(const Inputs<T>& in, const Step& step, int64 row, int head, T* dq) {
  Document document;
  const Range seen = keys_of_row(step, row, document);
  for (int column = 0; column < step.dim_qk; column += kColumns) {
    const int count = minimum(kColumns, step.dim_qk - column);
    float sums[kColumns] = {};
    for (int j = seen.first; j < seen.last; j++) {
      const int64 key_row = document.k_row + j;
      const float p = in.weight(step, row, key_row, head);
      const float ds = in.score_gradient(step, row, key_row, head, p);
      const T* k_row = in.k + step.at_k(key_row, step.key_head(head)) + column;
#pragma unroll
      for (int c = 0; c < kColumns; c++)
        if (c < count) sums[c] = multiply_add(ds, to_float(k_row[c]), sums[c]);
    }
    T* dq_row = dq + step.at_q(row, head) + column;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
      if (c < count) dq_row[c] = from_float<T>(step.softmax_scale * sums[c]);
  }
}

template <typename T>
THDCP_DEVICE void dk_dv_row(const Inputs<T>& in, const Step& step, int64 key_row, int head_kv, float* dk, float* dv) {
  const int d = document_of(step.cu_kv_padded, step.documents, key_row);
  const Document document = document_at(step, d);
  const int64 j = key_row - step.cu_kv_padded[d];
  const Range seeing = j < document.keys ? document.queries_seeing(j) : Range{0, 0};
  const int first_head = head_kv * step.group();
  for (int column = 0; column < maximum(step.dim_qk, step.dim_v); column += kColumns) {
    const int count_k = minimum(kColumns, step.dim_qk - column), count_v = minimum(kColumns, step.dim_v - column);
    float k_sums[kColumns] = {}, v_sums[kColumns] = {};
    for (int head = first_head; head < first_head + step.group(); head++)
      for (int i = seeing.first; i < seeing.last; i++) {
        const int64 row = document.q_row + i;
        const float p = in.weight(step, row, key_row, head);
        const float ds = in.score_gradient(step, row, key_row, head, p);
        const T* q_row = in.q + step.at_q(row, head) + column;
        const T* dout_row = in.dout + step.at_out(row, head) + column;
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          if (c < count_k) k_sums[c] = multiply_add(ds, to_float(q_row[c]), k_sums[c]);
          if (c < count_v) v_sums[c] = multiply_add(p, to_float(dout_row[c]), v_sums[c]);
        }
      }
    float* dk_row = dk + step.at_k(key_row, head_kv) + column;
    float* dv_row = dv + step.at_v(key_row, head_kv) + column;
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      if (c < count_k) dk_row[c] = step.softmax_scale * k_sums[c];
      if (c < count_v) dv_row[c] = v_sums[c];
    }
  }
}

#define ATTENTION_BACKWARD_PLAIN(suffix, T)                                                                              \
  THDCP_KERNEL(delta_plain_##suffix, kThreads, 1, const T* dout, const T* out, THDCP_STEP_PARAMETERS, float* delta) {    \
    const Step step = THDCP_STEP;                                                                                        \
    const int64 i = int64(blockIdx.x) * kThreads + threadIdx.x;                                                          \
    if (i < rows_q * heads_q) delta_row(dout, out, step, i / heads_q, int(i % heads_q), delta);                          \
  }                                                                                                                      \
  THDCP_KERNEL(dq_plain_##suffix, kThreads, 1, const T* dout, const T* q, const T* k, const T* v, const float* lse,      \
               const float* delta, THDCP_STEP_PARAMETERS, T* dq) {                                                       \
    const Step step = THDCP_STEP;                                                                                        \
    const int64 i = int64(blockIdx.x) * kThreads + threadIdx.x;                                                          \
    const Inputs<T> in = {dout, q, k, v, lse, delta};                                                                    \
    if (i < rows_q * heads_q) dq_row(in, step, i / heads_q, int(i % heads_q), dq);                                       \
  }                                                                                                                      \
  THDCP_KERNEL(dk_dv_plain_##suffix, kThreads, 1, const T* dout, const T* q, const T* k, const T* v, const float* lse,   \
               const float* delta, THDCP_STEP_PARAMETERS, float* dk, float* dv) {                                        \
    const Step step = THDCP_STEP;                                                                                        \
    const int64 i = int64(blockIdx.x) * kThreads + threadIdx.x;                                                          \
    const Inputs<T> in = {dout, q, k, v, lse, delta};                                                                    \
    if (i < rows_k * heads_kv) dk_dv_row(in, step, i / heads_kv, int(i % heads_kv), dk, dv);                             \
  }
ATTENTION_BACKWARD_PLAIN(float32, float)
ATTENTION_BACKWARD_PLAIN(bfloat16, bf16)
ATTENTION_BACKWARD_PLAIN(float16, fp16)
