// Counts the NaN and infinities that a GPU kernel stores to global memory, and keeps where the first one went.
#include "patch.cuh"

// One slot a launch, in words of 8 bytes; nonfinite.py has the same. The first three are its header: what a number looks like.
enum Word { BYTES, EXPONENT, FRACTION, STORED, NAN_STORED, NEGATIVE_NAN, INFINITE, FIRST_ADDRESS, FIRST_TIME };

// The bits of a stored number; no value is known to be aligned to more than 4 bytes.
static __device__ __forceinline__ u64 bits_at(const void* data, u32 at, u64 bytes)
{
  const char* from = (const char*)data + at;
  if (bytes == 2) return *(const unsigned short*)from;
  u64 low = *(const u32*)from;
  return bytes == 4 ? low : low | (u64)((const u32*)from)[1] << 32;
}

// The Sanitizer calls this before every access to global memory, in each lane that makes it. "data" points to the value of a
// store; for loads it means something else, and atomics have none.
extern "C" __device__ __noinline__ int NonFiniteStore(void* slot, u64 pc, void* ptr, u32 size, u32 flags, const void* data)
{
  if (!slot || !(flags & WRITE) || is_atomic(flags) || !data) return 0;
  u64* word = (u64*)slot;
  u64 bytes = constant(word + BYTES), exponent = constant(word + EXPONENT), fraction = constant(word + FRACTION);
  u32 mask = __activemask(), numbers = size / (u32)bytes;  // a wide store has several
  if (is_first(mask, lane_id())) add(word + STORED, (u64)__popc(mask) * numbers);  // one lane for all
  for (u32 number = 0; number < numbers; number++) {
    u64 bits = bits_at(data, number * (u32)bytes, bytes);
    if ((bits & exponent) != exponent) continue;
    bool negative = bits & ~(exponent | fraction);
    add(word + (!(bits & fraction) ? INFINITE : negative ? NEGATIVE_NAN : NAN_STORED), 1);
    if (look(word + FIRST_ADDRESS)) continue;  // claiming costs an atomic operation: only while nobody has
    if (claim(word + FIRST_ADDRESS, (u64)ptr + number * bytes) == 0) word[FIRST_TIME] = device_time();
  }
  return 0;
}
