// Counts what a GPU kernel does to memory, beside it: the Sanitizer API calls these functions at every access, and only
// the sums leave the device. Needs no header of NVIDIA's; the signatures are those of sanitizer_patching.h, as far as
// all versions of CUDA 12 and 13 agree on them.
// tests/unit/test_memory_patch.py compiles this same file for the CPU, with the warp's intrinsics emulated.
#include "patch.cuh"

// One slot a launch: a header; WAYS copies of WORDS counters, by multiprocessor, because atomics that queue on one address
// take most of the time; then, where the header asks for hotness, its tables. slots.py has the same layout; a test compares.
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
  WAYS = 128,
  // header: whether hotness is counted, address of the table of tensors
  HEADER = 8,
  // an entry: 2 MiB range + 1, lane accesses, one bit for each of its 512 pages of 4 KiB
  RANGES = 1024,
  RANGE_WORDS = 10,
  // an entry: tensor's number, lane accesses in ways of their own
  TENSORS = 128,
  TENSOR_WAYS = 31,
  TENSOR_WORDS = 32
};
enum Stride { IRREGULAR = 7 };
static const u32 PROBES = 32, APART = 0xffffffffu;

static __device__ __forceinline__ u64* way_of(void* slot)
{
  return (u64*)slot + HEADER + (sm_id() % WAYS) * WORDS;
}

// Neighbouring lanes add to neighbouring words: one transaction instead of four.
static __device__ __forceinline__ void add4(u64* to, u32 mask, u32 lane, u32 a, u32 b, u32 c, u32 d)
{
  u32 step = __popc(mask);
#pragma unroll 1
  for (u32 i = __popc(mask & ((1u << lane) - 1)); i < 4; i += step)
    add(to + i, i == 0 ? a : i == 1 ? b : i == 2 ? c : d);
}

// A request's addresses lie near each other, nearly always: then they are 32-bit distances from that of its first lane, which
// takes half the registers. Registers are what a device function costs most: its caller keeps them in memory meanwhile.
static __device__ __forceinline__ u64 first_of(u32 mask, u64 address) { return __shfl_sync(mask, address, __ffs(mask) - 1); }

static __device__ __forceinline__ bool all_near(u32 mask, u64 address, u64 from)
{
  long long far = (long long)(address - from);
  return __all_sync(mask, far > -(1ll << 30) && far < 1ll << 30);
}

// Distance between neighbouring lanes in units of the access size, a power of two; APART where it is not the same for all.
template <typename Distance> static __device__ __forceinline__ u32 units_of(u32 mask, u32 lane, Distance near, u32 size)
{
  u32 first = __ffs(mask) - 1, rest = mask & (mask - 1), second = rest ? __ffs(rest) - 1 : first;
  Distance stride = __shfl_sync(mask, near, second);
  if (second > first + 1) stride /= (Distance)(second - first);
  bool fits = near == stride * (Distance)(lane - first) && !((u32)stride & (size - 1));
  u64 units = (u64)(stride < 0 ? -stride : stride) >> (__ffs(size) - 1);
  return !__all_sync(mask, fits) ? APART : units < APART ? (u32)units : APART - 1;
}

// Count the distinct sectors of the lanes that are chosen of a warp's active ones.
static __device__ __forceinline__ u32 sectors_of(u32 mask, u32 lane, u64 address, u64 from, bool near, u32 chosen)
{
  u32 same = near ? __match_any_sync(mask, (u32)((int)(((u32)from & 31u) + (u32)(address - from)) >> 5))
                  : __match_any_sync(mask, address >> 5);
  return __popc(__ballot_sync(mask, (chosen >> lane & 1) && is_first(same & chosen, lane)));
}

// 0 one address, 1 adjacent, 2 every second, 3 up to 4, 4 up to 8, 5 up to 32, 6 farther, 7 irregular
static __device__ __forceinline__ u32 global_stride(u32 units)
{
  if (units == APART) return IRREGULAR;
  return units <= 2 ? units : units <= 4 ? 3 : units <= 8 ? 4 : units <= 32 ? 5 : 6;
}

// 0 one address, 1 odd, then by the power of two that divides it: 2 -> 2, 4 -> 3, 8 -> 4, 16 -> 5, 32 and more -> 6
static __device__ __forceinline__ u32 shared_stride(u32 units)
{
  if (units == APART) return IRREGULAR;
  u32 low = units & 63u;
  if (units == 0) return 0;
  return low == 0 ? 6 : min(__ffs(low), 6);
}

static __device__ __noinline__ void count_contention(u64* to, u32 mask, u32 lane, u64 address)
{
  u32 same = __match_any_sync(mask, address), lanes = __popc(same);
  u32 addresses = __popc(__ballot_sync(mask, is_first(same, lane)));
  u32 depth = 0;
  while (__any_sync(mask, lanes > depth)) depth++;
  if (is_first(mask, lane)) {
    add(to, (u64)addresses);
    add(to + 1, (u64)depth);
  }
}

// Return the entry of a key that is not 0, new if need be; 0 where the table has no room near its place.
static __device__ __forceinline__ u64* entry_of(u64* table, u32 entries, u32 words, u64 key)
{
  u32 at = (u32)(key * 0x9e3779b97f4a7c15ull >> 40) % entries;
#pragma unroll 1
  for (u32 tried = 0; tried < PROBES; tried++, at = (at + 1) % entries) {
    u64* entry = table + at * words;
    u64 found = look(entry);
    if (found == 0) found = claim(entry, key);
    if (found == 0 || found == key) return entry;
  }
  return 0;
}

// Return the number of the tensor that holds an address, 0 if none does, and the bounds of the tensor or of the gap. The table:
// how many, then begins in ascending order, ends, numbers.
static __device__ __forceinline__ u64 tensor_at(const u64* table, u64 address, u64* begin, u64* end)
{
  u64 count = table ? constant(table) : 0, low = 0, high = count;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (constant(table + 1 + middle) <= address) low = middle + 1; else high = middle;
  }
  bool inside = low && address < constant(table + count + low);
  *begin = !low ? 0 : constant(table + (inside ? low : count + low));
  *end = inside ? constant(table + count + low) : low < count ? constant(table + 1 + low) : ~0ull;
  return inside ? constant(table + 2 * count + low) : 0;
}

static __device__ __forceinline__ u64* ranges_of(void* slot) { return (u64*)slot + HEADER + WAYS * WORDS; }

// Note accesses to one 2 MiB range; false where there is no room.
static __device__ __forceinline__ u64* heat_range(void* slot, u64 address, u64 accesses)
{
  u64* range = entry_of(ranges_of(slot), RANGES, RANGE_WORDS, (address >> 21) + 1);
  if (range) add(range + 1, accesses);
  return range;
}

static __device__ __forceinline__ void heat_page(u64* range, u64 address)
{
  u32 page = (u32)(address >> 12) & 511u;
  u64 bit = 1ull << (page & 63u);
  if (!(look(range + 2 + page / 64) & bit)) set_bits(range + 2 + page / 64, bit);
}

static __device__ __forceinline__ void heat_tensor(void* slot, u64* way, u64 number, u64 accesses)
{
  u64* entry = number ? entry_of(ranges_of(slot) + RANGES * RANGE_WORDS, TENSORS, TENSOR_WORDS, number) : 0;
  if (entry) add(entry + 1 + sm_id() % TENSOR_WAYS, accesses);
  if (!number) add(way + HOT_OUTSIDE, accesses);
  if (number && !entry) add(way + HOT_LOST, accesses);
}

static __device__ __forceinline__ bool wants_heat(void* slot) { return constant((u64*)slot) != 0; }
static __device__ __forceinline__ const u64* tensors_of(void* slot) { return (const u64*)constant((u64*)slot + 1); }

// The lanes of a warp, nearly always in one range and in one tensor: one turn of each loop. All lanes take all turns. A function
// of its own, so that its caller saves fewer registers where no hotness is wanted.
static __device__ __noinline__ void heat_lanes(void* slot, u32 mask, u32 lane, u64 address)
{
  u64 range = 0, begin, end, *way = way_of(slot);
  u32 pages = __match_any_sync(mask, address >> 12);
  for (u32 left = mask; left;) {
    u32 leader = __ffs(left) - 1;
    u32 group = __ballot_sync(mask, address >> 21 == __shfl_sync(mask, address, leader) >> 21) & left;
    u64 entry = lane == leader ? (u64)heat_range(slot, address, __popc(group)) : 0;
    entry = __shfl_sync(mask, entry, leader);
    if (group >> lane & 1) range = entry;
    if (lane == leader && !entry) add(way + HOT_LOST, (u64)__popc(group));
    left &= ~group;
  }
  if (range && is_first(pages, lane)) heat_page((u64*)range, address);
  for (u32 left = mask; left;) {
    u32 leader = __ffs(left) - 1;
    u64 number = lane == leader ? tensor_at(tensors_of(slot), address, &begin, &end) : 0;
    u64 from = __shfl_sync(mask, begin, leader), to = __shfl_sync(mask, end, leader);
    u32 group = __ballot_sync(mask, from <= address && address < to) & left;
    if (lane == leader) heat_tensor(slot, way, number, __popc(group));
    left &= ~group;
  }
}

static __device__ __forceinline__ int within_reach(u64 bound, u64 from)
{
  const long long reach = 1ll << 30;
  long long far = (long long)(bound - from);
  return (int)(far < -reach ? -reach : far > reach ? reach : far);
}

// The same where all lanes lie in one range and in one tensor, as they nearly always do: the first lane does it for all. Return
// whether they did.
static __device__ __noinline__ bool heat_together(void* slot, u32 mask, u32 lane, u64 from, int near)
{
  u64 number = 0, range = 0;
  int low = 0, high = 0;
  if (is_first(mask, lane)) {
    u64 begin, end, two_mib = from >> 21 << 21;
    number = tensor_at(tensors_of(slot), from, &begin, &end);
    low = within_reach(begin > two_mib ? begin : two_mib, from);
    high = within_reach(end < two_mib + (1 << 21) ? end : two_mib + (1 << 21), from);
  }
  low = __shfl_sync(mask, low, __ffs(mask) - 1);
  high = __shfl_sync(mask, high, __ffs(mask) - 1);
  if (!__all_sync(mask, low <= near && near < high)) return false;
  bool one_page = __all_sync(mask, (((int)(from & 4095u) + near) >> 12) == 0);
  if (is_first(mask, lane)) {
    u64* way = way_of(slot);
    range = (u64)heat_range(slot, from, __popc(mask));
    if (!range) add(way + HOT_LOST, (u64)__popc(mask));
    heat_tensor(slot, way, number, __popc(mask));
    if (range && one_page) heat_page((u64*)range, from);
  }
  if (one_page) return true;
  range = first_of(mask, range);
  u32 same = __match_any_sync(mask, ((int)(from & 4095u) + near) >> 12);
  if (range && is_first(same, lane)) heat_page((u64*)range, from + (u64)(long long)near);
  return true;
}

// Keep the request that took most transactions of all that took more than they had to, with its lanes' distance.
static __device__ __forceinline__ void note_worst(u64* word, u32 transactions, u32 best, u32 size, u32 units)
{
  if (transactions > best) raise(word, (u64)transactions << 48 | (u64)size << 32 | units);
}

extern "C" __device__ __noinline__ int PastaBegin(void* slot, u64 pc)
{
  if (!slot || !first_of_block()) return 0;
  u64* way = way_of(slot);
  add(way + BLOCKS, (u64)1);
  raise(way + NOT_BEGIN, ~device_time());
  return 0;
}

extern "C" __device__ __noinline__ int PastaEnd(void* slot, u64 pc)
{
  if (slot && first_of_block()) raise(way_of(slot) + END, device_time());
  return 0;
}

// Every path calls another function at its end or not at all: what lives across a call must be kept in memory.
static __device__ __noinline__ int heat_warp(void* slot, u32 mask, u64 address)
{
  u32 lane = lane_id();
  u64 from = first_of(mask, address);
  if (!all_near(mask, address, from) || !heat_together(slot, mask, lane, from, (int)(address - from)))
    heat_lanes(slot, mask, lane, address);
  return 0;
}

static __device__ __noinline__ int global_atomic(void* slot, u32 mask, u64 address, u32 size)
{
  u32 lane = lane_id(), lanes = __popc(mask);
  add4(way_of(slot) + GLOBAL_ATOMIC, mask, lane, 1, lanes, sectors_of(mask, lane, address, 0, false, mask), lanes * size);
  count_contention(way_of(slot) + GLOBAL_CONTENTION, mask, lane, address);
  return wants_heat(slot) ? heat_warp(slot, mask, address) : 0;
}

// A load or a store of so many sectors.
static __device__ __forceinline__ void count_global(void* slot, u32 mask, u32 lane, u32 size, u32 flags, u32 sectors, u32 units)
{
  u32 lanes = __popc(mask);
  u64* way = way_of(slot);
  add4(way + ((flags & WRITE) ? GLOBAL_STORE : GLOBAL_LOAD), mask, lane, 1, lanes, sectors, lanes * size);
  if (!is_first(mask, lane)) return;
  add(way + GLOBAL_STRIDE + global_stride(units), (u64)1);
  note_worst(way + WORST_GLOBAL, sectors, (lanes * size + 31) / 32, size, units);
}

// A warp whose lanes are more than 1 GiB apart.
static __device__ __noinline__ int global_far(void* slot, u32 mask, u64 address, u32 size, u32 flags)
{
  u32 lane = lane_id(), sectors = sectors_of(mask, lane, address, 0, false, mask);
  u32 units = units_of<long long>(mask, lane, (long long)(address - first_of(mask, address)), size);
  count_global(slot, mask, lane, size, flags, sectors, units);
  return wants_heat(slot) ? heat_warp(slot, mask, address) : 0;
}

extern "C" __device__ __noinline__ int PastaGlobal(void* slot, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  if (!slot || (flags & PREFETCH)) return 0;
  u32 mask = __activemask(), lane = lane_id();
  if (is_atomic(flags)) return global_atomic(slot, mask, (u64)ptr, size);
  u64 from = first_of(mask, (u64)ptr);
  if (!all_near(mask, (u64)ptr, from)) return global_far(slot, mask, (u64)ptr, size, flags);
  u32 sectors = sectors_of(mask, lane, (u64)ptr, from, true, mask);
  count_global(slot, mask, lane, size, flags, sectors, units_of<int>(mask, lane, (int)((u64)ptr - from), size));
  return wants_heat(slot) ? heat_warp(slot, mask, (u64)ptr) : 0;
}

// cp.async: a lane whose source size is 0 has no source and touches no sector. The arguments are those that every version
// passes: a sixth, the size of the zero-filled tail, stands only in the headers of 13.5; before, that register holds whatever
// it held (on an H200 with CUDA 13.0, not less than the access' size). So a partly filled lane counts in full.
extern "C" __device__ __noinline__ int PastaAsyncCopy(void* slot, u64 pc, void* src, u32 dst, u32 size)
{
  if (!slot) return 0;
  u64 address = (u64)src;
  u32 mask = __activemask(), lane = lane_id(), sources = __ballot_sync(mask, src != 0);
  u32 sectors = sectors_of(mask, lane, address, 0, false, sources);
  add4(way_of(slot) + ASYNC_COPY, mask, lane, 1, __popc(mask), sectors, __popc(sources) * size);
  return src && wants_heat(slot) ? heat_warp(slot, sources, address) : 0;
}

// cp.async.bulk: one copy, named alike by every active lane; begins and sizes are multiples of 16 bytes, and each 16 bytes are
// one access.
static __device__ __forceinline__ void count_bulk(void* slot, u32 kind, u64 address, u64 size)
{
  u32 mask = __activemask(), lane = lane_id();
  u64 *way = way_of(slot), end = address + size;
  if (!is_first(mask, lane) || size == 0) return;
  add4(way + kind, 1u << lane, lane, 1, 1, (u32)(((end + 31) >> 5) - (address >> 5)), (u32)size);
  if (!wants_heat(slot)) return;
  for (u64 from = address; from < end; from = (from | 4095) + 1) {  // page by page
    u64 to = (from | 4095) + 1 < end ? (from | 4095) + 1 : end, *range = heat_range(slot, from, (to - from) / 16);
    if (range) heat_page(range, from); else add(way + HOT_LOST, (to - from) / 16);
  }
  for (u64 from = address, begin, to; from < end; from = to) {  // tensor by tensor
    u64 number = tensor_at(tensors_of(slot), from, &begin, &to);
    heat_tensor(slot, way, number, ((to < end ? to : end) - from) / 16);
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
  if (slot && is_first(__activemask(), lane_id())) add(way_of(slot) + TMA, (u64)1);
  return 0;
}

extern "C" __device__ __noinline__ int PastaRemoteShared(void* slot, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  if (!slot) return 0;
  u32 mask = __activemask(), lanes = __popc(mask);
  add4(way_of(slot) + REMOTE_SHARED, mask, lane_id(), 1, lanes, lanes * size, 0);
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

static __device__ __noinline__ int shared_atomic(void* slot, u32 mask, u32 address, u32 words)
{
  u32 lane = lane_id();
  count_shared(way_of(slot) + SHARED_ATOMIC, mask, lane, address, words, words);
  count_contention(way_of(slot) + SHARED_CONTENTION, mask, lane, address);
  return 0;
}

extern "C" __device__ __noinline__ int PastaShared(void* slot, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  if (!slot) return 0;
  u32 address = (u32)(u64)ptr, words = size <= 4 ? 1 : size / 4;
  u32 mask = __activemask(), lane = lane_id();
  if (is_atomic(flags)) return shared_atomic(slot, mask, address, words);
  u32 units = units_of<int>(mask, lane, (int)(address - __shfl_sync(mask, address, __ffs(mask) - 1)), size);
  u64* way = way_of(slot);
  u32 kind = (flags & WRITE ? SHARED_STORE_4 : SHARED_LOAD_4) + (words == 1 ? 0 : words == 2 ? 4 : 8);
  bool merges = words > 1 && !(flags & WRITE) && pairs_share(mask, lane, address);
  u32 parts = merges ? words / 2 : words;
  u32 wavefronts = count_shared(way + kind, mask, lane, address, words, parts);
  if (is_first(mask, lane)) {
    add(way + SHARED_STRIDE + shared_stride(units), (u64)1);
    note_worst(way + WORST_SHARED, wavefronts, phases_of(mask, parts), size, units);
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
