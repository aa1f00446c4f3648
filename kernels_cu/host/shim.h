// Purpose: the host side of primitives.cuh. Under g++ this header gives a kernel everything it uses of CUDA, so that the
// unmodified source runs on a CPU: for tests without a GPU, and to step through a kernel in a debugger.
//
// A CUDA thread is a fiber, and a block stays on one OS thread (shim.cpp). What touches memory for the kernel (16-byte
// accesses, asynchronous copies, the rows of ldmatrix) is inline here and so compiled with the kernel: a sanitizer then
// blames the right thread and line. What waits for other threads is in shim.cpp, which is never instrumented.
//
// A `Place` is where a primitive was called (default arguments are evaluated there): threads that meet at a barrier or in a
// warp collective must have called it from the same place.

#pragma once

#include <math.h>
#include <stddef.h>
#include <string.h>

#include <string>
#include <type_traits>
#include <utility>

#include "host/numbers.h"

#define THDCP_DEVICE inline

// A kernel is four symbols: `name` takes the void** of cuLaunchKernel, `name_types` says the types of its parameters,
// `name_parameters` the parameters as written, `name_max_threads` its launch bound.
#define THDCP_KERNEL(name, max_threads, min_blocks, ...)                                \
  static void name##_body(__VA_ARGS__);                                                 \
  extern "C" {                                                                          \
  THDCP_EXPORT void name(void** arguments) { thdcp::host::call(name##_body, arguments); } \
  THDCP_EXPORT const char* name##_types() { return thdcp::host::types_of(name##_body); } \
  THDCP_EXPORT const char* name##_parameters() { return THDCP_TEXT(__VA_ARGS__); }      \
  THDCP_EXPORT int name##_max_threads() { return max_threads; }                         \
  }                                                                                     \
  static void name##_body(__VA_ARGS__)
#define THDCP_TEXT(...) #__VA_ARGS__  // of what macros among the parameters stand for
#define THDCP_EXPORT __attribute__((visibility("default")))

// Every instantiation of the function that holds the array has an array of its own, as in CUDA: `tag` tells them apart.
#define THDCP_SHARED_ARRAY(type, name, count)                            \
  static char name##_tag;                                                \
  type(&name)[count] = *static_cast<type(*)[count]>(                     \
      thdcp::host::static_shared(&name##_tag, sizeof(type[count]), #name))
#define THDCP_SHARED(type, name) type* name = static_cast<type*>(thdcp::host::dynamic_shared(#name))

struct ThdcpIndex {
  unsigned x, y, z;
};
// __thread and not thread_local: no call hides behind a use, and a debugger reads `threadIdx.x` as written.
extern __thread ThdcpIndex threadIdx, blockIdx, blockDim, gridDim;

namespace thdcp {
namespace host {

struct Place {
  const char* what;
  const char* file;
  int line;
};

// Unpack the void** of cuLaunchKernel.
template <typename... Parameters, size_t... kIndices>
void call_indexed(void (*body)(Parameters...), void** arguments, std::index_sequence<kIndices...>) {
  (void)arguments;
  body(*static_cast<Parameters*>(arguments[kIndices])...);
}
template <typename... Parameters>
void call(void (*body)(Parameters...), void** arguments) {
  call_indexed(body, arguments, std::index_sequence_for<Parameters...>());
}

// "const bf16*, int64" for (const bf16*, int64): what the caller checks its arguments against.
template <typename T>
struct TypeName;
#define THDCP_TYPE(type)                        \
  template <>                                   \
  struct TypeName<type> {                       \
    static constexpr const char* value = #type; \
  };
THDCP_TYPE(int32) THDCP_TYPE(uint32) THDCP_TYPE(int64) THDCP_TYPE(uint64) THDCP_TYPE(uint16) THDCP_TYPE(uint8)
THDCP_TYPE(float) THDCP_TYPE(double) THDCP_TYPE(bool) THDCP_TYPE(bf16) THDCP_TYPE(fp16) THDCP_TYPE(Vec16) THDCP_TYPE(void)
#undef THDCP_TYPE

template <typename T>
std::string type_text() {
  if constexpr (std::is_pointer_v<T>) {
    using Target = std::remove_pointer_t<T>;
    return (std::is_const_v<Target> ? "const " : "") + std::string(TypeName<std::remove_cv_t<Target>>::value) + "*";
  } else {
    return TypeName<T>::value;
  }
}
template <typename... Parameters>
const char* types_of(void (*)(Parameters...)) {
  static const std::string text = [] {
    std::string joined;
    ((joined += (joined.empty() ? "" : ", ") + type_text<Parameters>()), ...);
    return joined;
  }();
  return text.c_str();
}

// End the block with a named error; printf's arguments.
[[noreturn]] void fail(const Place& place, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Shared memory: regions with gaps round them that nobody may touch.
void* static_shared(const void* tag, size_t bytes, const char* name);
void* dynamic_shared(const char* name);
void* carve_shared(size_t nth, size_t offset, size_t bytes, const char* name);
bool in_shared(const void* address, size_t bytes);

// Order. `yield` is a point where another thread of the block may come in between.
void yield();
void barrier(const Place& place);
void warp_barrier(uint32 mask, const Place& place);

// Warp collectives: each lane hands in `words` and gets back words of all lanes; the last lane to come does the work.
enum class Shuffle { index, exclusive_or, up, down };
uint64 shuffle(Shuffle kind, uint32 mask, uint64 value, int lane, const Place& place);
uint32 ballot(uint32 mask, bool predicate, const Place& place);
void ldmatrix(uint32* registers, int count, bool transpose, const void* row, const uint32* row_words, const Place& place);
void mma(float* c, const uint32* a, const uint32* b, bool brain, const Place& place);

// Asynchronous copies. `issue_copy` keeps the copy for later; `take_copy` gives back one that is to be done now.
struct Copy {
  void* shared;
  const void* global;
  bool read;
};
void issue_copy(const Copy& copy);
void commit_copies();
bool take_copy(Copy& copy);
bool take_copy_waited_for(Copy& copy, int pending);

inline void do_copy(const Copy& copy) {
  Vec16 value = {};
  if (copy.read) memcpy(&value, copy.global, sizeof value);
  memcpy(copy.shared, &value, sizeof value);
}

// What may happen at any moment happens here: another thread runs, copies in flight arrive.
inline void passing() {
  Copy copy;
  while (take_copy(copy)) do_copy(copy);
  yield();
}

inline void check_aligned(const void* address, const Place& place) {
  if (reinterpret_cast<size_t>(address) % 16 != 0)
    fail(place, "address %p is not a multiple of 16 bytes", address);
}
inline void check_shared(const void* address, const Place& place) {
  check_aligned(address, place);
  if (!in_shared(address, 16)) fail(place, "address %p lies in no shared array of the block", address);
}

template <typename T>
inline T shuffle_as(Shuffle kind, uint32 mask, T value, int lane, const Place& place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = shuffle(kind, mask, bits, lane, place);
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
constexpr bool is_brain = false;
template <>
constexpr bool is_brain<bf16> = true;

}  // namespace host

class SharedCarver {
 public:
  template <typename T>
  T* take(uint32 count, const char* name = "carved array") {
    const size_t bytes = (size_t(count) * sizeof(T) + 127) / 128 * 128;
    void* array = host::carve_shared(taken_++, used_, size_t(count) * sizeof(T), name);
    used_ += bytes;
    return static_cast<T*>(array);
  }

 private:
  size_t taken_ = 0;
  size_t used_ = 0;
};

inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

#define THDCP_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline Vec16 load16(const void* address, THDCP_CALLER) {
  host::check_aligned(address, {"load16", file, line});
  host::passing();
  Vec16 value;
  memcpy(&value, address, sizeof value);
  return value;
}
inline void store16(void* address, const Vec16& value, THDCP_CALLER) {
  host::check_aligned(address, {"store16", file, line});
  host::passing();
  memcpy(address, &value, sizeof value);
}

inline void cp_async_16(void* shared, const void* global, bool predicate = true, THDCP_CALLER) {
  const host::Place place = {"cp_async_16", file, line};
  host::check_shared(shared, place);
  if (predicate) host::check_aligned(global, place);
  host::issue_copy({shared, global, predicate});
  host::passing();
}
inline void cp_async_commit() { host::commit_copies(); }
template <int kPending>
inline void cp_async_wait() {
  host::Copy copy;
  while (host::take_copy_waited_for(copy, kPending)) host::do_copy(copy);
  host::passing();
}

inline void barrier(THDCP_CALLER) { host::barrier({"barrier", file, line}); }
inline void warp_barrier(uint32 mask = kFullWarp, THDCP_CALLER) {
  host::warp_barrier(mask, {"warp_barrier", file, line});
}
inline uint32 ballot(uint32 mask, bool predicate, THDCP_CALLER) {
  return host::ballot(mask, predicate, {"ballot", file, line});
}
template <typename T>
inline T shuffle(uint32 mask, T value, int lane, THDCP_CALLER) {
  return host::shuffle_as(host::Shuffle::index, mask, value, lane, {"shuffle", file, line});
}
template <typename T>
inline T shuffle_xor(uint32 mask, T value, int lane_mask, THDCP_CALLER) {
  return host::shuffle_as(host::Shuffle::exclusive_or, mask, value, lane_mask, {"shuffle_xor", file, line});
}
template <typename T>
inline T shuffle_up(uint32 mask, T value, int delta, THDCP_CALLER) {
  return host::shuffle_as(host::Shuffle::up, mask, value, delta, {"shuffle_up", file, line});
}
template <typename T>
inline T shuffle_down(uint32 mask, T value, int delta, THDCP_CALLER) {
  return host::shuffle_as(host::Shuffle::down, mask, value, delta, {"shuffle_down", file, line});
}

// Lane i of an ldmatrix gives the address of row i; lanes past the last row give addresses that nobody reads.
template <int kCount>
inline void ldmatrix_rows(uint32* registers, bool transpose, const void* row, const host::Place& place) {
  uint32 words[4] = {};
  if (int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kWarpSize < 8 * kCount) {
    host::check_shared(row, place);
    host::passing();
    memcpy(words, row, sizeof words);
  }
  host::ldmatrix(registers, kCount, transpose, row, words, place);
}
#define THDCP_LDMATRIX(suffix, transpose)                                                                        \
  inline void ldmatrix_x2##suffix(uint32& r0, uint32& r1, const void* row, THDCP_CALLER) {                       \
    uint32 r[2];                                                                                                 \
    ldmatrix_rows<2>(r, transpose, row, {"ldmatrix_x2" #suffix, file, line});                                    \
    r0 = r[0], r1 = r[1];                                                                                        \
  }                                                                                                              \
  inline void ldmatrix_x4##suffix(uint32& r0, uint32& r1, uint32& r2, uint32& r3, const void* row, THDCP_CALLER) { \
    uint32 r[4];                                                                                                 \
    ldmatrix_rows<4>(r, transpose, row, {"ldmatrix_x4" #suffix, file, line});                                    \
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];                                                                  \
  }
THDCP_LDMATRIX(, false)
THDCP_LDMATRIX(_trans, true)
#undef THDCP_LDMATRIX

template <typename T>
inline void mma_m16n8k16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, THDCP_CALLER) {
  const uint32 b[2] = {b0, b1};
  host::mma(c, a, b, host::is_brain<T>, {"mma_m16n8k16", file, line});
}

#undef THDCP_CALLER

}  // namespace thdcp
