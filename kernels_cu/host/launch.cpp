// Purpose: the launch of a grid: blocks over OS threads, the first error back as text, and memory faults of a kernel turned
// into errors. The entry point for ctypes is `thdcp_launch`.

#include <signal.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host/block.h"

#if defined(THDCP_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace thdcp {
namespace host {

#if defined(THDCP_ASAN) || defined(THDCP_TSAN)

// The sanitizers report faults themselves.
class FaultGuard {};
class FaultStack {};

#else

static struct sigaction previous_segv, previous_bus;

static void on_fault(int signal, siginfo_t* info, void*) {
  if (running != nullptr && running->current != nullptr) running->fault(info->si_addr);
  // Not ours: give the signal back and let it happen again.
  sigaction(signal, signal == SIGSEGV ? &previous_segv : &previous_bus, nullptr);
}

// The handler is there while any launch runs.
class FaultGuard {
 public:
  FaultGuard() {
    std::lock_guard<std::mutex> lock(mutex());
    if (launches()++ > 0) return;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGBUS, &action, &previous_bus);
  }
  ~FaultGuard() {
    std::lock_guard<std::mutex> lock(mutex());
    if (--launches() > 0) return;
    sigaction(SIGSEGV, &previous_segv, nullptr);
    sigaction(SIGBUS, &previous_bus, nullptr);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex only;
    return only;
  }
  static int& launches() {
    static int count = 0;
    return count;
  }
};

// A stack of its own for the handler: the fault may be that a fiber's stack overflowed.
class FaultStack {
 public:
  FaultStack() : memory_(new char[kBytes]) {
    stack_t mine = {};
    mine.ss_sp = memory_.get();
    mine.ss_size = kBytes;
    sigaltstack(&mine, &previous_);
  }
  ~FaultStack() { sigaltstack(&previous_, nullptr); }

 private:
  static constexpr size_t kBytes = 64 * 1024;
  std::unique_ptr<char[]> memory_;
  stack_t previous_;
};

#endif

static std::vector<uint64_t> block_order(const Launch& launch, uint64_t count) {
  std::vector<uint64_t> order(count);
  for (uint64_t i = 0; i < count; i++) order[i] = i;
  if (launch.schedule == int32_t(Schedule::reverse)) std::reverse(order.begin(), order.end());
  if (launch.schedule == int32_t(Schedule::random) || launch.schedule == int32_t(Schedule::priority)) {
    Random random(launch.seed);
    for (uint64_t i = count; i > 1; i--) std::swap(order[i - 1], order[random.below(uint32_t(i))]);
  }
  return order;
}

static std::string run_grid(Launch& launch, void (*kernel)(void**), void** arguments) {
  const uint64_t count = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  const std::vector<uint64_t> order = block_order(launch, count);
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  std::string message;
  const auto work = [&] {
    FaultStack stack;
    std::unique_ptr<Block> block(new Block(launch, kernel, arguments));
    for (uint64_t i = next++; i < count; i = next++) {
      const uint64_t x = order[i] % launch.grid[0], rest = order[i] / launch.grid[0];
      if (block->run({unsigned(x), unsigned(rest % launch.grid[1]), unsigned(rest / launch.grid[1])})) continue;
      std::lock_guard<std::mutex> lock(mutex);
      if (message.empty()) message = block->message();
      next = count;  // The other OS threads end with the block they are in.
    }
  };
  FaultGuard guard;
  const uint64_t workers = std::min<uint64_t>(uint64_t(std::max(launch.os_threads, 1)), count);
  if (workers <= 1) {
    work();
  } else {
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < workers; i++) threads.emplace_back(work);
    for (std::thread& thread : threads) thread.join();
  }
#if defined(THDCP_TSAN)
  __tsan_acquire(&launch);  // The launch is over: all that it did comes before what the caller does next.
#endif
  return message;
}

}  // namespace host
}  // namespace thdcp

// 0, or 1 with a message.
extern "C" __attribute__((visibility("default"))) int thdcp_launch(void (*kernel)(void**), thdcp::host::Launch* launch,
                                                                   void** arguments, char* message, size_t message_bytes) {
  std::string text;
  try {
    text = thdcp::host::run_grid(*launch, kernel, arguments);
  } catch (const std::exception& error) {
    text = std::string("the shim failed: ") + error.what();
  }
  snprintf(message, message_bytes, "%s", text.c_str());
  return text.empty() ? 0 : 1;
}
