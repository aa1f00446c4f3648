// Purpose: what the kernels need of the machine below C++, and nothing else: PTX, and how a kernel and its shared memory
// are declared. The only file with PTX, with `__shared__` or `__global__`, and with branches between device and host.
//
// Two compilers read it. NVRTC (or nvcc) takes the device side: inline PTX, no header of CUDA or of the C++ library.
// g++ takes the host side: the same names, declared here, done by host/shim.h, so that the kernels run unmodified on a CPU,
// every CUDA thread a fiber, and their faults become named errors.
//
// A kernel file includes this header, says `using namespace thdcp;`, and uses of CUDA only: `threadIdx`, `blockIdx`,
// `blockDim`, `gridDim` (plain names on both sides), `#pragma unroll`, and what is below.
//
//   declare    THDCP_KERNEL(name, max_threads, min_blocks, parameters...) { body }   extern "C", void
//              THDCP_DEVICE                                             before every function that a kernel calls
//              THDCP_SHARED(type, name)                                 the block's dynamic shared memory, as type*
//              THDCP_SHARED_ARRAY(type, name, count)                    a static shared array
//              SharedCarver                                             several arrays out of the dynamic shared memory
//   types      int32 uint32 int64 uint64 uint16 uint8, bf16 fp16 (storage), Vec16 (16 bytes)
//   values     to_float, from_float<T>, pack<T>, unpack_low<T>, unpack_high<T>, negative_infinity, is_negative_infinity,
//              exp2_approx, log2_approx, multiply_add, minimum, maximum
//   memory     load16, store16, cp_async_16, cp_async_commit, cp_async_wait<N>
//   order      barrier, warp_barrier
//   warp       lane_id, warp_id, shuffle, shuffle_xor, shuffle_up, shuffle_down, ballot
//   tensor     ldmatrix_x2, ldmatrix_x4, ldmatrix_x2_trans, ldmatrix_x4_trans, mma_m16n8k16<T>
//
// clauses: N3
// versions: 1, sm_80 and later: mma.sync, ldmatrix, cp.async. wgmma and TMA would be a second header beside it.

#pragma once

namespace thdcp {

using uint8 = unsigned char;
using uint16 = unsigned short;
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// A brain float and a half float, as bits: arithmetic is done in float.
struct bf16 {
  uint16 bits;
};
struct fp16 {
  uint16 bits;
};

// What one thread moves in one access.
struct alignas(16) Vec16 {
  uint32 words[4];
};

constexpr uint32 kFullWarp = 0xffffffffu;
constexpr int kWarpSize = 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace thdcp

#if defined(__CUDACC__)

#define THDCP_DEVICE __device__ __forceinline__
#define THDCP_KERNEL(name, max_threads, min_blocks, ...) \
  extern "C" __global__ void __launch_bounds__(max_threads, min_blocks) name(__VA_ARGS__)
#define THDCP_SHARED_ARRAY(type, name, count) __shared__ __align__(16) type name[count]
#define THDCP_SHARED(type, name) type* name = reinterpret_cast<type*>(thdcp::dynamic_shared())

namespace thdcp {

extern __shared__ __align__(128) uint8 thdcp_dynamic_shared[];

THDCP_DEVICE uint8* dynamic_shared() { return thdcp_dynamic_shared; }

// Arrays out of the dynamic shared memory, one behind the other, each on a multiple of 128 bytes. Every thread of the block
// takes the same arrays in the same order. `bytes()` of a launch is the sum of shared_bytes<T>(count) over the arrays.
class SharedCarver {
 public:
  template <typename T>
  THDCP_DEVICE T* take(uint32 count, const char* = nullptr) {
    T* array = reinterpret_cast<T*>(thdcp_dynamic_shared + used_);
    used_ += (count * uint32(sizeof(T)) + 127u) / 128u * 128u;
    return array;
  }

 private:
  uint32 used_ = 0;
};

// bits

THDCP_DEVICE uint32 float_bits(float x) { return __float_as_uint(x); }
THDCP_DEVICE float bits_float(uint32 bits) { return __uint_as_float(bits); }

THDCP_DEVICE float to_float(float x) { return x; }
THDCP_DEVICE float to_float(bf16 x) { return __uint_as_float(uint32(x.bits) << 16); }
THDCP_DEVICE float to_float(fp16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

template <typename T>
THDCP_DEVICE T from_float(float x);
template <>
THDCP_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
THDCP_DEVICE bf16 from_float<bf16>(float x) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}
template <>
THDCP_DEVICE fp16 from_float<fp16>(float x) {
  fp16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}

template <typename T>
THDCP_DEVICE uint32 pack(float low, float high);
template <>
THDCP_DEVICE uint32 pack<bf16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
THDCP_DEVICE uint32 pack<fp16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// arithmetic

THDCP_DEVICE float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
THDCP_DEVICE float log2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
THDCP_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// memory

THDCP_DEVICE Vec16 load16(const void* address) {
  const uint4 v = *static_cast<const uint4*>(address);
  return Vec16{{v.x, v.y, v.z, v.w}};
}
THDCP_DEVICE void store16(void* address, const Vec16& v) {
  *static_cast<uint4*>(address) = make_uint4(v.words[0], v.words[1], v.words[2], v.words[3]);
}

// The compiler sees through this intrinsic, so that neighbours share one register and differ in an immediate.
THDCP_DEVICE uint32 shared_address(const void* pointer) { return uint32(__cvta_generic_to_shared(pointer)); }

THDCP_DEVICE void cp_async_16(void* shared, const void* global, bool predicate = true) {
  const uint32 bytes = predicate ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
THDCP_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
THDCP_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// order and warps

THDCP_DEVICE void barrier() { asm volatile("barrier.sync 0;" ::: "memory"); }
THDCP_DEVICE void warp_barrier(uint32 mask = kFullWarp) { asm volatile("bar.warp.sync %0;" ::"r"(mask) : "memory"); }

THDCP_DEVICE uint32 ballot(uint32 mask, bool predicate) {
  uint32 result;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2; }"
               : "=r"(result)
               : "r"(uint32(predicate)), "r"(mask));
  return result;
}

// The last operand of shfl.sync holds the clamp: 31, or 0 for `up`.
#define THDCP_SHUFFLE(name, mode, clamp)                                      \
  THDCP_DEVICE uint32 name(uint32 mask, uint32 value, int lane) {             \
    uint32 result;                                                            \
    asm volatile("shfl.sync." mode ".b32 %0, %1, %2, " clamp ", %3;"          \
                 : "=r"(result)                                               \
                 : "r"(value), "r"(lane), "r"(mask));                         \
    return result;                                                            \
  }                                                                           \
  THDCP_DEVICE int32 name(uint32 mask, int32 value, int lane) {               \
    return int32(name(mask, uint32(value), lane));                            \
  }                                                                           \
  THDCP_DEVICE float name(uint32 mask, float value, int lane) {               \
    return __uint_as_float(name(mask, __float_as_uint(value), lane));         \
  }                                                                           \
  THDCP_DEVICE uint64 name(uint32 mask, uint64 value, int lane) {             \
    const uint64 low = name(mask, uint32(value), lane);                       \
    return low | uint64(name(mask, uint32(value >> 32), lane)) << 32;         \
  }                                                                           \
  THDCP_DEVICE int64 name(uint32 mask, int64 value, int lane) {               \
    return int64(name(mask, uint64(value), lane));                            \
  }
THDCP_SHUFFLE(shuffle, "idx", "31")
THDCP_SHUFFLE(shuffle_xor, "bfly", "31")
THDCP_SHUFFLE(shuffle_up, "up", "0")
THDCP_SHUFFLE(shuffle_down, "down", "31")
#undef THDCP_SHUFFLE

// matrices

#define THDCP_LDMATRIX(suffix, transpose)                                                                         \
  THDCP_DEVICE void ldmatrix_x2##suffix(uint32& r0, uint32& r1, const void* row) {                                \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" transpose ".shared.b16 {%0, %1}, [%2];"                          \
                 : "=r"(r0), "=r"(r1)                                                                             \
                 : "r"(shared_address(row))                                                                       \
                 : "memory");                                                                                     \
  }                                                                                                               \
  THDCP_DEVICE void ldmatrix_x4##suffix(uint32& r0, uint32& r1, uint32& r2, uint32& r3, const void* row) {        \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" transpose ".shared.b16 {%0, %1, %2, %3}, [%4];"                  \
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)                                                         \
                 : "r"(shared_address(row))                                                                       \
                 : "memory");                                                                                     \
  }
THDCP_LDMATRIX(, "")
THDCP_LDMATRIX(_trans, ".trans")
#undef THDCP_LDMATRIX

template <typename T>
THDCP_DEVICE void mma_m16n8k16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
#define THDCP_MMA(type, name)                                                                                       \
  template <>                                                                                                       \
  THDCP_DEVICE void mma_m16n8k16<type>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {                 \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                             \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                             \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                   \
  }
THDCP_MMA(bf16, "bf16")
THDCP_MMA(fp16, "f16")
#undef THDCP_MMA

}  // namespace thdcp

#else

#include "host/shim.h"

#endif

// The same on both sides.

namespace thdcp {

// The bytes that `SharedCarver` takes for an array: what a launch adds up to its dynamic shared memory.
template <typename T>
THDCP_DEVICE constexpr uint32 shared_bytes(uint32 count) {
  return (count * uint32(sizeof(T)) + 127u) / 128u * 128u;
}

THDCP_DEVICE int thread_id() { return int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)); }
THDCP_DEVICE int lane_id() { return thread_id() % kWarpSize; }
THDCP_DEVICE int warp_id() { return thread_id() / kWarpSize; }

THDCP_DEVICE float negative_infinity() { return bits_float(0xff800000u); }
THDCP_DEVICE bool is_negative_infinity(float x) { return float_bits(x) == 0xff800000u; }

template <typename T>
THDCP_DEVICE T minimum(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
THDCP_DEVICE T maximum(T a, T b) {
  return a < b ? b : a;
}

// The two elements of a packed pair.
template <typename T>
THDCP_DEVICE float unpack_low(uint32 pair) {
  return to_float(T{uint16(pair & 0xffffu)});
}
template <typename T>
THDCP_DEVICE float unpack_high(uint32 pair) {
  return to_float(T{uint16(pair >> 16)});
}

}  // namespace thdcp
