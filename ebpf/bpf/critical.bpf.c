/* What must not be lost in a flood: processes that start, fork, end or are killed for memory, in a ring of their own. */
#include "pasta.bpf.h"

#define PROBE_CRITICAL 3
#define KIND_EXEC 1
#define KIND_EXIT 2
#define KIND_FORK 3
#define KIND_OOM 4

static __always_inline void send_critical(u32 kind, u32 tgid, u32 tid, u32 value)
{
    u32 probe = PROBE_CRITICAL;
    struct counters *count = LOOKUP(counts, &probe);
    struct critical_event *event;

    if (!count)
        return;
    ADD(count->seen);
    event = RESERVE(critical, struct critical_event);
    if (!event) {
        ADD(count->full);
        ADD(count->ring_full);
        return;
    }
    event->time_ns = bpf_ktime_get_ns();
    event->kind = kind;
    event->tgid = tgid;
    event->tid = tid;
    event->value = value;
    SUBMIT(critical, event, BPF_RB_NO_WAKEUP);
    ADD(count->submitted);
    ADD(count->unlinked);
    ADD(count->ring_submitted);
}

/* Only ends and forks of processes that publish a context matter: the others' would fill the ring. */
static __always_inline void send_watched(u32 kind, u32 other, u32 value)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 tgid = id >> 32;

    if (LOOKUP(processes, &tgid))
        send_critical(kind, other ? other : tgid, id, value);
    else
        count_filtered(PROBE_CRITICAL);
}

static __always_inline void leave(u32 value)
{
    u64 id = bpf_get_current_pid_tgid();

    if ((u32)id == id >> 32)
        send_watched(KIND_EXIT, 0, value);
}

static __always_inline void start(void)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 tgid = id >> 32;

    DELETE(processes, &tgid); /* what it published was in the memory that it has left */
    send_critical(KIND_EXEC, tgid, id, 0);
}

#ifdef PASTA_BCC
int process_exec(struct tracepoint__sched__sched_process_exec *args)
{
    start();
    return 0;
}
int process_exit(struct tracepoint__sched__sched_process_exit *args)
{
    leave(0);
    return 0;
}
int process_fork(struct tracepoint__sched__sched_process_fork *args)
{
    send_watched(KIND_FORK, args->child_pid, 0);
    return 0;
}
int oom_victim(struct tracepoint__oom__mark_victim *args)
{
    send_critical(KIND_OOM, args->pid, args->pid, 0);
    return 0;
}
#else
/* tracepoint oom:mark_victim; its first field never moved, unlike the arguments behind it */
struct mark_victim {
    u64 common;
    int pid;
};

SEC("tp_btf/sched_process_exec")
int BPF_PROG(process_exec)
{
    start();
    return 0;
}
SEC("tp_btf/sched_process_exit")
int BPF_PROG(process_exit, struct task_struct *task)
{
    leave(task->exit_code);
    return 0;
}
SEC("tp_btf/sched_process_fork")
int BPF_PROG(process_fork, struct task_struct *parent, struct task_struct *child)
{
    u32 parents = parent->tgid, childs = child->pid;
    struct process *known;

    if (child->pid != child->tgid)
        return 0;
    known = LOOKUP(processes, &parents);
    if (known)
        UPDATE(processes, &childs, known); /* its copy of the slots lies where its parent's do */
    send_watched(KIND_FORK, child->pid, 0);
    return 0;
}
SEC("tp/oom/mark_victim")
int oom_victim(struct mark_victim *args)
{
    send_critical(KIND_OOM, args->pid, args->pid, 0);
    return 0;
}
#endif
