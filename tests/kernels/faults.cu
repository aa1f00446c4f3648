// Purpose: what no kernel may do, each fault a kernel, so that tests can see it found. Launch: 64 threads, 1 KB of dynamic
// shared memory, `out` of 64 ints.

#include "primitives.cuh"

using namespace thdcp;

THDCP_KERNEL(early_return, 64, 1, int* out) {
  if (thread_id() == 40) return;
  barrier();
  out[thread_id()] = 1;
}

THDCP_KERNEL(divergent_barrier, 64, 1, int* out) {
  if (thread_id() < 32)
    barrier();
  else
    barrier();
  out[thread_id()] = 1;
}

THDCP_KERNEL(lane_not_named, 64, 1, int* out) { out[thread_id()] = int(ballot(0x7fffffffu, true)); }

THDCP_KERNEL(lane_missing, 64, 1, int* out) {
  if (lane_id() != 5) out[thread_id()] = shuffle(kFullWarp, 1, 0);
}

THDCP_KERNEL(reads_unnamed_lane, 64, 1, int* out) {
  if (lane_id() < 16) out[thread_id()] = shuffle(0xffffu, 1, 16);
}

THDCP_KERNEL(divergent_collective, 64, 1, int* out) {
  if (lane_id() % 2 == 0)
    out[thread_id()] = shuffle(kFullWarp, 1, 0);
  else
    out[thread_id()] = shuffle(kFullWarp, 2, 0);
}

THDCP_KERNEL(barrier_against_collective, 64, 1, int* out) {
  if (lane_id() == 0)
    barrier();
  else
    warp_barrier();
  out[thread_id()] = 1;
}

THDCP_KERNEL(past_static, 64, 1, int* out) {
  THDCP_SHARED_ARRAY(int, table, 63);
  table[thread_id()] = out[thread_id()];
}

THDCP_KERNEL(before_carved, 64, 1, int* out) {
  SharedCarver carver;
  int* first = carver.take<int>(64, "first");
  int* second = carver.take<int>(64, "second");
  first[thread_id()] = out[0];
  second[thread_id() - 1] = out[0];
}

THDCP_KERNEL(too_little_shared, 64, 1, int* out) {
  SharedCarver carver;
  carver.take<int>(64, "first");
  out[thread_id()] = *carver.take<int>(193, "second");
}

THDCP_KERNEL(misaligned, 64, 1, int* out) { store16(out + 1, Vec16{}); }

THDCP_KERNEL(copy_to_global, 64, 1, int* out) { cp_async_16(out, out); }

THDCP_KERNEL(row_outside, 64, 1, int* out) {
  uint32 r[4];
  ldmatrix_x4(r[0], r[1], r[2], r[3], out);
}

THDCP_KERNEL(null_pointer, 64, 1, int* out) { *static_cast<volatile int*>(out) = 1; }

THDCP_KERNEL(endless_recursion, 64, 1, volatile int* out) {
  volatile char room[300000];
  for (int i = 299999; i >= 0; i -= 1000) room[i] = char(out[0]);
}

// Races, which orders of threads show: each reverses `out` through shared memory.

THDCP_KERNEL(correct_exchange, 64, 1, int* out) {
  THDCP_SHARED(int, shared);
  for (int round = 0; round < 3; round++) {
    shared[thread_id()] = out[thread_id()];
    barrier();
    out[thread_id()] = shared[63 - thread_id()];
    barrier();
  }
}

THDCP_KERNEL(read_too_early, 64, 1, int* out) {
  THDCP_SHARED(int, shared);
  for (int round = 0; round < 3; round++) {
    shared[thread_id()] = out[thread_id()];
    out[thread_id()] = shared[63 - thread_id()];
    barrier();
  }
}

THDCP_KERNEL(reused_too_early, 64, 1, int* out) {
  THDCP_SHARED(int, shared);
  for (int round = 0; round < 3; round++) {
    shared[thread_id()] = out[thread_id()];
    barrier();
    out[thread_id()] = shared[63 - thread_id()];
  }
}

// The copy of each thread is waited for by itself, but nothing makes the others wait.
THDCP_KERNEL(copy_without_barrier, 64, 1, const Vec16* x, Vec16* y) {
  THDCP_SHARED(Vec16, shared);
  cp_async_16(shared + thread_id(), x + thread_id());
  cp_async_commit();
  cp_async_wait<0>();
  store16(y + thread_id(), load16(shared + 63 - thread_id()));
}

THDCP_KERNEL(copy_waited_for_too_little, 64, 1, const Vec16* x, Vec16* y) {
  THDCP_SHARED(Vec16, shared);
  cp_async_16(shared + thread_id(), x + thread_id());
  cp_async_commit();
  cp_async_wait<1>();
  barrier();
  store16(y + thread_id(), load16(shared + 63 - thread_id()));
}

THDCP_KERNEL(copy_never_committed, 64, 1, const Vec16* x, Vec16* y) {
  THDCP_SHARED(Vec16, shared);
  cp_async_16(shared + thread_id(), x + thread_id());
  cp_async_wait<0>();
  barrier();
  store16(y + thread_id(), load16(shared + 63 - thread_id()));
}

// Two blocks that write one element.
THDCP_KERNEL(blocks_collide, 64, 1, int* out) { out[thread_id()] = int(blockIdx.x); }

THDCP_KERNEL(past_local, 64, 1, int* out) {
  int local[4];
  for (int i = 0; i < 4; i++) local[i] = out[i];
  out[thread_id()] = local[out[63] + thread_id() % 4];
}

// Reads one element past its end; a launch gives the length.
THDCP_KERNEL(past_global, 64, 1, int* out, int length) {
  if (thread_id() == 0) out[0] = out[length];
}
