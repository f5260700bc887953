// Counts what a GPU kernel does to memory, beside it: the Sanitizer API calls these functions at every access, and only
// the sums leave the device. Needs no header of NVIDIA's; the signatures are those of sanitizer_patching.h, as far as
// all versions of CUDA 12 and 13 agree on them.
// tests/unit/test_memory_patch.py compiles this same file for the CPU, with the warp's intrinsics emulated.
typedef unsigned int u32;
typedef unsigned long long u64;

// One slot a launch: WAYS copies of WORDS counters, by multiprocessor, so that 132 of them do not queue on one address.
// slots.py repeats this layout; a test compares the two.
enum Layout {
  // requests (instructions of one warp), active lanes, 32-byte sectors, bytes asked for
  GLOBAL_LOAD = 0,
  GLOBAL_STORE = 4,
  GLOBAL_ATOMIC = 8,
  ASYNC_COPY = 12,
  // requests, active lanes, wavefronts, phases (wavefronts that no layout could save)
  SHARED_LOAD_4 = 16,
  SHARED_LOAD_8 = 20,
  SHARED_LOAD_16 = 24,
  SHARED_STORE_4 = 28,
  SHARED_STORE_8 = 32,
  SHARED_STORE_16 = 36,
  SHARED_ATOMIC = 40,
  SHARED_MATRIX_LOAD = 44,
  // distinct addresses, and the sum over requests of the most lanes that meet on one address
  GLOBAL_CONTENTION = 48,
  SHARED_CONTENTION = 50,
  // requests by the distance between neighbouring lanes
  GLOBAL_STRIDE = 52,
  SHARED_STRIDE = 60,
  SHARED_MATRIX_STORE = 68,
  WORDS = 72,
  WAYS = 8
};
enum Stride { IRREGULAR = 7 };
// Sanitizer_DeviceMemoryFlags
enum Flag { READ = 1, WRITE = 2, ATOMIC_SYSTEM = 4, PREFETCH = 8, ATOMIC_WRITE_ONLY = 256 };

#ifndef PASTA_EMULATION
static __device__ __forceinline__ u32 lane_id() { u32 r; asm volatile("mov.u32 %0, %%laneid;" : "=r"(r)); return r; }
static __device__ __forceinline__ u32 sm_id() { u32 r; asm volatile("mov.u32 %0, %%smid;" : "=r"(r)); return r; }
#endif

static __device__ __forceinline__ u64* way_of(void* slot) { return (u64*)slot + (sm_id() % WAYS) * WORDS; }

static __device__ __forceinline__ bool is_first(u32 group, u32 lane) { return __ffs(group) - 1 == (int)lane; }

// Neighbouring lanes add to neighbouring words: one transaction instead of four.
static __device__ __forceinline__ void add4(u64* to, u32 mask, u32 lane, u64 a, u64 b, u64 c, u64 d)
{
  u32 step = __popc(mask);
  for (u32 i = __popc(mask & ((1u << lane) - 1)); i < 4; i += step)
    atomicAdd(to + i, i == 0 ? a : i == 1 ? b : i == 2 ? c : d);
}

static __device__ __forceinline__ bool is_atomic(u32 flags)
{
  return (flags & (READ | WRITE)) == (READ | WRITE) || (flags & (ATOMIC_SYSTEM | ATOMIC_WRITE_ONLY));
}

// Distance between neighbouring lanes in units of the access size; false where it is not the same for all.
static __device__ __forceinline__ bool uniform_stride(u32 mask, u32 lane, u64 address, u32 size, u64* units)
{
  u32 first = __ffs(mask) - 1, rest = mask & (mask - 1), second = rest ? __ffs(rest) - 1 : first;
  u64 from = __shfl_sync(mask, address, first), to = __shfl_sync(mask, address, second);
  long long span = (long long)(to - from), gap = second - first;
  long long stride = gap ? span / gap : 0;
  bool fits = address == from + (u64)(stride * (long long)(lane - first)) && stride % (long long)size == 0;
  *units = (u64)(stride < 0 ? -stride : stride) / size;
  return __all_sync(mask, fits);
}

// 0 one address, 1 adjacent, 2 every second, 3 up to 4, 4 up to 8, 5 up to 32, 6 farther, 7 irregular
static __device__ __forceinline__ u32 global_stride(bool uniform, u64 units)
{
  if (!uniform) return IRREGULAR;
  return units <= 2 ? (u32)units : units <= 4 ? 3 : units <= 8 ? 4 : units <= 32 ? 5 : 6;
}

// 0 one address, 1 odd, then by the power of two that divides it: 2 -> 2, 4 -> 3, 8 -> 4, 16 -> 5, 32 and more -> 6
static __device__ __forceinline__ u32 shared_stride(bool uniform, u64 units)
{
  if (!uniform) return IRREGULAR;
  u32 low = (u32)units & 63u;
  if (units == 0) return 0;
  return low == 0 ? 6 : min(__ffs(low), 6);
}

static __device__ __forceinline__ void count_contention(u64* to, u32 mask, u32 lane, u64 address)
{
  u32 same = __match_any_sync(mask, address), lanes = __popc(same);
  u32 addresses = __popc(__ballot_sync(mask, is_first(same, lane)));
  u32 depth = 0;
  while (__any_sync(mask, lanes > depth)) depth++;
  if (is_first(mask, lane)) {
    atomicAdd(to, (u64)addresses);
    atomicAdd(to + 1, (u64)depth);
  }
}

extern "C" __device__ __noinline__ int PastaGlobal(void* slot, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  if (!slot || (flags & PREFETCH)) return 0;
  u64 address = (u64)ptr, units;
  u32 mask = __activemask(), lane = lane_id();
  u32 same = __match_any_sync(mask, address >> 5);
  u32 sectors = __popc(__ballot_sync(mask, is_first(same, lane)));
  bool uniform = uniform_stride(mask, lane, address, size, &units);
  u64* way = way_of(slot);
  u32 lanes = __popc(mask), kind = is_atomic(flags) ? GLOBAL_ATOMIC : (flags & WRITE) ? GLOBAL_STORE : GLOBAL_LOAD;
  add4(way + kind, mask, lane, 1, lanes, sectors, (u64)lanes * size);
  if (kind == GLOBAL_ATOMIC) {
    count_contention(way + GLOBAL_CONTENTION, mask, lane, address);
  } else if (is_first(mask, lane)) {
    atomicAdd(way + GLOBAL_STRIDE + global_stride(uniform, units), (u64)1);
  }
  return 0;
}

// cp.async: a lane whose source size is 0 has no source and touches no sector. The arguments are those that every version
// passes: a sixth, the size of the zero-filled tail, stands only in the headers of 13.5; before, that register holds whatever
// it held (on an H200 with CUDA 13.0, not less than the access' size). So a partly filled lane counts in full.
extern "C" __device__ __noinline__ int PastaAsyncCopy(void* slot, u64 pc, void* src, u32 dst, u32 size)
{
  if (!slot) return 0;
  u64 address = (u64)src;
  u32 mask = __activemask(), lane = lane_id();
  u32 same = __match_any_sync(mask, address >> 5);
  u32 sources = __ballot_sync(mask, src != 0);
  u32 sectors = __popc(__ballot_sync(mask, src != 0 && is_first(same, lane)));
  add4(way_of(slot) + ASYNC_COPY, mask, lane, 1, __popc(mask), sectors, (u64)__popc(sources) * size);
  return 0;
}

// A warp's 8-byte accesses run as two half-warps, its 16-byte ones as four quarters: the phases. Within one, a wavefront
// serves one unit of each bank (32 banks of 4 bytes; 16 pairs; 8 fours); lanes on the same unit share it. Two phases of a
// load become one where each lane has the address of lane ^ 1, or each that of lane ^ 2. "parts" is the number of phases
// that a full warp has: 1, 2 or 4.
static __device__ __forceinline__ bool pairs_share(u32 mask, u32 lane, u32 address)
{
  u32 same = __match_any_sync(mask, address);
  bool one = !(mask >> (lane ^ 1) & 1) || (same >> (lane ^ 1) & 1), two = !(mask >> (lane ^ 2) & 1) || (same >> (lane ^ 2) & 1);
  return __all_sync(mask, one) || __all_sync(mask, two);
}

static __device__ __forceinline__ u32 phases_of(u32 lanes, u32 parts)
{
  if (parts == 1) return lanes != 0;
  if (parts == 2) return ((lanes & 0xffffu) != 0) + ((lanes >> 16) != 0);
  return ((lanes & 0xffu) != 0) + ((lanes & 0xff00u) != 0) + ((lanes & 0xff0000u) != 0) + ((lanes >> 24) != 0);
}

static __device__ __forceinline__ void count_shared(u64* to, u32 mask, u32 lane, u32 address, u32 words, u32 parts)
{
  u32 unit = address / (4 * words), phase = (lane * parts / 32) << 28;
  u32 first = __ballot_sync(mask, is_first(__match_any_sync(mask, unit | phase), lane));
  u32 in_bank = __popc(__match_any_sync(mask, (unit % (32 / words)) | phase) & first);
  u32 wavefronts = 0;
  for (u32 served = 0;; served++) {
    u32 waiting = __ballot_sync(mask, in_bank > served);
    if (!waiting) break;
    wavefronts += phases_of(waiting, parts);
  }
  add4(to, mask, lane, 1, __popc(mask), wavefronts, phases_of(mask, parts));
}

extern "C" __device__ __noinline__ int PastaShared(void* slot, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  if (!slot) return 0;
  u64 units;
  u32 mask = __activemask(), lane = lane_id(), address = (u32)(u64)ptr, words = size <= 4 ? 1 : size / 4;
  bool uniform = uniform_stride(mask, lane, address, size, &units), atomic = is_atomic(flags);
  u64* way = way_of(slot);
  u32 kind = (flags & WRITE ? SHARED_STORE_4 : SHARED_LOAD_4) + (words == 1 ? 0 : words == 2 ? 4 : 8);
  bool merges = words > 1 && !(flags & WRITE) && pairs_share(mask, lane, address);
  u32 parts = merges ? words / 2 : words;
  count_shared(way + (atomic ? SHARED_ATOMIC : kind), mask, lane, address, words, parts);
  if (atomic) {
    count_contention(way + SHARED_CONTENTION, mask, lane, address);
  } else if (is_first(mask, lane)) {
    atomicAdd(way + SHARED_STRIDE + shared_stride(uniform, units), (u64)1);
  }
  return 0;
}

// ldmatrix, stmatrix: eight lanes name the eight 16-byte rows of one matrix; lanes beyond the last matrix name nothing
extern "C" __device__ __noinline__ int PastaMatrix(void* slot, u64 pc, u32 address, u32 size, u32 flags, u32 count, const void* data)
{
  if (!slot) return 0;
  u32 lane = lane_id(), mask = __ballot_sync(__activemask(), lane < 8 * count);
  u32 kind = flags & WRITE ? SHARED_MATRIX_STORE : SHARED_MATRIX_LOAD;
  if (lane < 8 * count) count_shared(way_of(slot) + kind, mask, lane, address, 4, 4);
  return 0;
}
