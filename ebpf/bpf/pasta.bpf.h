/* What every probe shares: maps, the link to the running thread's span, in-kernel aggregation, exact counters.
 *
 * One source serves two loaders: clang -target bpf (CO-RE), and bcc after `cpp -P -DPASTA_BCC`, whose rewriter cannot see
 * through C macros. Under bcc no field of a kernel structure may be read: its headers may be another kernel's. */
#ifndef PASTA_BPF_H
#define PASTA_BPF_H

#ifdef PASTA_BCC
#define HASH(name, key, value, entries) BPF_TABLE("hash", key, value, name, entries);
#define LRU_HASH(name, key, value, entries) BPF_TABLE("lru_hash", key, value, name, entries);
#define ARRAY(name, value, entries) BPF_TABLE("array", u32, value, name, entries);
#define PERCPU_ARRAY(name, value, entries) BPF_TABLE("percpu_array", u32, value, name, entries);
#define RING(name, pages) BPF_RINGBUF_OUTPUT(name, pages);
#define LOOKUP(map, key) map.lookup(key)
#define INSERT(map, key, value) map.insert(key, value)
#define UPDATE(map, key, value) map.update(key, value)
#define DELETE(map, key) map.delete(key)
#define RESERVE(ring, type) ring.ringbuf_reserve(sizeof(type))
#define SUBMIT(ring, event, how) ring.ringbuf_submit(event, how)
#define UPROBE(name, body)     /* the loader appends name_<cookie>() for every function, since bcc has no cookies */
#define URETPROBE(name, body) int name(struct pt_regs *ctx) { return body(ctx); }
#else
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/ptrace.h>
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#define MAP(kind, name, key_type, value_type, entries)                                                                  \
    struct {                                                                                                            \
        __uint(type, kind);                                                                                             \
        __uint(max_entries, entries);                                                                                   \
        __type(key, key_type);                                                                                          \
        __type(value, value_type);                                                                                      \
    } name SEC(".maps");
#define HASH(name, key, value, entries) MAP(BPF_MAP_TYPE_HASH, name, key, value, entries)
#define LRU_HASH(name, key, value, entries) MAP(BPF_MAP_TYPE_LRU_HASH, name, key, value, entries)
#define ARRAY(name, value, entries) MAP(BPF_MAP_TYPE_ARRAY, name, u32, value, entries)
#define PERCPU_ARRAY(name, value, entries) MAP(BPF_MAP_TYPE_PERCPU_ARRAY, name, u32, value, entries)
#define RING(name, pages)                                                                                               \
    struct {                                                                                                            \
        __uint(type, BPF_MAP_TYPE_RINGBUF);                                                                             \
        __uint(max_entries, (pages) * 4096);                                                                            \
    } name SEC(".maps");
#define LOOKUP(map, key) bpf_map_lookup_elem(&map, key)
#define INSERT(map, key, value) bpf_map_update_elem(&map, key, value, BPF_NOEXIST)
#define UPDATE(map, key, value) bpf_map_update_elem(&map, key, value, BPF_ANY)
#define DELETE(map, key) bpf_map_delete_elem(&map, key)
#define RESERVE(ring, type) bpf_ringbuf_reserve(&ring, sizeof(type), 0)
#define SUBMIT(ring, event, how) bpf_ringbuf_submit(event, how)
#define UPROBE(name, body)                                                                                              \
    SEC("uprobe") int name(struct pt_regs *ctx) { return body(ctx, bpf_get_attach_cookie(ctx)); }
#define URETPROBE(name, body)                                                                                           \
    SEC("uretprobe") int name(struct pt_regs *ctx) { return body(ctx); }
char LICENSE[] SEC("license") = "GPL";

/* the few fields of the kernel's structure that are read; CO-RE finds them where the running kernel has them */
struct task_struct {
    int pid;
    int tgid;
    int exit_code;
    unsigned int __state;
    unsigned in_iowait : 1;
} __attribute__((preserve_access_index));
#endif

/* atomic, though the counters are per CPU: a program of another thread may come in between on the same CPU */
#define ADD(counter) __sync_fetch_and_add(&(counter), 1)

#include "log2.bpf.h"

/* where an event's span came from; the order is that of ebpf/layout.py LINKS */
#define LINK_NONE 0         /* the thread has no span, or no slot */
#define LINK_SLOT 1         /* the span that the running thread had published */
#define LINK_STALE 2        /* published, but the app could not see its own task switches: not used */
#define LINK_UNREGISTERED 3 /* no process context of this process is known */

#define SLOT_SIZE 64
#define SLOT_PROBES 4

struct process {
    u64 slots;   /* address of the slot table in the process */
    u64 ns_dev;  /* its pid namespace, as stat() of /proc/PID/ns/pid gives it */
    u64 ns_ino;
    u32 mask;    /* slots - 1 */
    u32 watched; /* 1 = scheduling events of this process are wanted */
};

/* one thread's slot: the thread id as the process itself sees it, then an OTEP-4947 record of 28 bytes */
struct slot {
    u64 tid;
    u8 trace_id[16];
    u8 span_id[8];
    u8 valid;
    u8 trace_flags;
    u16 attributes_size;
    u32 state; /* 1 = the app cannot see its own task switches */
};

struct span_ref {
    u8 trace_id[16];
    u8 span_id[8];
    u32 how;
    u32 trace_flags;
};

struct aggregate_key {
    u8 trace_id[16];
    u8 span_id[8];
    u32 tgid;
    u16 api;
    u8 epoch;
    u8 how; /* LINK_*, with the sampled flag in bit 7 */
};

struct aggregate {
    u64 count;
    u64 sum_ns;
    u64 max_ns;
    u64 bytes;
    u64 first_ns; /* CLOCK_MONOTONIC */
    u64 last_ns;
    u32 tid;
    u32 unused;
    u32 histogram[HISTOGRAM];
};

struct event {
    u64 start_ns; /* CLOCK_MONOTONIC */
    u64 end_ns;
    u8 trace_id[16];
    u8 span_id[8];
    u32 tgid;
    u32 tid;
    u16 api;
    u8 how; /* LINK_*, with the sampled flag in bit 7 */
    u8 probe;
    u32 cpu;
    u64 bytes;
};

struct critical_event {
    u64 time_ns; /* CLOCK_MONOTONIC */
    u32 kind;
    u32 tgid;
    u32 tid;
    u32 value;
};

/* seen = filtered + submitted + full + unpaired, on every CPU and at every moment a program is not running */
struct counters {
    u64 seen;
    u64 filtered;
    u64 submitted;
    u64 full;
    u64 unpaired;
    /* of the submitted */
    u64 linked;
    u64 unlinked;
    u64 stale;
    u64 unregistered;
    /* of the submitted, those that were to leave as records */
    u64 ring_submitted;
    u64 ring_full;
};

struct settings {
    u32 epoch;
    u32 flags; /* 1 = count events of processes without a process context too */
};

struct limit {
    u64 slow_ns;     /* events that last at least this long leave as records; 0 = none by duration */
    u32 sample_mask; /* besides, one event in mask + 1 leaves as a record; 0xffffffff = none */
    u32 unused;
};

#define APIS 256
#define PROBES 16

HASH(processes, u32, struct process, 4096)
HASH(aggregates, struct aggregate_key, struct aggregate, 16384)
ARRAY(settings, struct settings, 1)
ARRAY(limits, struct limit, APIS)
PERCPU_ARRAY(counts, struct counters, PROBES)
RING(events, 256)
RING(critical, 16)

static __always_inline void find_span(u32 tgid, struct span_ref *found)
{
    struct process *process = LOOKUP(processes, &tgid);
    struct bpf_pidns_info here = {};
    struct slot slot = {};
    u64 base;
    u32 mask, i;

    found->how = LINK_UNREGISTERED;
    if (!process)
        return;
    found->how = LINK_NONE;
    if (!process->slots || bpf_get_ns_current_pid_tgid(process->ns_dev, process->ns_ino, &here, sizeof(here)))
        return;
    base = process->slots;
    mask = process->mask;
#pragma unroll
    for (i = 0; i < SLOT_PROBES; i++) {
        if (bpf_probe_read_user(&slot, sizeof(slot), (void *)(base + (u64)((here.pid + i) & mask) * SLOT_SIZE)))
            return;
        if (slot.tid == here.pid)
            break;
        if (!slot.tid)
            return;
    }
    if (slot.tid != here.pid || slot.valid != 1)
        return;
    if (slot.state) {
        found->how = LINK_STALE;
        return;
    }
    found->how = LINK_SLOT;
    found->trace_flags = slot.trace_flags;
    __builtin_memcpy(found->trace_id, slot.trace_id, sizeof(found->trace_id));
    __builtin_memcpy(found->span_id, slot.span_id, sizeof(found->span_id));
}

static __always_inline void count_link(struct counters *count, u32 how)
{
    if (how == LINK_SLOT)
        ADD(count->linked);
    else if (how == LINK_STALE)
        ADD(count->stale);
    else if (how == LINK_UNREGISTERED)
        ADD(count->unregistered);
    else
        ADD(count->unlinked);
}

/* Add one event to its (span, API) aggregate; returns 0 when the map was full. */
static __always_inline int aggregate_event(struct aggregate_key *key, u64 start, u64 end, u64 bytes, u32 tid)
{
    u64 duration = end - start;
    struct aggregate *sum = LOOKUP(aggregates, key);

    if (!sum) {
        struct aggregate fresh = {};
        fresh.first_ns = start;
        fresh.tid = tid;
        INSERT(aggregates, key, &fresh);
        sum = LOOKUP(aggregates, key);
        if (!sum)
            return 0;
    }
    __sync_fetch_and_add(&sum->count, 1);
    __sync_fetch_and_add(&sum->sum_ns, duration);
    __sync_fetch_and_add(&sum->bytes, bytes);
    __sync_fetch_and_add(&sum->histogram[log2_bucket(duration) & (HISTOGRAM - 1)], 1);
    if (duration > sum->max_ns) /* threads of one span race here: a lost maximum is one of two near ones */
        sum->max_ns = duration;
    if (end > sum->last_ns)
        sum->last_ns = end;
    return 1;
}

static __always_inline void send_event(struct counters *count, struct aggregate_key *key, u64 start, u64 end, u64 bytes,
                                       u32 tid, u32 probe)
{
    struct event *event = RESERVE(events, struct event);

    if (!event) {
        ADD(count->ring_full);
        return;
    }
    event->start_ns = start;
    event->end_ns = end;
    __builtin_memcpy(event->trace_id, key->trace_id, sizeof(event->trace_id));
    __builtin_memcpy(event->span_id, key->span_id, sizeof(event->span_id));
    event->tgid = key->tgid;
    event->tid = tid;
    event->api = key->api;
    event->how = key->how;
    event->probe = probe;
    event->cpu = bpf_get_smp_processor_id();
    event->bytes = bytes;
    SUBMIT(events, event, BPF_RB_NO_WAKEUP); /* the agent comes by itself: waking it up costs the caller */
    ADD(count->ring_submitted);
}

/* One event of a known span (or of none): aggregated always, a record when slow or sampled. */
static __always_inline void record(u32 probe, u32 api, u64 start, u64 end, u64 bytes, u32 tgid, u32 tid,
                                   struct span_ref *span)
{
    u32 zero = 0;
    struct counters *count = LOOKUP(counts, &probe);
    struct settings *now = LOOKUP(settings, &zero);
    struct limit *limit = LOOKUP(limits, &api);
    struct aggregate_key key = {};

    if (!count || !now || !limit)
        return;
    ADD(count->seen);
    if (span->how == LINK_UNREGISTERED && !(now->flags & 1)) {
        ADD(count->filtered);
        return;
    }
    key.tgid = tgid;
    key.api = api;
    key.epoch = now->epoch;
    key.how = span->how;
    if (span->how == LINK_SLOT) {
        key.how |= (span->trace_flags & 1) << 7;
        __builtin_memcpy(key.trace_id, span->trace_id, sizeof(key.trace_id));
        __builtin_memcpy(key.span_id, span->span_id, sizeof(key.span_id));
    }
    if (!aggregate_event(&key, start, end, bytes, tid)) {
        ADD(count->full);
        return;
    }
    ADD(count->submitted);
    count_link(count, span->how);
    if ((limit->slow_ns && end - start >= limit->slow_ns) ||
        (limit->sample_mask != 0xffffffff && (bpf_get_prandom_u32() & limit->sample_mask) == 0))
        send_event(count, &key, start, end, bytes, tid, probe);
}

/* An event that is no event of ours after all. */
static __always_inline void count_unpaired(u32 probe)
{
    struct counters *count = LOOKUP(counts, &probe);

    if (count) {
        ADD(count->seen);
        ADD(count->unpaired);
    }
}

static __always_inline void count_full(u32 probe)
{
    struct counters *count = LOOKUP(counts, &probe);

    if (count) {
        ADD(count->seen);
        ADD(count->full);
    }
}

static __always_inline void count_filtered(u32 probe)
{
    struct counters *count = LOOKUP(counts, &probe);

    if (count) {
        ADD(count->seen);
        ADD(count->filtered);
    }
}

#endif
