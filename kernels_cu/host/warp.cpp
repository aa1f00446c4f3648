// Purpose: warp collectives. The lanes of a mask meet; the last to come does the work for all, in the lane layouts of the PTX
// ISA ("Matrix fragments for mma.m16n8k16", "ldmatrix").

#include <stdio.h>
#include <string.h>

#include "host/block.h"

#if defined(THDCP_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace thdcp {
namespace host {

void Block::meet(uint32 mask, void* lane, void (*work)(Meeting&), const Place& place, bool orders_memory) {
  Unwatched unwatched;
  const int thread = id(current), my_lane = thread % kWarpSize;
  Warp& warp = warps_[thread / kWarpSize];
  const size_t lanes = threads_.size() - size_t(thread / kWarpSize) * kWarpSize;
  const uint32 existing = lanes >= kWarpSize ? kFullWarp : (1u << lanes) - 1;
  const uint32 bit = 1u << my_lane;
  if ((mask & bit) == 0) host::fail(place, "lane %d calls it with mask 0x%08x, which does not name it", my_lane, mask);
  if (mask & ~existing) host::fail(place, "mask 0x%08x names lanes that the warp does not have (0x%08x)", mask, existing);
  if (mask & warp.finished)
    host::fail(place, "mask 0x%08x names lanes that left the kernel (0x%08x)", mask, mask & warp.finished);
  size_t found = warp.meetings.size();
  for (size_t i = 0; i < warp.meetings.size(); i++) {
    const Meeting& meeting = warp.meetings[i];
    if (meeting.mask == mask && same_place(meeting.place, place)) {
      found = i;
    } else if (meeting.arrived & mask) {
      host::fail(place, "mask 0x%08x names lanes 0x%08x, which wait in %s at line %d with mask 0x%08x", mask,
                 meeting.arrived & mask, meeting.place.what, meeting.place.line, meeting.mask);
    }
  }
  if (found == warp.meetings.size()) {
    warp.meetings.push_back({mask, 0, place, {}, warp.next_token});
    warp.next_token = (warp.next_token + 1) % int(sizeof warp.tokens);
  }
  Meeting& meeting = warp.meetings[found];
  meeting.arrived |= bit;
  meeting.lanes[my_lane] = lane;
#if defined(THDCP_TSAN)
  char* token = &warp.tokens[meeting.token];
  if (orders_memory) __tsan_release(token);
#else
  (void)orders_memory;
#endif
  if (meeting.arrived == mask) {
    Meeting complete = meeting;
    warp.meetings.erase(warp.meetings.begin() + found);
    work(complete);
    const int first = thread - my_lane;
    for (uint32 others = mask & ~bit; others != 0; others &= others - 1) make_ready(first + __builtin_ctz(others));
    wait(State::ready, place);
  } else {
    wait(State::in_collective, place);
  }
#if defined(THDCP_TSAN)
  if (orders_memory) __tsan_acquire(token);
#endif
}

void warp_barrier(uint32 mask, const Place& place) {
  running->meet(mask, nullptr, [](Meeting&) {}, place, true);
}

struct ShuffleLane {
  Shuffle kind;
  uint64 value, result;
  int source;  // -1: its own value
};

static void do_shuffle(Meeting& meeting) {
  for (int lane = 0; lane < kWarpSize; lane++) {
    ShuffleLane* mine = static_cast<ShuffleLane*>(meeting.lanes[lane]);
    if (mine != nullptr) mine->result = static_cast<ShuffleLane*>(meeting.lanes[mine->source])->value;
  }
}

uint64 shuffle(Shuffle kind, uint32 mask, uint64 value, int operand, const Place& place) {
  const int lane = lane_id();
  int source = lane;
  if (kind == Shuffle::index) source = operand & (kWarpSize - 1);
  if (kind == Shuffle::exclusive_or) source = lane ^ (operand & (kWarpSize - 1));
  if (kind == Shuffle::up && lane - operand >= 0) source = lane - operand;
  if (kind == Shuffle::down && lane + operand < kWarpSize) source = lane + operand;
  if ((mask >> source & 1u) == 0) fail(place, "reads lane %d, which mask 0x%08x does not name", source, mask);
  ShuffleLane mine = {kind, value, 0, source};
  running->meet(mask, &mine, do_shuffle, place, false);
  return mine.result;
}

struct BallotLane {
  bool predicate;
  uint32 result;
};

static void do_ballot(Meeting& meeting) {
  uint32 votes = 0;
  for (int lane = 0; lane < kWarpSize; lane++) {
    const BallotLane* mine = static_cast<BallotLane*>(meeting.lanes[lane]);
    if (mine != nullptr && mine->predicate) votes |= 1u << lane;
  }
  for (int lane = 0; lane < kWarpSize; lane++)
    if (meeting.lanes[lane] != nullptr) static_cast<BallotLane*>(meeting.lanes[lane])->result = votes;
}

uint32 ballot(uint32 mask, bool predicate, const Place& place) {
  BallotLane mine = {predicate, 0};
  running->meet(mask, &mine, do_ballot, place, false);
  return mine.result;
}

struct MatrixLane {
  uint32* registers;
  int count;
  bool transpose;
  const void* row;
  uint32 words[4];
};

// Passes over shared memory beyond the first that eight rows of 16 bytes cost: rows that share banks but not the address.
static int conflicts(void* const* lanes) {
  int passes[8] = {};
  for (int i = 0; i < 8; i++) {
    const uintptr_t row = reinterpret_cast<uintptr_t>(static_cast<MatrixLane*>(lanes[i])->row);
    bool seen = false;
    for (int j = 0; j < i; j++) seen |= reinterpret_cast<uintptr_t>(static_cast<MatrixLane*>(lanes[j])->row) == row;
    if (!seen) passes[row / 16 % 8]++;
  }
  int most = 1;
  for (int count : passes) most = maximum(most, count);
  return most - 1;
}

static void do_ldmatrix(Meeting& meeting) {
  const MatrixLane* first = static_cast<MatrixLane*>(meeting.lanes[0]);
  int extra = 0;
  for (int matrix = 0; matrix < first->count; matrix++) {
    uint16 elements[8][8];
    for (int row = 0; row < 8; row++)
      memcpy(elements[row], static_cast<MatrixLane*>(meeting.lanes[matrix * 8 + row])->words, 16);
    for (int lane = 0; lane < kWarpSize; lane++) {
      const int i = lane / 4, j = lane % 4 * 2;
      const uint32 low = first->transpose ? elements[j][i] : elements[i][j];
      const uint32 high = first->transpose ? elements[j + 1][i] : elements[i][j + 1];
      static_cast<MatrixLane*>(meeting.lanes[lane])->registers[matrix] = low | high << 16;
    }
    extra += conflicts(meeting.lanes + matrix * 8);
  }
  __atomic_fetch_add(&running->launch.matrix_loads, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&running->launch.bank_conflicts, uint64_t(extra), __ATOMIC_RELAXED);
}

void ldmatrix(uint32* registers, int count, bool transpose, const void* row, const uint32* row_words, const Place& place) {
  MatrixLane mine = {registers, count, transpose, row, {}};
  memcpy(mine.words, row_words, sizeof mine.words);
  running->meet(kFullWarp, &mine, do_ldmatrix, place, false);
}

struct ProductLane {
  float* c;
  const uint32* a;
  const uint32* b;
};

// Row and column of element `i` of a lane in each fragment.
static int a_row(int lane, int i) { return lane / 4 + (i / 2 % 2) * 8; }
static int a_column(int lane, int i) { return lane % 4 * 2 + i % 2 + (i / 4) * 8; }
static int b_row(int lane, int i) { return lane % 4 * 2 + i % 2 + (i / 2) * 8; }
static int b_column(int lane, int) { return lane / 4; }
static int c_row(int lane, int i) { return lane / 4 + (i / 2) * 8; }
static int c_column(int lane, int i) { return lane % 4 * 2 + i % 2; }

// Products of two 16-bit floats are exact in float, so multiply and add is a fused one. A GPU may add in another order.
template <typename T>
static void do_mma(Meeting& meeting) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarpSize; lane++) {
    const ProductLane* mine = static_cast<ProductLane*>(meeting.lanes[lane]);
    for (int i = 0; i < 8; i++)
      a[a_row(lane, i)][a_column(lane, i)] = to_float(T{uint16(mine->a[i / 2] >> i % 2 * 16)});
    for (int i = 0; i < 4; i++)
      b[b_row(lane, i)][b_column(lane, i)] = to_float(T{uint16(mine->b[i / 2] >> i % 2 * 16)});
  }
  float sum[16][8] = {};
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) sum[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < kWarpSize; lane++) {
    const ProductLane* mine = static_cast<ProductLane*>(meeting.lanes[lane]);
    for (int i = 0; i < 4; i++) mine->c[i] += sum[c_row(lane, i)][c_column(lane, i)];
  }
  __atomic_fetch_add(&running->launch.matrix_products, 1, __ATOMIC_RELAXED);
}

void mma(float* c, const uint32* a, const uint32* b, bool brain, const Place& place) {
  ProductLane mine = {c, a, b};
  running->meet(kFullWarp, &mine, brain ? do_mma<bf16> : do_mma<fp16>, place, false);
}

}  // namespace host
}  // namespace thdcp
