// What device functions of every tool share. Needs no header of NVIDIA's; the constants are those of sanitizer_patching.h.
// Compiled for the CPU by the tests, with the warp's intrinsics emulated (PASTA_EMULATION).
#pragma once
typedef unsigned int u32;
typedef unsigned long long u64;

// Sanitizer_DeviceMemoryFlags
enum Flag { READ = 1, WRITE = 2, ATOMIC_SYSTEM = 4, PREFETCH = 8, ATOMIC_WRITE_ONLY = 256 };

#ifndef PASTA_EMULATION
static __device__ __forceinline__ u32 lane_id() { u32 r; asm volatile("mov.u32 %0, %%laneid;" : "=r"(r)); return r; }
static __device__ __forceinline__ u32 sm_id() { u32 r; asm volatile("mov.u32 %0, %%smid;" : "=r"(r)); return r; }
// Nanoseconds; the same on all multiprocessors of a GPU.
static __device__ __forceinline__ u64 device_time() { u64 r; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(r)); return r; }
static __device__ __forceinline__ bool first_of_block() { return (threadIdx.x | threadIdx.y | threadIdx.z) == 0; }

// Operations on words of a slot or a table, which lie in global memory. CUDA's own take a pointer of any kind: such an atomic
// waits for an answer from the L2 cache, and one on global memory that nobody reads the answer of does not.
static __device__ __forceinline__ void add(u64* word, u64 value)
{
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}
static __device__ __forceinline__ void set_bits(u64* word, u64 bits)
{
  asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" :: "l"(__cvta_generic_to_global(word)), "l"(bits) : "memory");
}
static __device__ __forceinline__ u64 look(const u64* word)
{
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
  return value;
}
static __device__ __forceinline__ void raise_to(u64* word, u64 value)
{
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" :: "l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}
// Return what stood there; where that was 0, it is the value now.
static __device__ __forceinline__ u64 claim(u64* word, u64 value)
{
  u64 old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, %2;"
    : "=l"(old) : "l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
  return old;
}
// Return a word that nothing changes while the GPU kernel runs.
static __device__ __forceinline__ u64 constant(const u64* word)
{
  u64 value;
  asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)));
  return value;
}
#endif

// Tell whether a lane is the lowest of a group of lanes.
static __device__ __forceinline__ bool is_first(u32 group, u32 lane) { return __ffs(group) - 1 == (int)lane; }

static __device__ __forceinline__ bool is_atomic(u32 flags)
{
  return (flags & (READ | WRITE)) == (READ | WRITE) || (flags & (ATOMIC_SYSTEM | ATOMIC_WRITE_ONLY));
}

// Raise a word to a value. Looking first spares the atomic nearly always.
static __device__ __forceinline__ void raise(u64* word, u64 value)
{
  if (look(word) < value) raise_to(word, value);
}
