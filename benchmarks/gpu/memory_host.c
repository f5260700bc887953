// Analysis on the host in one thread: for accesses to global memory the same numbers that the device functions count.
#include <stddef.h>
#include <stdint.h>

struct record {
  uint32_t mask, size, flags, unused;
  uint64_t address[32];
};
struct answer {
  uint64_t totals[3][4];  // loads, stores, atomics: requests, lanes, sectors, bytes
  uint64_t strides[8], contention[2], worst;
};

static unsigned distinct(const struct record* one, unsigned shift)
{
  uint64_t seen[32];
  unsigned found = 0;
  for (uint32_t rest = one->mask; rest; rest &= rest - 1) {
    uint64_t value = one->address[__builtin_ctz(rest)] >> shift;
    unsigned known = found;
    while (known && seen[known - 1] != value) known--;  // neighbours share values: look at the latest first
    if (!known) seen[found++] = value;
  }
  return found;
}

// Distance between neighbouring lanes in accesses; -1 where it is not the same for all.
static int64_t distance(const struct record* one)
{
  unsigned first = __builtin_ctz(one->mask);
  uint32_t rest = one->mask & (one->mask - 1);
  unsigned second = rest ? __builtin_ctz(rest) : first;
  int64_t stride = second > first ? (int64_t)(one->address[second] - one->address[first]) / (int64_t)(second - first) : 0;
  if (stride & (one->size - 1)) return -1;
  for (rest = one->mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    if (one->address[lane] != one->address[first] + (uint64_t)(stride * (int64_t)(lane - (int)first))) return -1;
  }
  return (stride < 0 ? -stride : stride) / one->size;
}

static unsigned class_of(int64_t units)
{
  if (units < 0) return 7;
  return units <= 2 ? (unsigned)units : units <= 4 ? 3 : units <= 8 ? 4 : units <= 32 ? 5 : 6;
}

static unsigned depth(const struct record* one)
{
  unsigned most = 0;
  for (uint32_t rest = one->mask; rest; rest &= rest - 1) {
    unsigned same = 0;
    for (uint32_t other = one->mask; other; other &= other - 1)
      same += one->address[__builtin_ctz(other)] == one->address[__builtin_ctz(rest)];
    if (same > most) most = same;
  }
  return most;
}

void analyse(const struct record* records, size_t count, struct answer* answer)
{
  for (size_t at = 0; at < count; at++) {
    const struct record* one = records + at;
    unsigned sectors = distinct(one, 5), lanes = __builtin_popcount(one->mask), both = one->flags & 3;
    uint64_t* total = answer->totals[both == 3 ? 2 : both == 2 ? 1 : 0];
    total[0]++;
    total[1] += lanes;
    total[2] += sectors;
    total[3] += (uint64_t)lanes * one->size;
    if (both == 3) {
      answer->contention[0] += distinct(one, 0);
      answer->contention[1] += depth(one);
      continue;
    }
    int64_t units = distance(one);
    answer->strides[class_of(units)]++;
    if (sectors > (lanes * one->size + 31) / 32) {
      uint64_t far = units < 0 || units >= 0xffffffff ? 0xffffffff : (uint64_t)units;
      uint64_t worst = (uint64_t)sectors << 48 | (uint64_t)one->size << 32 | far;
      if (worst > answer->worst) answer->worst = worst;
    }
  }
}

void bounds(const struct record* records, size_t count, uint64_t* low_high)
{
  low_high[0] = ~0ull;
  for (size_t at = 0; at < count; at++)
    for (uint32_t rest = records[at].mask; rest; rest &= rest - 1) {
      uint64_t address = records[at].address[__builtin_ctz(rest)];
      if (address < low_high[0]) low_high[0] = address;
      if (address > low_high[1]) low_high[1] = address;
    }
}

// Lane accesses by 2 MiB range and bits of 4 KiB pages, from "base" on, and lane accesses to tensors (begins, ends).
void heat(const struct record* records, size_t count, uint64_t base, uint64_t* ranges, uint8_t* pages, size_t tensors,
          const uint64_t* begins, const uint64_t* ends, uint64_t* accesses)
{
  for (size_t at = 0; at < count; at++)
    for (uint32_t rest = records[at].mask; rest; rest &= rest - 1) {
      uint64_t address = records[at].address[__builtin_ctz(rest)];
      ranges[(address - base) >> 21]++;
      pages[(address - base) >> 12] = 1;
      size_t low = 0, high = tensors;
      while (low < high) {
        size_t middle = (low + high) / 2;
        if (begins[middle] <= address) low = middle + 1; else high = middle;
      }
      if (low && address < ends[low - 1]) accesses[low - 1]++;
    }
}
