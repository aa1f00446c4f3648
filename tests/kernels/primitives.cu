// Purpose: every primitive once, so that tests can compare it with a formula of their own. Launch: one warp, unless a kernel
// says otherwise.

#include "primitives.cuh"

using namespace thdcp;

THDCP_KERNEL(from_floats, 32, 1, const float* x, bf16* brain, fp16* half, uint32* brain_pair, uint32* half_pair, int count) {
  for (int i = thread_id(); i < count; i += blockDim.x) {
    brain[i] = from_float<bf16>(x[i]);
    half[i] = from_float<fp16>(x[i]);
    brain_pair[i] = pack<bf16>(x[i], -x[i]);
    half_pair[i] = pack<fp16>(x[i], -x[i]);
  }
}

THDCP_KERNEL(to_floats, 32, 1, const uint16* bits, float* brain, float* half, float* brain_high, float* half_high, int count) {
  for (int i = thread_id(); i < count; i += blockDim.x) {
    brain[i] = to_float(bf16{bits[i]});
    half[i] = to_float(fp16{bits[i]});
    brain_high[i] = unpack_high<bf16>(uint32(bits[i]) << 16) - unpack_low<bf16>(uint32(bits[i]) << 16);
    half_high[i] = unpack_high<fp16>(uint32(bits[i]) << 16);
  }
}

THDCP_KERNEL(arithmetic, 32, 1, const float* x, float* exponential, float* logarithm, float* special) {
  const int i = thread_id();
  exponential[i] = exp2_approx(x[i]);
  logarithm[i] = log2_approx(x[i]);
  special[0] = negative_infinity();
  special[1] = is_negative_infinity(negative_infinity()) && !is_negative_infinity(-3e38f) ? 1.f : 0.f;
  special[2] = exp2_approx(negative_infinity());
  special[3] = multiply_add(3.f, 4.f, 5.f) + minimum(1.f, 2.f) * 100.f + maximum(1.f, 2.f) * 1000.f;
}

// 64 threads: two warps, of a block of 8 x 4 x 2.
THDCP_KERNEL(shuffles, 64, 1, const int64* x, int64* indexed, int64* crossed, int64* up, int64* down, uint32* votes,
             float* floats, int operand) {
  const int i = thread_id(), lane = lane_id();
  indexed[i] = shuffle(kFullWarp, x[i], lane * operand);
  crossed[i] = shuffle_xor(kFullWarp, x[i], operand);
  up[i] = shuffle_up(kFullWarp, x[i], operand);
  down[i] = shuffle_down(kFullWarp, x[i], operand);
  votes[i] = ballot(kFullWarp, x[i] % 3 == 0) + (warp_id() == i / 32 ? 0 : 1);
  // Half warps by themselves, each lane with its neighbour's neighbour.
  const uint32 half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  floats[i] = shuffle_xor(half, float(x[i]), 2);
}

THDCP_KERNEL(load_matrices, 32, 1, const uint16* matrices, const int* rows, uint32* straight, uint32* transposed,
             uint32* straight_pair, uint32* transposed_pair) {
  THDCP_SHARED(Vec16, shared);
  const int lane = lane_id();
  for (int i = lane; i < 64; i += 32) store16(shared + i, load16(matrices + i * 8));
  warp_barrier();
  const Vec16* row = shared + rows[lane];
  uint32 r[4];
  ldmatrix_x4(r[0], r[1], r[2], r[3], row);
  for (int i = 0; i < 4; i++) straight[lane * 4 + i] = r[i];
  ldmatrix_x4_trans(r[0], r[1], r[2], r[3], row);
  for (int i = 0; i < 4; i++) transposed[lane * 4 + i] = r[i];
  ldmatrix_x2(r[0], r[1], row);
  for (int i = 0; i < 2; i++) straight_pair[lane * 2 + i] = r[i];
  ldmatrix_x2_trans(r[0], r[1], row);
  for (int i = 0; i < 2; i++) transposed_pair[lane * 2 + i] = r[i];
}

template <typename T>
THDCP_DEVICE void multiply(const uint32* a, const uint32* b, float* c) {
  const int lane = lane_id();
  const uint32 mine[4] = {a[lane * 4], a[lane * 4 + 1], a[lane * 4 + 2], a[lane * 4 + 3]};
  float sums[4];
  for (int i = 0; i < 4; i++) sums[i] = c[lane * 4 + i];
  mma_m16n8k16<T>(sums, mine, b[lane * 2], b[lane * 2 + 1]);
  for (int i = 0; i < 4; i++) c[lane * 4 + i] = sums[i];
}
THDCP_KERNEL(multiply_bf16, 32, 1, const uint32* a, const uint32* b, float* c) { multiply<bf16>(a, b, c); }
THDCP_KERNEL(multiply_fp16, 32, 1, const uint32* a, const uint32* b, float* c) { multiply<fp16>(a, b, c); }

// y = x, through two stages of shared memory; elements from `valid` on are zero. Two arrays are carved, so that the second
// stage has its own gaps.
THDCP_KERNEL(staged_copy, 64, 1, const Vec16* x, Vec16* y, int tiles, int valid) {
  SharedCarver carver;
  Vec16* even = carver.take<Vec16>(64, "even");
  Vec16* odd = carver.take<Vec16>(64, "odd");
  const int i = thread_id();
  cp_async_16(even + i, x + i, i < valid);
  cp_async_commit();
  for (int tile = 0; tile < tiles; tile++) {
    const int next = (tile + 1) * 64 + i;
    if (tile + 1 < tiles) cp_async_16((tile % 2 == 0 ? odd : even) + i, x + next, next < valid);
    cp_async_commit();
    cp_async_wait<1>();
    barrier();
    store16(y + tile * 64 + i, load16((tile % 2 == 0 ? even : odd) + (63 - i)));
    barrier();
  }
}

// The grid and block that a launch has, and static arrays of two instantiations.
template <int kWhich>
THDCP_DEVICE int reversed_thread(int value) {
  THDCP_SHARED_ARRAY(int, mailbox, 64);
  mailbox[thread_id()] = value + kWhich;
  barrier();
  return mailbox[63 - thread_id()];
}
THDCP_KERNEL(indices, 64, 1, int* out) {
  const int block = int(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  const int one = reversed_thread<100>(thread_id());
  const int two = reversed_thread<200>(thread_id());
  out[block * 64 + thread_id()] = block * 10000 + (two - one) * 64 + (one - 100);
}
