/* What the scheduler did to the threads of watched processes: off-CPU time by reason, run-queue delay, migrations.
 *
 * The span is read when the thread leaves the CPU, while it is still the running one. */
#include "pasta.bpf.h"

#define PROBE_SCHED 2
#define API_PREEMPTED 64     /* off the CPU though it wanted to run */
#define API_SLEEPING 65      /* waits for an event: a lock, a socket, a timer */
#define API_UNINTERRUPTIBLE 66 /* waits for the kernel: a page, a driver */
#define API_IO 67            /* waits for block I/O */
#define API_RUN_QUEUE 68     /* could run, had no CPU */
#define API_MIGRATION 69

struct absence {
    u64 start_ns;
    u64 woken_ns;
    u32 tgid;
    u32 api;
    struct span_ref span;
};

HASH(absences, u32, struct absence, 16384)

static __always_inline void leave_cpu(u32 tid, u32 api)
{
    struct absence away = {};
    struct process *process;

    away.tgid = bpf_get_current_pid_tgid() >> 32;
    process = LOOKUP(processes, &away.tgid);
    if (!process || !process->watched)
        return;
    away.start_ns = bpf_ktime_get_ns();
    away.api = api;
    find_span(away.tgid, &away.span);
    if (UPDATE(absences, &tid, &away))
        count_full(PROBE_SCHED);
}

static __always_inline void come_back(u32 tid)
{
    struct absence *away = LOOKUP(absences, &tid);
    u64 now, ready;

    if (!away) {
        count_filtered(PROBE_SCHED);
        return;
    }
    now = bpf_ktime_get_ns();
    ready = away->api == API_PREEMPTED ? away->start_ns : away->woken_ns;
    record(PROBE_SCHED, away->api, away->start_ns, now, 0, away->tgid, tid, &away->span);
    if (ready)
        record(PROBE_SCHED, API_RUN_QUEUE, ready, now, 0, away->tgid, tid, &away->span);
    DELETE(absences, &tid);
}

static __always_inline void wake_up(u32 tid)
{
    struct absence *away = LOOKUP(absences, &tid);

    if (away && !away->woken_ns)
        away->woken_ns = bpf_ktime_get_ns();
}

static __always_inline void migrate(u32 tid)
{
    struct absence *away = LOOKUP(absences, &tid);
    u64 now;

    if (!away) {
        count_filtered(PROBE_SCHED);
        return;
    }
    now = bpf_ktime_get_ns();
    record(PROBE_SCHED, API_MIGRATION, now, now, 0, away->tgid, tid, &away->span);
}

#ifdef PASTA_BCC
int sched_switch(struct tracepoint__sched__sched_switch *args)
{
    u64 state = args->prev_state;
    u32 api = API_SLEEPING;

    if (!(state & 0xff) || (state & 0x100)) /* the trace format's own coding: 0x100 is "preempted" */
        api = API_PREEMPTED;
    else if (state & 2)
        api = API_UNINTERRUPTIBLE;
    if (args->prev_pid)
        leave_cpu(args->prev_pid, api);
    if (args->next_pid)
        come_back(args->next_pid);
    return 0;
}
int sched_wakeup(struct tracepoint__sched__sched_wakeup *args)
{
    wake_up(args->pid);
    return 0;
}
int sched_migrate_task(struct tracepoint__sched__sched_migrate_task *args)
{
    migrate(args->pid);
    return 0;
}
#else
SEC("tp_btf/sched_switch")
int BPF_PROG(sched_switch, _Bool preempted, struct task_struct *prev, struct task_struct *next)
{
    u32 state = prev->__state;
    u32 api = API_SLEEPING;

    if (preempted || !state)
        api = API_PREEMPTED;
    else if (BPF_CORE_READ_BITFIELD(prev, in_iowait))
        api = API_IO;
    else if (state & 2)
        api = API_UNINTERRUPTIBLE;
    if (prev->pid)
        leave_cpu(prev->pid, api);
    if (next->pid)
        come_back(next->pid);
    return 0;
}
SEC("tp_btf/sched_wakeup")
int BPF_PROG(sched_wakeup, struct task_struct *task)
{
    wake_up(task->pid);
    return 0;
}
SEC("tp_btf/sched_migrate_task")
int BPF_PROG(sched_migrate_task, struct task_struct *task, int cpu)
{
    migrate(task->pid);
    return 0;
}
#endif
