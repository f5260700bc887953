/* Major page faults: the thread waited for a page to be read. A software event of perf, in the faulting thread. */
#include "pasta.bpf.h"

#define PROBE_FAULT 4
#define API_MAJOR_FAULT 80

#ifdef PASTA_BCC
int major_fault(struct bpf_perf_event_data *ctx)
#else
SEC("perf_event")
int major_fault(void *ctx)
#endif
{
    u64 now = bpf_ktime_get_ns();
    u64 id = bpf_get_current_pid_tgid();
    u32 tgid = id >> 32;
    struct span_ref span = {};

    if (!LOOKUP(processes, &tgid)) {
        count_filtered(PROBE_FAULT);
        return 0;
    }
    find_span(tgid, &span);
    record(PROBE_FAULT, API_MAJOR_FAULT, now, now, 0, tgid, id, &span);
    return 0;
}
