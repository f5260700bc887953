/* The histogram's buckets. Apart from the rest, so that a test compiles it and tries every bucket's ends. */
#ifndef PASTA_LOG2_BPF_H
#define PASTA_LOG2_BPF_H

#define HISTOGRAM 32
#define HISTOGRAM_SHIFT 5 /* bucket i holds durations below 2^(i + 5) ns; the last one everything above */

/* 1 << shift where units, a u32, have more bits than that; else 0. Without a branch: the verifier would follow both of
 * its ways, 63 times in every program that records, for half of the time that loading takes. */
static __always_inline u64 log2_step(u64 units, u32 shift)
{
    u64 room = (1ULL << (1 << shift)) - 1;

    room -= units;
    asm volatile("" : "+r"(room)); /* the compiler would see that only its sign is used, and branch on it */
    return room >> 63 << shift;
}

static __always_inline u32 log2_bucket(u64 ns)
{
    u64 units = ns >> HISTOGRAM_SHIFT;
    u64 bucket, step;

    if (units >> 32)
        return HISTOGRAM - 1;
    bucket = log2_step(units, 4);
    units >>= bucket;
    step = log2_step(units, 3);
    units >>= step;
    bucket += step;
    step = log2_step(units, 2);
    units >>= step;
    bucket += step;
    step = log2_step(units, 1);
    units >>= step;
    bucket += step;
    step = log2_step(units, 0);
    units >>= step;
    bucket += step + units; /* units are 1 now, or were 0 all the time: bucket 0, below 32 ns */
    return bucket < HISTOGRAM ? bucket : HISTOGRAM - 1;
}

#endif
