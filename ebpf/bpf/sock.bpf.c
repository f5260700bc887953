/* Sockets that lose or repeat data. These happen in interrupts, on no thread of the application: counted by what happened,
 * linked to nothing. */
#include "pasta.bpf.h"

#define PROBE_SOCK 5
#define API_RETRANSMIT 96
#define API_RECEIVE_QUEUE_FULL 97
#define API_DROP 98
#define DROP_CONSUMED 1      /* enum skb_drop_reason: not a drop */
#define DROP_NOT_SPECIFIED 2 /* most of these are ordinary ends of packets */

static __always_inline void count_packet(u32 api, u32 reason)
{
    u32 zero = 0, probe = PROBE_SOCK;
    u64 time = bpf_ktime_get_ns();
    struct counters *count = LOOKUP(counts, &probe);
    struct settings *now = LOOKUP(settings, &zero);
    struct aggregate_key key = {};

    if (!count || !now)
        return;
    ADD(count->seen);
    key.tgid = reason; /* there is no process: its place holds the reason */
    key.api = api;
    key.epoch = now->epoch;
    key.how = LINK_UNREGISTERED;
    if (!aggregate_event(&key, time, time, 0, 0)) {
        ADD(count->full);
        return;
    }
    ADD(count->submitted);
    ADD(count->unregistered);
}

static __always_inline void count_drop(u32 reason)
{
    if (reason <= DROP_NOT_SPECIFIED)
        count_filtered(PROBE_SOCK);
    else
        count_packet(API_DROP, reason);
}

#ifdef PASTA_BCC
int tcp_retransmit(struct tracepoint__tcp__tcp_retransmit_skb *args)
{
    count_packet(API_RETRANSMIT, 0);
    return 0;
}
int receive_queue_full(struct tracepoint__sock__sock_rcvqueue_full *args)
{
    count_packet(API_RECEIVE_QUEUE_FULL, 0);
    return 0;
}
int udp_queue_full(struct tracepoint__udp__udp_fail_queue_rcv_skb *args)
{
    count_packet(API_RECEIVE_QUEUE_FULL, 0);
    return 0;
}
#else
SEC("tp_btf/tcp_retransmit_skb")
int BPF_PROG(tcp_retransmit)
{
    count_packet(API_RETRANSMIT, 0);
    return 0;
}
SEC("tp_btf/sock_rcvqueue_full")
int BPF_PROG(receive_queue_full)
{
    count_packet(API_RECEIVE_QUEUE_FULL, 0);
    return 0;
}
SEC("tp_btf/udp_fail_queue_rcv_skb")
int BPF_PROG(udp_queue_full)
{
    count_packet(API_RECEIVE_QUEUE_FULL, 0);
    return 0;
}
SEC("tp_btf/kfree_skb")
int BPF_PROG(packet_drop, void *packet, void *location, u32 reason)
{
    count_drop(reason);
    return 0;
}
#endif
