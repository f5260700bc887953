// Counts what a GPU kernel does to memory, beside it: the Sanitizer API calls these functions at every access, and only
// the sums leave the device. Needs no header of NVIDIA's; the signatures are those of sanitizer_patching.h, as far as
// all versions of CUDA 12 and 13 agree on them.
// tests/unit/test_memory_patch.py compiles this same file for the CPU, with the warp's intrinsics emulated.
#include "patch.cuh"

// One slot a launch: a header, then WAYS copies of WORDS counters, by multiprocessor, so that 132 of them do not queue on one
// address, then (where the header asks for it) the tables of hotness. slots.py repeats this layout; a test compares the two.
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
  // cp.async.bulk (not of tensor maps): requests, requests again, sectors, bytes
  BULK_LOAD = 72,
  BULK_STORE = 76,
  // accesses to another block's shared memory: requests, lanes, bytes
  REMOTE_SHARED = 80,
  // what wgmma reads from shared memory: instructions of a warp, bytes of A, bytes of B
  WGMMA = 84,
  BLOCKS = 88,
  // lane accesses for which a table of hotness had no room, and those to memory that no known tensor holds
  HOT_LOST = 89,
  HOT_OUTSIDE = 90,
  TMA = 91,
  // raised, not added up: ~time of the first block's begin, time of the last block's end, the worst requests
  NOT_BEGIN = 92,
  END = 93,
  WORST_GLOBAL = 94,
  WORST_SHARED = 95,
  WORDS = 96,
  WAYS = 8,
  // header: whether hotness is counted, address of the table of tensors
  HEADER = 8,
  // an entry: 2 MiB range + 1, lane accesses, one bit for each of its 512 pages of 4 KiB
  RANGES = 1024,
  RANGE_WORDS = 10,
  // an entry: tensor's number, lane accesses by way
  TENSORS = 128,
  TENSOR_WORDS = 9
};
enum Stride { IRREGULAR = 7 };
static const u32 PROBES = 32;

static __device__ __forceinline__ u64* way_of(void* slot)
{
  return (u64*)slot + HEADER + (sm_id() % WAYS) * WORDS;
}

// Neighbouring lanes add to neighbouring words: one transaction instead of four.
static __device__ __forceinline__ void add4(u64* to, u32 mask, u32 lane, u64 a, u64 b, u64 c, u64 d)
{
  u32 step = __popc(mask);
  for (u32 i = __popc(mask & ((1u << lane) - 1)); i < 4; i += step)
    atomicAdd(to + i, i == 0 ? a : i == 1 ? b : i == 2 ? c : d);
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

// Return the entry of a key that is not 0, new if need be; 0 where the table has no room near its place.
static __device__ __forceinline__ u64* entry_of(u64* table, u32 entries, u32 words, u64 key)
{
  u32 at = (u32)(key * 0x9e3779b97f4a7c15ull >> 40) % entries;
  for (u32 tried = 0; tried < PROBES; tried++, at = (at + 1) % entries) {
    u64* entry = table + at * words;
    u64 found = look(entry);
    if (found == 0) found = atomicCAS(entry, 0ull, key);
    if (found == 0 || found == key) return entry;
  }
  return 0;
}

// Return the number of the tensor that holds an address, 0 if none does. The table: how many, then begins in ascending
// order, ends, numbers.
static __device__ __forceinline__ u64 tensor_at(const u64* table, u64 address)
{
  u64 count = table[0], low = 0, high = count;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (table[1 + middle] <= address) low = middle + 1; else high = middle;
  }
  return low && address < table[count + low] ? table[2 * count + low] : 0;
}

// Count accesses to a place of at most 512 bytes (what the allocators of PyTorch and CuPy round to) that lies in one piece.
static __device__ __forceinline__ void heat(void* slot, u64* way, u64 address, u64 accesses)
{
  u64* ranges = (u64*)slot + HEADER + WAYS * WORDS;
  u64* range = entry_of(ranges, RANGES, RANGE_WORDS, (address >> 21) + 1);
  if (range) {
    u32 page = (u32)(address >> 12) & 511u;
    u64 bit = 1ull << (page & 63u);
    atomicAdd(range + 1, accesses);
    if (!(look(range + 2 + page / 64) & bit)) atomicOr(range + 2 + page / 64, bit);
  }
  const u64* table = (const u64*)((u64*)slot)[1];
  u64 tensor = table ? tensor_at(table, address) : 0;
  u64* entry = tensor ? entry_of(ranges + RANGES * RANGE_WORDS, TENSORS, TENSOR_WORDS, tensor) : 0;
  if (entry) atomicAdd(entry + 1 + (way - (u64*)slot - HEADER) / WORDS, accesses);
  if (!tensor) atomicAdd(way + HOT_OUTSIDE, accesses);
  if (!range || (tensor && !entry)) atomicAdd(way + HOT_LOST, accesses);
}

static __device__ __forceinline__ bool wants_heat(void* slot) { return ((u64*)slot)[0] != 0; }

// The lanes of a warp: one for all that meet in 512 bytes.
static __device__ __forceinline__ void heat_lanes(void* slot, u64* way, u32 mask, u32 lane, u64 address)
{
  u32 same = __match_any_sync(mask, address >> 9);
  if (is_first(same, lane)) heat(slot, way, address, __popc(same));
}

// Keep the request that took most transactions of all that took more than they had to, with its lanes' distance.
static __device__ __forceinline__ void note_worst(u64* word, u32 transactions, u32 best, u32 size, bool uniform, u64 units)
{
  u64 distance = uniform && units < 0xffffffffull ? units : 0xffffffffull;
  if (transactions > best) raise(word, (u64)transactions << 48 | (u64)size << 32 | distance);
}

extern "C" __device__ __noinline__ int PastaBegin(void* slot, u64 pc)
{
  if (!slot || !first_of_block()) return 0;
  u64* way = way_of(slot);
  atomicAdd(way + BLOCKS, (u64)1);
  raise(way + NOT_BEGIN, ~device_time());
  return 0;
}

extern "C" __device__ __noinline__ int PastaEnd(void* slot, u64 pc)
{
  if (slot && first_of_block()) raise(way_of(slot) + END, device_time());
  return 0;
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
    note_worst(way + WORST_GLOBAL, sectors, (lanes * size + 31) / 32, size, uniform, units);
  }
  if (wants_heat(slot)) heat_lanes(slot, way, mask, lane, address);
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
  u64* way = way_of(slot);
  add4(way + ASYNC_COPY, mask, lane, 1, __popc(mask), sectors, (u64)__popc(sources) * size);
  if (wants_heat(slot) && src) heat_lanes(slot, way, sources, lane, address);
  return 0;
}

// cp.async.bulk: one copy, named alike by every active lane; begins and sizes are multiples of 16 bytes. Half a kilobyte at a
// time is counted as one access for each 16 bytes.
static __device__ __forceinline__ void count_bulk(void* slot, u32 kind, u64 address, u64 size)
{
  u32 mask = __activemask(), lane = lane_id();
  u64 *way = way_of(slot), end = address + size;
  if (!is_first(mask, lane) || size == 0) return;
  add4(way + kind, 1u << lane, lane, 1, 1, ((end + 31) >> 5) - (address >> 5), size);
  if (!wants_heat(slot)) return;
  for (u64 from = address; from < end; from = (from | 511) + 1) {
    u64 to = (from | 511) + 1 < end ? (from | 511) + 1 : end;
    heat(slot, way, from, (to - from) / 16);
  }
}

// The low half of "size" counts blocks of 16 bytes; the high half is a multicast mask.
extern "C" __device__ __noinline__ int PastaBulkLoad(void* slot, u64 pc, u64 src, u32 dst, u32 barrier, u32 size, u32 multicast)
{
  if (slot) count_bulk(slot, BULK_LOAD, src, (u64)(size & 0xffffu) * 16);
  return 0;
}

extern "C" __device__ __noinline__ int PastaBulkStore(void* slot, u64 pc, u64 dst, u32 src, u32 size)
{
  if (slot) count_bulk(slot, BULK_STORE, dst, (u64)(size & 0xffffu) * 16);
  return 0;
}

// Copies by a tensor map: how many bytes one takes stands in the map, whose layout NVIDIA does not publish.
extern "C" __device__ __noinline__ int PastaTensorMap(void* slot, u64 pc, u64 map)
{
  if (slot && is_first(__activemask(), lane_id())) atomicAdd(way_of(slot) + TMA, (u64)1);
  return 0;
}

extern "C" __device__ __noinline__ int PastaRemoteShared(void* slot, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  if (!slot) return 0;
  u32 mask = __activemask(), lanes = __popc(mask);
  add4(way_of(slot) + REMOTE_SHARED, mask, lane_id(), 1, lanes, (u64)lanes * size, 0);
  return 0;
}

// wgmma: sizes are the bytes of the matrices that lie in shared memory; every lane of the warp group names the same ones.
extern "C" __device__ __noinline__ int PastaWarpgroup(void* slot, u64 pc, u32 a, u32 size_a, u32 b, u32 size_b, u32 flags, u32 warps)
{
  if (!slot) return 0;
  u32 mask = __activemask();
  if (warps) add4(way_of(slot) + WGMMA, mask, lane_id(), 1, size_a, size_b, 0);
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

// Returns the wavefronts.
static __device__ __forceinline__ u32 count_shared(u64* to, u32 mask, u32 lane, u32 address, u32 words, u32 parts)
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
  return wavefronts;
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
  u32 wavefronts = count_shared(way + (atomic ? SHARED_ATOMIC : kind), mask, lane, address, words, parts);
  if (atomic) {
    count_contention(way + SHARED_CONTENTION, mask, lane, address);
  } else if (is_first(mask, lane)) {
    atomicAdd(way + SHARED_STRIDE + shared_stride(uniform, units), (u64)1);
    note_worst(way + WORST_SHARED, wavefronts, phases_of(mask, parts), size, uniform, units);
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
