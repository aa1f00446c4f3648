// Purpose: fibers, the threads that a block is made of: stacks, and the switch from one to another.

#pragma once

#include <stddef.h>
#include <stdint.h>

namespace thdcp {
namespace host {

// What is kept of a fiber that does not run. The one that the OS thread came with has no stack of ours.
struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void* sanitizer = nullptr;  // ASan: its fake stack. TSan: its fiber.
};

// Make `fiber` start with `entry` when it is first switched to. `entry` never returns.
void prepare(Fiber& fiber, void (*entry)());
// Forget a fiber, whether it came to its end or not.
void discard(Fiber& fiber);
// Take the running OS thread as a fiber to switch back to.
void adopt(Fiber& fiber);
// Go on with `to`; returns when something switches back to `from`. `last`: `from` will never go on.
void switch_fiber(Fiber& from, Fiber& to, bool last);
// The first call of an entry.
void entered();

// Memory that a block uses, straight from the system: stacks and shared memory.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { release(); }

  // At least `bytes`, zero. Kept from call to call; under TSan new each time, so that it forgets who touched it.
  char* acquire(size_t bytes);
  char* start() const { return start_; }
  size_t bytes() const { return bytes_; }
  bool is_new() const { return is_new_; }

 private:
  void release();

  char* start_ = nullptr;
  size_t bytes_ = 0;
  bool is_new_ = false;
};

}  // namespace host
}  // namespace thdcp
