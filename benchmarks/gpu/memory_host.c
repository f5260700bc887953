// Analysis on the host in one thread: requests, lanes, sectors and bytes of loads, stores and atomics.
#include <stddef.h>
#include <stdint.h>

struct record {
  uint32_t mask, size, flags, unused;
  uint64_t address[32];
};

void analyse(const struct record* records, size_t count, uint64_t totals[3][4])
{
  for (size_t at = 0; at < count; at++) {
    const struct record* one = records + at;
    uint64_t seen[32];
    unsigned sectors = 0;
    for (uint32_t rest = one->mask; rest; rest &= rest - 1) {
      uint64_t sector = one->address[__builtin_ctz(rest)] >> 5;
      unsigned known = sectors;
      // neighbours share sectors: look at the latest first
      while (known && seen[known - 1] != sector) known--;
      if (!known) seen[sectors++] = sector;
    }
    uint32_t both = one->flags & 3;
    uint64_t* total = totals[both == 3 ? 2 : both == 2 ? 1 : 0];
    unsigned lanes = __builtin_popcount(one->mask);
    total[0]++;
    total[1] += lanes;
    total[2] += sectors;
    total[3] += (uint64_t)lanes * one->size;
  }
}
