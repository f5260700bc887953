/* Calls of the CUDA driver: entry and return on libcuda.so.1. Which functions, and their cookies: cuda.yaml.
 *
 * cookie: bits 0..15 API number, 16..19 which argument is a size (0 = none), 20..23 log2 of the element size. */
#include "pasta.bpf.h"

#define PROBE_CALL 0
#define PROBE_LAUNCH 1
#define LAUNCHES 16 /* API numbers below this are launches: they have counters of their own */

/* bytes that the return pops; with bcc this is known only where it compiles */
#ifdef PASTA_BCC
#define RETURN_ADDRESS PASTA_RETURN_ADDRESS
#elif defined(__TARGET_ARCH_arm64)
#define RETURN_ADDRESS 0
#else
#define RETURN_ADDRESS 8
#endif

struct call_key {
    u64 thread;
    u64 stack; /* tells nested calls of one thread apart */
};

struct call {
    u64 start_ns;
    u64 bytes;
    u64 api;
};

LRU_HASH(calls, struct call_key, struct call, 16384) /* a call that never returns leaves by age */

static __always_inline u64 size_of(struct pt_regs *ctx, u64 cookie)
{
    u64 second = PT_REGS_PARM2(ctx);
    u64 third = PT_REGS_PARM3(ctx);
    u32 argument = (cookie >> 16) & 15;
    u64 size = argument == 2 ? second : 0;

    /* keeps both reads: the compiler would read from a chosen address instead, which the verifier does not allow */
    asm volatile("" : "+r"(second), "+r"(third));
    if (argument == 3)
        size = third;
    return size << ((cookie >> 20) & 15);
}

static __always_inline u32 probe_of(u32 api)
{
    return api < LAUNCHES ? PROBE_LAUNCH : PROBE_CALL;
}

static __always_inline int call_entry_body(struct pt_regs *ctx, u64 cookie)
{
    struct call_key key = {};
    struct call call = {};

    key.thread = bpf_get_current_pid_tgid();
    key.stack = PT_REGS_SP(ctx);
    call.api = cookie & 0xffff;
    call.bytes = size_of(ctx, cookie);
    call.start_ns = bpf_ktime_get_ns();
    if (UPDATE(calls, &key, &call))
        count_full(probe_of(call.api));
    return 0;
}

static __always_inline int call_return_body(struct pt_regs *ctx)
{
    u64 end = bpf_ktime_get_ns();
    struct span_ref span = {};
    struct call_key key = {};
    struct call *call;

    key.thread = bpf_get_current_pid_tgid();
    key.stack = PT_REGS_SP(ctx) - RETURN_ADDRESS;
    call = LOOKUP(calls, &key);
    if (!call) {
        count_unpaired(PROBE_CALL);
        return 0;
    }
    find_span(key.thread >> 32, &span);
    record(probe_of(call->api), call->api, call->start_ns, end, call->bytes, key.thread >> 32, key.thread, &span);
    DELETE(calls, &key);
    return 0;
}

/* Entry alone, where return probes are unsafe or too dear: counts and links, no duration. */
static __always_inline int call_count_body(struct pt_regs *ctx, u64 cookie)
{
    u64 now = bpf_ktime_get_ns();
    u64 thread = bpf_get_current_pid_tgid();
    struct span_ref span = {};
    u32 api = cookie & 0xffff;

    find_span(thread >> 32, &span);
    record(probe_of(api), api, now, now, size_of(ctx, cookie), thread >> 32, thread, &span);
    return 0;
}

UPROBE(call_entry, call_entry_body)
URETPROBE(call_return, call_return_body)
UPROBE(call_count, call_count_body)
