// Purpose: one block of a launch as the shim runs it: its threads, which of them goes next, where they wait, its shared
// memory. Private to the shim; kernels see shim.h.

#pragma once

#include <setjmp.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "primitives.cuh"

#include "host/fiber.h"

namespace thdcp {
namespace host {

// Which ready thread goes next.
//   in_order  the lowest, until it waits
//   reverse   the highest, until it waits
//   random    any, and others may come in between at every primitive
//   priority  the one of the highest priority; priorities are drawn, and the running thread drops to the lowest now and then.
//             So some threads run far ahead while others lag: the order that reuses a buffer too early.
enum class Schedule { in_order, reverse, random, priority };
// When an asynchronous copy is done: at once, only when waited for, or at a random moment between.
enum class Completion { eager, lazy, random };

constexpr size_t kSharedLimit = 232448;  // 227 KB: what a block can have on sm_90 and sm_100.
constexpr size_t kStackStride = 260 * 1024;  // A stack, and a page below it that faults.
constexpr int kMaxThreads = 1024;

// What a caller asks for and gets back; read and written by ctypes (cupy_backend/host.py).
struct Launch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  int32_t schedule;
  int32_t completion;
  int32_t os_threads;
  uint64_t seed;
  uint64_t barriers;        // passed, over all blocks
  uint64_t matrix_loads;    // ldmatrix, counted a warp
  uint64_t bank_conflicts;  // extra passes over shared memory that they cost
  uint64_t matrix_products;
};

// xorshift64*: small, and the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed);
  uint32_t below(uint32_t bound);

 private:
  uint64_t state_;
};

enum class State { ready, at_barrier, in_collective, finished };

struct PendingCopy {
  Copy copy;
  int64 group;
};

struct Thread {
  Fiber fiber;
  ThdcpIndex index;
  State state;
  Place place;  // where it waits
  uint32_t priority;
  int64 group;  // asynchronous copies: the group that is open
  std::vector<PendingCopy> copies;
};

// A warp collective that some of its lanes have reached. `lanes` point at what each hands in, on its own stack.
struct Meeting {
  uint32 mask;
  uint32 arrived;
  Place place;
  void* lanes[kWarpSize];
  int token;
};

struct Warp {
  std::vector<Meeting> meetings;
  uint32 finished;    // lanes
  int next_token;
  char tokens[64];    // addresses for TSan; a warp has at most 32 meetings open
};

// A shared array. Behind and before it lie gaps with a pattern that must be there still when the block ends.
struct Region {
  const void* tag;
  const char* name;
  char* start;
  size_t bytes;
};

// What the shim does for a thread is not what the thread does: while one of these lives, TSan does not see the calls of
// memcpy and the like.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
};

class Block {
 public:
  Block(Launch& launch, void (*kernel)(void**), void** arguments);
  // Run block `index` to its end. False: `message()` says what went wrong.
  bool run(const ThdcpIndex& index);
  const std::string& message() const { return message_; }

  [[noreturn]] void fail(const Place& place, const char* text);
  void wait(State state, const Place& place);
  void yield();
  void barrier(const Place& place);
  void meet(uint32 mask, void* lane, void (*work)(Meeting&), const Place& place, bool orders_memory);
  void* static_shared(const void* tag, size_t bytes, const char* name);
  void* dynamic_shared(const char* name);
  void* carve_shared(size_t nth, size_t offset, size_t bytes, const char* name);
  bool in_shared(const void* address, size_t bytes) const;
  // From a signal handler: the running thread touched memory that is not there.
  [[noreturn]] void fault(const void* address);

  Launch& launch;
  Random random;
  Thread* current = nullptr;

 private:
  static void thread_entry();
  void finish();
  void tell_launch();
  bool dispatch(Fiber& from, bool last);
  int choose();
  void make_ready(int thread);
  void release_barrier();
  std::string nobody_ready() const;
  int id(const Thread* thread) const { return int(thread - threads_.data()); }
  Region& add_region(const void* tag, size_t bytes, const char* name);
  bool check_gaps();

  void (*kernel_)(void**);
  void** arguments_;
  ThdcpIndex block_ = {};
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  uint64_t ready_[kMaxThreads / 64] = {};
  Fiber scheduler_;
  Mapping stacks_;
  int alive_ = 0;
  int at_barrier_ = 0;
  int exited_ = 0;
  Place barrier_place_ = {};
  uint32_t lowest_priority_ = 0;
  uint64_t generation_ = 0;
  char barrier_tokens_[2] = {};
  Mapping shared_;
  size_t shared_used_ = 0, static_bytes_ = 0;
  bool whole_taken_ = false, carved_ = false;
  std::vector<Region> regions_;
  std::vector<size_t> carved_regions_;
  bool failed_ = false;
  std::string message_;
  sigjmp_buf escape_;
};

bool same_place(const Place& a, const Place& b);

// The block that this OS thread runs.
extern __thread Block* running;

}  // namespace host
}  // namespace thdcp
