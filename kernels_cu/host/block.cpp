// Purpose: how a block runs: who goes next, barriers, shared memory. See block.h.

#include "host/block.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#if defined(THDCP_ASAN)
#include <sanitizer/asan_interface.h>
#elif defined(THDCP_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

__thread ThdcpIndex threadIdx, blockIdx, blockDim, gridDim;

#if defined(THDCP_TSAN)
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace thdcp {
namespace host {

Unwatched::Unwatched() {
#if defined(THDCP_TSAN)
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}
Unwatched::~Unwatched() {
#if defined(THDCP_TSAN)
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
}

__thread Block* running = nullptr;

constexpr size_t kGap = 256;
constexpr unsigned char kGapByte = 0xa5;
constexpr unsigned char kFreshByte = 0xff;  // Shared memory that nobody wrote is NaN in every float type, and -1.
constexpr size_t kPage = 4096;

Random::Random(uint64_t seed) : state_((seed + 1) * 0x9e3779b97f4a7c15u) {
  if (state_ == 0) state_ = 1;
  for (int i = 0; i < 8; i++) below(2);
}

uint32_t Random::below(uint32_t bound) {
  state_ ^= state_ >> 12;
  state_ ^= state_ << 25;
  state_ ^= state_ >> 27;
  return uint32_t((state_ * 0x2545f4914f6cdd1du >> 32) * bound >> 32);
}

static std::string format_list(const char* format, va_list list) {
  char text[600];
  vsnprintf(text, sizeof text, format, list);
  return text;
}

__attribute__((format(printf, 1, 2))) static std::string formatted(const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::string text = format_list(format, list);
  va_end(list);
  return text;
}

static std::string described(const ThdcpIndex& i) { return formatted("(%u, %u, %u)", i.x, i.y, i.z); }

static std::string described(const Place& place) {
  if (place.line == 0) return place.what;
  const char* slash = strrchr(place.file, '/');
  return formatted("%s at %s:%d", place.what, slash != nullptr ? slash + 1 : place.file, place.line);
}

bool same_place(const Place& a, const Place& b) {
  return a.line == b.line && (a.what == b.what || strcmp(a.what, b.what) == 0) &&
         (a.file == b.file || strcmp(a.file, b.file) == 0);
}

Block::Block(Launch& launch_, void (*kernel)(void**), void** arguments)
    : launch(launch_), random(launch_.seed), kernel_(kernel), arguments_(arguments) {
  const uint32_t count = launch.block[0] * launch.block[1] * launch.block[2];
  threads_.resize(count);
  warps_.resize((count + kWarpSize - 1) / kWarpSize);
}

// Fibers start here; what they run is in `running`, which has not changed since the switch.
void Block::thread_entry() {
  entered();
  running->kernel_(running->arguments_);
  running->finish();
}

bool Block::run(const ThdcpIndex& index) {
  block_ = blockIdx = index;
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  blockDim = {launch.block[0], launch.block[1], launch.block[2]};
  const uint64_t linear = index.x + uint64_t(launch.grid[0]) * (index.y + uint64_t(launch.grid[1]) * index.z);
  random = Random(launch.seed * 0x100000001b3u + linear);
  const int count = int(threads_.size());
  alive_ = count;
  at_barrier_ = exited_ = 0;
  generation_ = 0;
  lowest_priority_ = 1u << 31;
  regions_.clear();
  carved_regions_.clear();
  shared_used_ = static_bytes_ = 0;
  whole_taken_ = carved_ = failed_ = false;
  memset(ready_, 0, sizeof ready_);
  for (Warp& warp : warps_) warp = Warp();
  shared_.acquire(2 * kSharedLimit);
  char* stacks = stacks_.acquire(count * kStackStride);
  running = this;
  adopt(scheduler_);
  for (int i = 0; i < count; i++) {
    Thread& thread = threads_[i];
    // Tops of stacks that lie a power of two apart would share a few sets of the cache: hence the odd stride and the shift.
    thread.fiber.stack = stacks + i * kStackStride + kPage;
    thread.fiber.stack_bytes = kStackStride - kPage - size_t(i) * 9 % 64 * 64;
    if (stacks_.is_new()) mprotect(stacks + i * kStackStride, kPage, PROT_NONE);  // An overflow faults.
    prepare(thread.fiber, thread_entry);
    const uint32_t x = uint32_t(i) % blockDim.x, rest = uint32_t(i) / blockDim.x;
    thread.index = {x, rest % blockDim.y, rest / blockDim.y};
    thread.place = {"start", "", 0};
    thread.priority = (1u << 31) + random.below(1u << 31);
    thread.group = 0;
    thread.copies.clear();
    make_ready(i);
  }
  if (sigsetjmp(escape_, 1) == 0) {
    while (alive_ > 0 && !failed_) {
      if (dispatch(scheduler_, false)) continue;
      message_ = "block " + described(block_) + ": " + nobody_ready();
      failed_ = true;
    }
  }
  current = nullptr;
  running = nullptr;
  for (Thread& thread : threads_) discard(thread.fiber);
#if defined(THDCP_ASAN)
  if (failed_) __asan_unpoison_memory_region(stacks_.start(), stacks_.bytes());
#endif
  return check_gaps() && !failed_;
}

void Block::make_ready(int thread) {
  threads_[thread].state = State::ready;
  ready_[thread / 64] |= uint64_t(1) << thread % 64;
}

// Let the next thread run, from fiber to fiber; false when all wait. `last`: `from` has come to its end.
bool Block::dispatch(Fiber& from, bool last) {
  const int next = choose();
  if (next < 0) return false;
  Thread& thread = threads_[next];
  ready_[next / 64] &= ~(uint64_t(1) << next % 64);
  if (&thread.fiber == &from) return true;
  current = &thread;
  threadIdx = thread.index;
  switch_fiber(from, thread.fiber, last);
  return true;
}

// The next thread to run, or -1 when all wait.
int Block::choose() {
  const int words = int(threads_.size() + 63) / 64;
  const auto first_from = [&](int start) {
    for (int i = 0, word = start / 64; i <= words; i++, word = (word + 1) % words) {
      uint64_t bits = ready_[word];
      if (i == 0) bits &= ~uint64_t(0) << start % 64;
      if (bits != 0) return word * 64 + __builtin_ctzll(bits);
    }
    return -1;
  };
  switch (Schedule(launch.schedule)) {
    case Schedule::in_order:
      return first_from(0);
    case Schedule::reverse:
      for (int word = words - 1; word >= 0; word--)
        if (ready_[word] != 0) return word * 64 + 63 - __builtin_clzll(ready_[word]);
      return -1;
    case Schedule::random:
      return first_from(int(random.below(uint32_t(threads_.size()))));
    case Schedule::priority:
      break;
  }
  int best = -1;
  for (int word = 0; word < words; word++)
    for (uint64_t bits = ready_[word]; bits != 0; bits &= bits - 1) {
      const int i = word * 64 + __builtin_ctzll(bits);
      if (best < 0 || threads_[i].priority > threads_[best].priority) best = i;
    }
  return best;
}

void Block::wait(State state, const Place& place) {
  Thread* me = current;
  me->place = place;
  if (state == State::ready)
    make_ready(id(me));
  else
    me->state = state;
  if (!dispatch(me->fiber, false)) switch_fiber(me->fiber, scheduler_, false);
}

void Block::yield() {
  if (launch.schedule == int32_t(Schedule::random)) {
    if (random.below(4) != 0) return;
  } else if (launch.schedule == int32_t(Schedule::priority)) {
    if (random.below(16) != 0) return;
    current->priority = --lowest_priority_;
  } else {
    return;
  }
  wait(State::ready, current->place);
}

void Block::fail(const Place& place, const char* text) {
  message_ = "block " + described(block_) + " thread " + described(current->index) + ": " + described(place) + ": " + text;
  failed_ = true;
  tell_launch();
  Thread* me = current;
  me->state = State::finished;
  for (;;) switch_fiber(me->fiber, scheduler_, false);
}

void Block::fault(const void* address) {
  message_ = "block " + described(block_) + " thread " + described(current->index) +
             formatted(": touched address %p, which is not mapped (past an array, or the stack overflowed)", address);
  failed_ = true;
  siglongjmp(escape_, 1);
}

// What a thread did is known behind the launch; not in the blocks that come after this one, which must not rely on it.
void Block::tell_launch() {
#if defined(THDCP_TSAN)
  __tsan_release(&launch);
#endif
}

// The running thread returned from the kernel.
void Block::finish() {
  Thread* me = current;
  if (at_barrier_ > 0)
    fail({"return", "", 0}, formatted("left the kernel while %d threads of the block wait in %s", at_barrier_,
                                      described(barrier_place_).c_str()).c_str());
  Warp& warp = warps_[id(me) / kWarpSize];
  const uint32 bit = 1u << id(me) % kWarpSize;
  for (const Meeting& meeting : warp.meetings)
    if (meeting.mask & bit)
      fail({"return", "", 0}, formatted("left the kernel while lanes 0x%08x wait for it in %s (mask 0x%08x)", meeting.arrived,
                                        described(meeting.place).c_str(), meeting.mask).c_str());
  warp.finished |= bit;
  me->state = State::finished;
  alive_--;
  exited_++;
  tell_launch();
  if (!dispatch(me->fiber, true)) switch_fiber(me->fiber, scheduler_, true);
}

void Block::barrier(const Place& place) {
  if (exited_ > 0)
    fail(place, formatted("%d threads of the block left the kernel and will never come here", exited_).c_str());
  if (at_barrier_ > 0 && !same_place(place, barrier_place_))
    fail(place, formatted("%d threads of the block wait in another one, %s", at_barrier_,
                          described(barrier_place_).c_str()).c_str());
  barrier_place_ = place;
  at_barrier_++;
#if defined(THDCP_TSAN)
  // Two tokens in turn: what a fast thread does behind the next barrier must not reach a slow one at this one.
  char* token = &barrier_tokens_[generation_ % 2];
  __tsan_release(token);
#endif
  if (at_barrier_ == alive_) {
    for (size_t i = 0; i < threads_.size(); i++)
      if (threads_[i].state == State::at_barrier) make_ready(int(i));
    at_barrier_ = 0;
    generation_++;
    __atomic_fetch_add(&launch.barriers, 1, __ATOMIC_RELAXED);
    wait(State::ready, place);
  } else {
    wait(State::at_barrier, place);
  }
#if defined(THDCP_TSAN)
  __tsan_acquire(token);
#endif
}

std::string Block::nobody_ready() const {
  std::string text = "no thread can go on";
  Place told = {"", "", 0};
  int listed = 0;
  for (const Thread& thread : threads_) {
    if (thread.state == State::finished || same_place(thread.place, told)) continue;
    if (++listed > 4) return text + "; ...";
    told = thread.place;
    text += (listed == 1 ? ": thread " : "; thread ") + described(thread.index) + " waits in " + described(thread.place);
  }
  return text;
}

Region& Block::add_region(const void* tag, size_t bytes, const char* name) {
  char* start = shared_.start() + shared_used_ + kGap;
  shared_used_ += kGap + (bytes + 127) / 128 * 128;
  char* before = start - kGap;
  char* end = shared_.start() + shared_used_ + kGap;
#if defined(THDCP_ASAN)
  __asan_unpoison_memory_region(before, end - before);
#endif
  memset(before, kGapByte, end - before);
  memset(start, kFreshByte, bytes);
#if defined(THDCP_ASAN)
  __asan_poison_memory_region(before, kGap);
  __asan_poison_memory_region(start + bytes, end - start - bytes);
#endif
  regions_.push_back({tag, name, start, bytes});
  return regions_.back();
}

void* Block::static_shared(const void* tag, size_t bytes, const char* name) {
  for (const Region& region : regions_)
    if (region.tag == tag) return region.start;
  static_bytes_ += (bytes + 15) / 16 * 16;
  if (static_bytes_ + launch.shared_bytes > kSharedLimit)
    fail({"THDCP_SHARED_ARRAY", "", 0},
         formatted("'%s' takes the block to %zu bytes of shared memory; a GPU has %zu", name,
                   static_bytes_ + launch.shared_bytes, kSharedLimit).c_str());
  return add_region(tag, bytes, name).start;
}

void* Block::dynamic_shared(const char* name) {
  if (carved_)
    fail({"THDCP_SHARED", "", 0}, formatted("'%s' is what a SharedCarver gave out already", name).c_str());
  for (const Region& region : regions_)
    if (region.tag == this) return region.start;
  whole_taken_ = true;
  return add_region(this, launch.shared_bytes, name).start;
}

void* Block::carve_shared(size_t nth, size_t offset, size_t bytes, const char* name) {
  const Place place = {"SharedCarver", "", 0};
  if (whole_taken_) fail(place, formatted("'%s' is part of what THDCP_SHARED gave out already", name).c_str());
  carved_ = true;
  if (offset + bytes > launch.shared_bytes)
    fail(place, formatted("'%s' ends at byte %zu, but the launch gave %u bytes of dynamic shared memory", name,
                          offset + bytes, launch.shared_bytes).c_str());
  if (nth < carved_regions_.size()) {
    const Region& region = regions_[carved_regions_[nth]];
    if (region.bytes != bytes)
      fail(place, formatted("'%s' has %zu bytes here and %zu in another thread", name, bytes, region.bytes).c_str());
    return region.start;
  }
  if (nth > carved_regions_.size())
    fail(place, formatted("'%s' is array %zu here, but no thread took array %zu", name, nth, nth - 1).c_str());
  carved_regions_.push_back(regions_.size());
  return add_region(nullptr, bytes, name).start;
}

bool Block::in_shared(const void* address, size_t bytes) const {
  const char* first = static_cast<const char*>(address);
  for (const Region& region : regions_)
    if (first >= region.start && first + bytes <= region.start + region.bytes) return true;
  return false;
}

// Whether the gaps round the shared arrays are as they were made.
bool Block::check_gaps() {
#if !defined(THDCP_ASAN)
  for (const Region& region : regions_) {
    const char* end = region.start + region.bytes;
    const size_t behind = kGap + (128 - region.bytes % 128) % 128;
    for (size_t i = 0; i < kGap + behind; i++) {
      const char* byte = i < behind ? end + i : region.start - 1 - (i - behind);
      if (static_cast<unsigned char>(*byte) == kGapByte) continue;
      if (failed_) return false;  // Tell the first fault only.
      failed_ = true;
      message_ = "block " + described(block_) + ": shared array '" + region.name + "' was written " +
                 (i < behind ? formatted("%zu bytes past its end", i + 1) : formatted("%zu bytes before its start", i - behind + 1));
      return false;
    }
  }
#endif
  return true;
}

// What kernels call.

void fail(const Place& place, const char* format, ...) {
  Unwatched unwatched;
  va_list list;
  va_start(list, format);
  const std::string text = format_list(format, list);
  va_end(list);
  running->fail(place, text.c_str());
}

void* static_shared(const void* tag, size_t bytes, const char* name) {
  Unwatched unwatched;
  return running->static_shared(tag, bytes, name);
}
void* dynamic_shared(const char* name) {
  Unwatched unwatched;
  return running->dynamic_shared(name);
}
void* carve_shared(size_t nth, size_t offset, size_t bytes, const char* name) {
  Unwatched unwatched;
  return running->carve_shared(nth, offset, bytes, name);
}
bool in_shared(const void* address, size_t bytes) { return running->in_shared(address, bytes); }
void yield() { running->yield(); }
void barrier(const Place& place) {
  Unwatched unwatched;
  running->barrier(place);
}

void issue_copy(const Copy& copy) {
  Unwatched unwatched;
  Thread* thread = running->current;
  thread->copies.push_back({copy, thread->group});
}
void commit_copies() { running->current->group++; }

static bool take(Thread* thread, size_t which, Copy& copy) {
  Unwatched unwatched;
  copy = thread->copies[which].copy;
  thread->copies.erase(thread->copies.begin() + which);
  return true;
}

bool take_copy(Copy& copy) {
  Thread* thread = running->current;
  if (thread->copies.empty() || running->launch.completion == int32_t(Completion::lazy)) return false;
  if (running->launch.completion == int32_t(Completion::eager)) return take(thread, 0, copy);
  if (running->random.below(4) != 0) return false;
  return take(thread, running->random.below(uint32_t(thread->copies.size())), copy);
}

// A wait is for all committed groups but the last `pending`; copies that were never committed are not waited for.
bool take_copy_waited_for(Copy& copy, int pending) {
  Thread* thread = running->current;
  for (size_t i = 0; i < thread->copies.size(); i++)
    if (thread->copies[i].group < thread->group - pending) return take(thread, i, copy);
  return false;
}

}  // namespace host
}  // namespace thdcp
