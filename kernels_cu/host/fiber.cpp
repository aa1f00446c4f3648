// Purpose: fiber.h. The switch is a few instructions: swapcontext makes two system calls a switch and is four times slower,
// and sanitizers know longjmp as something else.

#include "host/fiber.h"

#include <string.h>
#include <sys/mman.h>

#include <new>

#if defined(THDCP_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(THDCP_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

// Save what a call must preserve on the stack, exchange the stacks, and restore.
extern "C" void thdcp_exchange_stacks(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.globl thdcp_exchange_stacks
.hidden thdcp_exchange_stacks
.type thdcp_exchange_stacks, @function
thdcp_exchange_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size thdcp_exchange_stacks, .-thdcp_exchange_stacks
)");
static constexpr size_t kReturnWord = 6, kFrameWords = 8;
#elif defined(__aarch64__)
asm(R"(
.text
.globl thdcp_exchange_stacks
.hidden thdcp_exchange_stacks
.type thdcp_exchange_stacks, %function
thdcp_exchange_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size thdcp_exchange_stacks, .-thdcp_exchange_stacks
)");
static constexpr size_t kReturnWord = 11, kFrameWords = 20;
#else
#error "the host shim switches fibers on x86-64 and on AArch64 only"
#endif

namespace thdcp {
namespace host {

// The fiber that was left last, so that the one entered can tell ASan whose stack it was.
static __thread Fiber* left = nullptr;

void prepare(Fiber& fiber, void (*entry)()) {
  // The frame that thdcp_exchange_stacks pops, below the top of the stack: zeros, and where to return to. Behind it one more
  // zero word, as if `entry` had been called by nobody; so a debugger's backtrace ends here.
  uintptr_t top = reinterpret_cast<uintptr_t>(fiber.stack + fiber.stack_bytes) & ~uintptr_t(15);
  void** frame = reinterpret_cast<void**>(top) - kFrameWords;
  memset(frame, 0, kFrameWords * sizeof *frame);
  frame[kReturnWord] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = frame;
#if defined(THDCP_TSAN)
  fiber.sanitizer = __tsan_create_fiber(0);
#else
  fiber.sanitizer = nullptr;
#endif
}

void discard(Fiber& fiber) {
#if defined(THDCP_TSAN)
  if (fiber.sanitizer != nullptr) __tsan_destroy_fiber(fiber.sanitizer);
#endif
  fiber.sanitizer = nullptr;
}

void adopt(Fiber& fiber) {
#if defined(THDCP_TSAN)
  fiber.sanitizer = __tsan_get_current_fiber();
#else
  (void)fiber;
#endif
}

void entered() {
#if defined(THDCP_ASAN)
  // What ASan says was left is, for the OS thread's own fiber, all that is known of its stack.
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (left->stack == nullptr) {
    left->stack = const_cast<char*>(static_cast<const char*>(stack));
    left->stack_bytes = bytes;
  }
#endif
}

void switch_fiber(Fiber& from, Fiber& to, bool last) {
  left = &from;
#if defined(THDCP_ASAN)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.sanitizer, to.stack, to.stack_bytes);
#elif defined(THDCP_TSAN)
  __tsan_switch_to_fiber(to.sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
  (void)last;
  thdcp_exchange_stacks(&from.stack_pointer, to.stack_pointer);
#if defined(THDCP_ASAN)
  __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

char* Mapping::acquire(size_t bytes) {
#if defined(THDCP_TSAN)
  const bool fits = false;
#else
  const bool fits = bytes <= bytes_;
#endif
  is_new_ = !fits;
  if (fits) return start_;
  release();
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  start_ = static_cast<char*>(start);
  bytes_ = bytes;
  return start_;
}

void Mapping::release() {
#if defined(THDCP_ASAN)
  if (start_ != nullptr) __asan_unpoison_memory_region(start_, bytes_);
#endif
  if (start_ != nullptr) munmap(start_, bytes_);
  start_ = nullptr;
  bytes_ = 0;
}

}  // namespace host
}  // namespace thdcp
