// What analysis on the host needs: every access of every warp, written to a buffer in device memory.
typedef unsigned int u32;
typedef unsigned long long u64;

struct Record {
  u32 mask, size, flags, unused;
  u64 address[32];
};
struct Buffer {
  u64 count, capacity;
  Record records[1];
};

extern "C" __device__ __noinline__ int TraceGlobal(void* to, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  Buffer* buffer = (Buffer*)to;
  if (!buffer) return 0;
  u32 mask = __activemask(), lane, leader = __ffs(mask) - 1;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  u64 index = lane == leader ? atomicAdd(&buffer->count, 1ULL) : 0;
  index = __shfl_sync(mask, index, leader);
  if (index >= buffer->capacity) return 0;
  Record* record = buffer->records + index;
  record->address[lane] = (u64)ptr;
  if (lane == leader) {
    record->mask = mask;
    record->size = size;
    record->flags = flags;
  }
  return 0;
}
