"""Names, once: OpenTelemetry semantic conventions that we use, and our own ``pasta.*``.

Every metric that any process of ours exports stands in ``METRICS``; the documentation is tested against it.
Source of the OpenTelemetry names: semantic-conventions v1.44.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SCOPE = "pasta_otel"

# resource
SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
PROCESS_PID = "process.pid"
CONTAINER_ID = "container.id"
HOST_NAME = "host.name"

# span attributes
CODE_FILE_PATH = "code.file.path"
CODE_FUNCTION_NAME = "code.function.name"
CODE_LINE_NUMBER = "code.line.number"
THREAD_ID = "thread.id"
ERROR_TYPE = "error.type"
PEER_SERVICE = "peer.service"
SERVER_ADDRESS = "server.address"

# the agent's own service.name: its spans are host events linked to requests, no work of a service
AGENT_SERVICE = "pasta-otel-agent"

# ours, on spans
MODULE_PATH = "pasta.torch.module.path"
TORCH_RANK = "pasta.torch.rank"
TORCH_REGION = "pasta.torch.region"  # op, annotation, python or api_call: what an imported host region is
TRACE_FILE = "pasta.trace.file"  # name of the file that a trace was imported from
MODULE_CLASS = "pasta.torch.module.class"
LINK_METHOD = "pasta.link.method"

# breaker transitions are spans of this name
BREAKER_SPAN = "pasta.breaker.transition"
BREAKER_NAME = "pasta.breaker.name"
BREAKER_FROM = "pasta.breaker.from"
BREAKER_TO = "pasta.breaker.to"
BREAKER_REASON = "pasta.breaker.reason"
BREAKER_SEQUENCE = "pasta.breaker.sequence"

# flags
FLAG_DEGRADE_PREFIX = "degrade."
FLAG_CAPTURE = "pasta.capture"
CAPTURE_DEFAULT_TIER = 2
"""While nothing raises it: module spans for sampled traces (docs/design/0001, capture tiers)."""

# host counters by process (cumulative; seconds unless said otherwise)
RUN_DELAY = "run_delay_seconds"  # /proc/PID/schedstat, second field
CPU_TIME = "cpu_time_seconds"  # /proc/PID/schedstat, first field
CGROUP_PERIODS = "cgroup_periods"
CGROUP_THROTTLED_PERIODS = "cgroup_throttled_periods"
CGROUP_THROTTLED_TIME = "cgroup_throttled_seconds"
HOST_METRICS = (RUN_DELAY, CPU_TIME, CGROUP_PERIODS, CGROUP_THROTTLED_PERIODS, CGROUP_THROTTLED_TIME)

Instrument = Literal["counter", "updowncounter", "gauge", "histogram"]


class MetricSpec(NamedTuple):
    """One metric we export: OpenTelemetry name, instrument, UCUM unit, meaning."""

    name: str
    instrument: Instrument
    unit: str
    description: str


METRICS: dict[str, MetricSpec] = {}


def _metric(name: str, instrument: Instrument, unit: str, description: str) -> str:
    METRICS[name] = MetricSpec(name, instrument, unit, description)
    return name


# spans through a process: received - rejected = ok + dropped by reason + pending, per sink
SPANS_RECEIVED = _metric("pasta.spans.received", "counter", "{span}", "Spans that reached the receiver.")
SPANS_REJECTED = _metric("pasta.spans.rejected", "counter", "{span}", "Spans refused by the receiver, by `reason`.")
SINK_OK = _metric("pasta.sink.spans.ok", "counter", "{span}", "Spans that a sink took, by `sink`.")
SINK_DROPPED = _metric("pasta.sink.spans.dropped", "counter", "{span}", "Spans a sink lost, by `sink` and `reason`.")
SINK_PENDING = _metric("pasta.sink.spans.pending", "updowncounter", "{span}", "Spans waiting for a sink, by `sink`.")

# metric points through the receiver: the same identity as for spans
POINTS_RECEIVED = _metric("pasta.points.received", "counter", "{point}", "Metric points that reached the receiver.")
POINTS_REJECTED = _metric("pasta.points.rejected", "counter", "{point}", "Metric points refused, by `reason`.")
POINTS_SINK_OK = _metric("pasta.sink.points.ok", "counter", "{point}", "Metric points that a sink took, by `sink`.")
POINTS_SINK_DROPPED = _metric(
    "pasta.sink.points.dropped", "counter", "{point}", "Metric points a sink lost, by `sink` and `reason`."
)
POINTS_SINK_PENDING = _metric(
    "pasta.sink.points.pending", "updowncounter", "{point}", "Metric points waiting for a sink, by `sink`."
)
RECEIVER_REFUSED = _metric(
    "pasta.receiver.requests.refused", "counter", "{request}", "Requests answered with an error, by `reason`."
)
FORWARD_RETRIES = _metric("pasta.forward.retries", "counter", "{request}", "Requests to upstream that were sent again.")
STORE_LATE = _metric(
    "pasta.store.spans.late", "counter", "{span}", "Spans that arrived after their end plus the grace: in no SLI count."
)
STORE_EXPIRED = _metric("pasta.store.spans.expired", "counter", "{span}", "Spans deleted by retention, by `reason`.")
STORE_SIZE = _metric("pasta.store.size", "gauge", "By", "Bytes the store's file (or memory) holds.")
STORE_OPEN_SPANS = _metric("pasta.store.spans.open", "gauge", "{span}", "Spans held until their trace closes.")

# response: breakers, flags, actions
BREAKER_TRANSITIONS = _metric(
    "pasta.breaker.transitions", "counter", "{transition}", "Breaker state changes, by breaker, from and to."
)
BREAKER_CALLS = _metric(
    "pasta.breaker.calls", "counter", "{call}", "Calls through a breaker, by breaker and `outcome`."
)
FLAG_POLLS = _metric(
    "pasta.flag.polls",
    "counter",
    "{poll}",
    "Refreshes of the app's flag snapshot, by `result` (ok, unchanged, failed).",
)
ACTIONS = _metric("pasta.actions", "counter", "{action}", "Actions of the controller, by `action` and `outcome`.")
NOTIFICATIONS = _metric(
    "pasta.notifications",
    "counter",
    "{notification}",
    "Notifications, by `channel` and `outcome` (sent, failed, dropped).",
)

# attribution
ATTRIBUTION_DURATION = _metric(
    "pasta.attribution.duration", "histogram", "s", "How long an attribution took, by `outcome` (cause, no_cause)."
)

# SLO controller
SLO_OBJECTIVE = _metric("pasta.slo.objective", "gauge", "1", "Share of events that must be good, by `slo`.")
SLO_BURN_RATE = _metric(
    "pasta.slo.burn_rate", "gauge", "1", "Error ratio over the error budget, by `slo`, `window`; absent without data."
)
SLO_BUDGET_REMAINING = _metric(
    "pasta.slo.budget.remaining", "gauge", "1", "Share of the period's error budget that is left, by `slo`."
)
SLO_BURNING = _metric("pasta.slo.burning", "gauge", "1", "1 while the SLO burns, 0 while it is ok, by `slo`.")
SLO_NO_DATA = _metric("pasta.slo.no_data", "gauge", "1", "1 while nothing can be said, by `slo` and `reason`.")
SLO_ALERT_FIRING = _metric(
    "pasta.slo.alert.firing", "gauge", "1", "1 while an alert of an AlertPolicy fires, by `slo`, `policy`, `condition`."
)
SLO_TRANSITIONS = _metric("pasta.slo.transitions", "counter", "{transition}", "Verdict changes, by `slo`, `to`.")
SLO_TICK_DURATION = _metric("pasta.slo.tick.duration", "histogram", "s", "Time one evaluation of all SLOs took.")
SLO_TICKS_MISSED = _metric("pasta.slo.ticks.missed", "counter", "{tick}", "Ticks skipped because one took too long.")
SLO_ERRORS = _metric(
    "pasta.slo.errors", "counter", "{error}", "Errors that the controller survived, by `part` (source, responder, ...)."
)

# SLO verdict changes are spans of this name
SLO_SPAN = "pasta.slo.transition"
SLO_NAME = "pasta.slo.name"
SLO_FROM = "pasta.slo.from"
SLO_TO = "pasta.slo.to"
SLO_REASON = "pasta.slo.reason"
SLO_CAUSE = "pasta.slo.cause"
# alerts of OpenSLO's AlertPolicies that begin or cease to fire are spans of this name
SLO_ALERT_SPAN = "pasta.slo.alert"
SLO_ALERT_POLICY = "pasta.slo.alert.policy"
SLO_ALERT_CONDITION = "pasta.slo.alert.condition"
SLO_ALERT_SEVERITY = "pasta.slo.alert.severity"

# module spans in the app
MODULE_SPANS = _metric("pasta.module.spans", "counter", "{span}", "Torch module calls recorded as spans.")
MODULE_SPANS_DROPPED = _metric(
    "pasta.module.spans.dropped", "counter", "{span}", "Module calls in recorded traces without a span, by `reason`."
)
TRACES_RECORDED = _metric("pasta.traces.recorded", "counter", "{trace}", "Traces that module spans were recorded for.")
CAPTURE_TIER = _metric("pasta.capture.tier", "gauge", "1", "Capture tier that the app works at, 0 to 4.")

# the /metrics page
PROMETHEUS_SKIPPED = _metric(
    "pasta.prometheus.points.skipped",
    "counter",
    "{point}",
    "Points that the Prometheus formats cannot say, by `reason` (exponential_histogram, delta, ...).",
)

# GPU work: attributes of its spans and labels of its metrics
HW_ID = "hw.id"
GPU_KERNEL_CLASS = "gpu.kernel.class"
GPU_KERNEL_NAME = "gpu.kernel.name"
GPU_STREAM_ID = "gpu.cuda.stream.id"
GPU_CONTEXT_ID = "gpu.cuda.context.id"
GPU_CORRELATION_ID = "gpu.cuda.correlation.id"
GPU_GRAPH_ID = "gpu.cuda.graph.id"
GPU_GRAPH_NODE_ID = "gpu.cuda.graph.node.id"
GPU_COPY_SIZE = "gpu.cuda.copy.size"

GPU_KERNEL_DURATION = _metric(
    "gpu.cuda.kernel.duration",
    "histogram",
    "s",
    "Device time of GPU work by `gpu.kernel.class`, module and device, scaled by the sampled share.",
)
GPU_MEMORY_ACCESS = "gpu.memory.access"  # kind of access: load, store, atomic, async_copy, ...; shared: load_4, ...
GPU_MEMORY_SECTORS = _metric(
    "gpu.cuda.kernel.memory.sectors",
    "counter",
    "{sector}",
    "32-byte sectors of global memory that analysed GPU kernels touch, by `gpu.kernel.class`, `gpu.memory.access` and"
    " module.",
)
GPU_MEMORY_REQUESTED = _metric(
    "gpu.cuda.kernel.memory.requested",
    "counter",
    "By",
    "Bytes of global memory that analysed GPU kernels' lanes ask for, by `gpu.kernel.class`, `gpu.memory.access` and"
    " module.",
)
GPU_SHARED_WAVEFRONTS = _metric(
    "gpu.cuda.kernel.shared.wavefronts",
    "counter",
    "{wavefront}",
    "Passes through shared memory's banks by analysed GPU kernels, by `gpu.kernel.class`, `gpu.memory.access` and"
    " module.",
)
GPU_SHARED_CONFLICTS = _metric(
    "gpu.cuda.kernel.shared.bank_conflicts",
    "counter",
    "{wavefront}",
    "Those of them that bank conflicts added, by `gpu.kernel.class`, `gpu.memory.access` and module.",
)
GPU_MEMORY_WORKING_SET = _metric(
    "gpu.cuda.kernel.memory.working_set",
    "gauge",
    "By",
    "4 KiB pages touched by the analysed launch that touched most, by `gpu.kernel.class` and module.",
)
GPU_TENSOR_ACCESSES = _metric(
    "gpu.cuda.tensor.accesses",
    "counter",
    "{access}",
    "Lane accesses to the 30 most accessed tensors with a name or line, by `pasta.torch.tensor.label`.",
)
TENSOR_LABEL = "pasta.torch.tensor.label"  # a parameter's name, else the module and line that allocated it

# analysed launches as spans, beside the attributes of other GPU kernel spans; GPU_MEMORY_SECTORS and
# GPU_MEMORY_WORKING_SET are attributes too
GPU_GRID = "gpu.cuda.launch.grid"  # blocks, as XxYxZ
GPU_BLOCK = "gpu.cuda.launch.block"  # threads of a block, as XxYxZ
GPU_GRAPH_NODES = "gpu.cuda.graph.nodes"  # nodes of one GPU kernel in one launch of a CUDA graph: one span
GPU_COALESCING = "gpu.cuda.kernel.memory.coalescing_efficiency"
GPU_LOAD_SECTORS = "gpu.cuda.kernel.memory.load.sectors_per_request"
GPU_STORE_SECTORS = "gpu.cuda.kernel.memory.store.sectors_per_request"
GPU_CONFLICT_RATIO = "gpu.cuda.kernel.shared.bank_conflict_ratio"
GPU_ACTIVE_LANES = "gpu.cuda.kernel.active_lane_ratio"
GPU_HOT_TENSOR = "gpu.cuda.kernel.memory.hottest_tensor"
GPU_HOT_TENSOR_SHARE = "gpu.cuda.kernel.memory.hottest_tensor.share"
GPU_MEMORY_FINDINGS = "gpu.cuda.kernel.memory.findings"  # their kinds, with commas
ANALYSIS_TOOL = "pasta.analysis.tool"
ANALYSIS_SLOWED = "pasta.analysis.slowed"  # true: durations are those under analysis
ANALYSIS_TIMES = "pasta.analysis.times"  # device, or launch: the launching call's time, without a duration
ANALYSIS_LEFT_OUT = "pasta.analysis.launches.left_out"

GPU_WORK = _metric(
    "pasta.gpu.work", "counter", "{record}", "Captured GPU work, by `link` (id, unlinked, stale, incomplete)."
)
GPU_WORK_DROPPED = _metric(
    "pasta.gpu.work.dropped", "counter", "{record}", "GPU activity records lost, by `reason` (cupti, ring_full, ...)."
)
GPU_LINK_COVERAGE = _metric(
    "pasta.gpu.link.coverage", "gauge", "1", "Share of imported GPU work that found its op, `by` count or duration."
)
GPU_SPANS = _metric(
    "pasta.gpu.spans", "counter", "{span}", "GPU work in sampled traces, by `outcome` (ok, capped, ...)."
)
GPU_CAPTURE_BUDGET = _metric("pasta.gpu.capture.budget", "gauge", "1", "Share of time that GPU capture may cost.")
GPU_CAPTURE_COST = _metric("pasta.gpu.capture.cost", "gauge", "1", "Share of time that GPU capture costs, as computed.")
GPU_CAPTURE_DUTY = _metric(
    "pasta.gpu.capture.duty", "gauge", "1", "Share of time that GPU capture records: the sampled share."
)
GPU_CAPTURE_WINDOWS = _metric("pasta.gpu.capture.windows", "counter", "{window}", "Capture windows, by `outcome`.")
GPU_CAPTURE_HELD = _metric(
    "pasta.gpu.capture.held", "gauge", "1", "1 while another CUPTI client keeps us back, by `holder`."
)
GPU_CLOCK_RESIDUAL = _metric(
    "pasta.gpu.clock.residual", "gauge", "s", "Uncertainty of CUPTI's clock against wall time."
)
GPU_CLOCK_VIOLATIONS = _metric(
    "pasta.gpu.clock.violations", "counter", "{record}", "GPU work that begins before its launch call, in CUPTI's time."
)

# state of devices: OpenTelemetry's hw.* for hw.type=gpu, ours where it has no name
HW_TYPE = "hw.type"
HW_NAME = "hw.name"
HW_PARENT = "hw.parent"
HW_VENDOR = "hw.vendor"
HW_STATE = "hw.state"
HW_MODEL = "hw.model"
HW_SERIAL_NUMBER = "hw.serial_number"
HW_DRIVER_VERSION = "hw.driver_version"
HW_SENSOR_LOCATION = "hw.sensor_location"
HW_GPU_TASK = "hw.gpu.task"
NETWORK_IO_DIRECTION = "network.io.direction"
K8S_POD_UID = "k8s.pod.uid"
GPU_XID = "gpu.xid"  # the code of NVIDIA's XID message
GPU_CLOCK = "gpu.clock"  # graphics, sm, memory, video
GPU_UNIT = "gpu.unit"  # engine, sm, tensor, fp64, fp32, fp16, int, memory
GPU_LINK = "gpu.link"  # pcie, nvlink
GPU_MIG_MODE = "gpu.mig.mode"
REASON = "reason"
SOURCE = "source"

HW_GPU_UTILIZATION = _metric(
    "hw.gpu.utilization", "gauge", "1", "Share of time that a GPU worked, by `hw.gpu.task` (general, encoder, decoder)."
)
HW_GPU_MEMORY_LIMIT = _metric("hw.gpu.memory.limit", "updowncounter", "By", "Memory of a GPU.")
HW_GPU_MEMORY_USAGE = _metric("hw.gpu.memory.usage", "updowncounter", "By", "Memory in use, without the driver's own.")
HW_GPU_MEMORY_UTILIZATION = _metric("hw.gpu.memory.utilization", "gauge", "1", "Share of memory in use.")
HW_GPU_IO = _metric(
    "hw.gpu.io", "counter", "By", "Bytes over NVLink, by `network.io.direction` and `gpu.link`; the GPU transmits."
)
HW_ERRORS = _metric(
    "hw.errors", "counter", "{error}", "Errors by `error.type`: corrected, uncorrected (ECC), xid (with `gpu.xid`), ..."
)
HW_STATUS = _metric(
    "hw.status", "updowncounter", "1", "1 for the `hw.state` that holds (ok, degraded, failed), 0 for the others."
)
HW_POWER = _metric("hw.power", "gauge", "W", "Electrical power that a GPU draws.")
HW_ENERGY = _metric("hw.energy", "counter", "J", "Energy that a GPU drew since its driver was loaded.")
HW_TEMPERATURE = _metric("hw.temperature", "gauge", "Cel", "Temperature, by `hw.sensor_location`.")
HW_FAN_SPEED_RATIO = _metric("hw.fan.speed_ratio", "gauge", "1", "Speed of a GPU's fans as a share of their maximum.")
GPU_POWER_LIMIT = _metric("pasta.gpu.power.limit", "gauge", "W", "Power limit that the driver enforces.")
GPU_MEMORY_ACTIVITY = _metric(
    "pasta.gpu.memory.activity", "gauge", "1", "Share of time that device memory was read or written."
)
GPU_CLOCK_FREQUENCY = _metric("pasta.gpu.clock.frequency", "gauge", "Hz", "Clock frequency, by `gpu.clock`.")
GPU_THROTTLED = _metric(
    "pasta.gpu.throttled", "gauge", "1", "1 while the clocks are held down for `reason`, 0 while they are not."
)
GPU_THROTTLED_TIME = _metric(
    "pasta.gpu.throttled.time",
    "counter",
    "s",
    "How long the clocks were held down, by `reason`.",
)
GPU_PCIE_THROUGHPUT = _metric(
    "pasta.gpu.pcie.throughput", "gauge", "By/s", "PCIe throughput, by `network.io.direction` where told apart."
)
GPU_NVLINK_THROUGHPUT = _metric(
    "pasta.gpu.nvlink.throughput", "gauge", "By/s", "NVLink throughput, by `network.io.direction`; the GPU transmits."
)
GPU_UNIT_ACTIVITY = _metric(
    "pasta.gpu.unit.activity", "gauge", "1", "Share of cycles in which a part of the GPU worked, by `gpu.unit`."
)
GPU_SM_OCCUPANCY = _metric(
    "pasta.gpu.sm.occupancy", "gauge", "1", "Warps resident on the SMs as a share of the most that fit."
)
GPU_FRAME_RATE = _metric("pasta.gpu.encoder.frame_rate", "gauge", "{frame}/s", "Frames a second of the video encoder.")
GPU_PROCESS_MEMORY = _metric(
    "pasta.gpu.process.memory.usage", "gauge", "By", "Device memory of a process, with its container and pod if known."
)
GPU_DEVICE_UP = _metric(
    "pasta.gpu.device.up", "gauge", "1", "1 while a GPU answers, 0 with `reason` (lost, timeout, ...) if not."
)
GPU_DEVICE_INFO = _metric(
    "pasta.gpu.device.info", "gauge", "1", "1, with model, serial number, driver version and MIG mode as attributes."
)
GPU_COLLECTOR_UP = _metric(
    "pasta.gpu.collector.up", "gauge", "1", "1 while `source` answers, 0 with `reason` (timeout, ...) if not."
)
GPU_COLLECTOR_DURATION = _metric(
    "pasta.gpu.collector.duration", "gauge", "s", "How long the last reading of all devices took, by `source`."
)
GPU_BLANK_VALUES = _metric(
    "pasta.gpu.blank_values", "counter", "{value}", "Values that a source marked as blank, or that cannot be, dropped."
)
GPU_PARSE_ERRORS = _metric(
    "pasta.gpu.parse_errors", "counter", "{line}", "Lines of a third-party page or table that could not be read."
)
DEVICE_METRICS = (
    HW_GPU_UTILIZATION,
    HW_GPU_MEMORY_LIMIT,
    HW_GPU_MEMORY_USAGE,
    HW_GPU_MEMORY_UTILIZATION,
    HW_GPU_IO,
    HW_ERRORS,
    HW_STATUS,
    HW_POWER,
    HW_ENERGY,
    HW_TEMPERATURE,
    HW_FAN_SPEED_RATIO,
    GPU_POWER_LIMIT,
    GPU_MEMORY_ACTIVITY,
    GPU_CLOCK_FREQUENCY,
    GPU_THROTTLED,
    GPU_THROTTLED_TIME,
    GPU_PCIE_THROUGHPUT,
    GPU_NVLINK_THROUGHPUT,
    GPU_UNIT_ACTIVITY,
    GPU_SM_OCCUPANCY,
    GPU_FRAME_RATE,
    GPU_PROCESS_MEMORY,
    GPU_DEVICE_UP,
    GPU_DEVICE_INFO,
    GPU_COLLECTOR_UP,
    GPU_COLLECTOR_DURATION,
    GPU_BLANK_VALUES,
    GPU_PARSE_ERRORS,
)

# what the host did to spans: names, attributes and metrics of the agent (docs/reference/agent.md)
HOST_EVENT = "pasta.host.event"
HOST_SERVICE = "pasta.host.service"
HOST_EVENTS = "pasta.host.events"
HOST_TIME_TOTAL = "pasta.host.time"
HOST_TIME_MAX = "pasta.host.time.max"
HOST_SIZE = "pasta.host.size"

# as OpenTelemetry's eBPF instrumentation names them
CUDA_LAUNCH_CALLS = _metric(
    "gpu.cuda.kernel.launch.calls", "counter", "{call}", "Launch calls of the CUDA driver, scaled by the sampled share."
)
CUDA_GRAPH_LAUNCH_CALLS = _metric("gpu.cuda.graph.launch.calls", "counter", "{call}", "Launches of CUDA graphs.")
CUDA_MEMORY_ALLOCATIONS = _metric("gpu.cuda.memory.allocations", "counter", "By", "Device memory allocated.")
CUDA_MEMORY_COPIES = _metric("gpu.cuda.memory.copies", "counter", "By", "Bytes copied by the CUDA driver.")

HOST_EVENT_COUNT = _metric(
    "pasta.host.event.count", "counter", "{event}", "Host events by `pasta.host.event` and `pasta.host.service`."
)
HOST_EVENT_TIME = _metric(
    "pasta.host.event.time", "counter", "s", "Time in host events by `pasta.host.event` and `pasta.host.service`."
)
HOST_EVENT_DURATION = _metric(
    "pasta.host.event.duration", "histogram", "s", "Durations of host events, counted in the kernel."
)
HOST_LINKS = _metric(
    "pasta.host.links",
    "counter",
    "{event}",
    "Host events by `link`: slot, none, stale; unregistered of driver calls only, the rest being `filtered`.",
)
HOST_SPANS = _metric(
    "pasta.host.spans", "counter", "{span}", "Host spans by `outcome`: ok, capped, unsampled, dropped."
)
PACKETS_DROPPED = _metric("pasta.host.packets.dropped", "counter", "{packet}", "Packets dropped, by `reason`.")
PROCESS_ENDS = _metric(
    "pasta.host.process.events",
    "counter",
    "{event}",
    "Processes by `event`: exec and oom of all, fork and exit of those that publish their context.",
)
PROBE_EVENTS = _metric(
    "pasta.probe.events", "counter", "{event}", "Events by `probe` and `outcome`: filtered, submitted, full, unpaired."
)
PROBE_SEEN = _metric("pasta.probe.seen", "counter", "{event}", "Events that reached a probe: the sum of its outcomes.")
PROBE_RECORDS = _metric(
    "pasta.probe.records", "counter", "{record}", "Single records by `probe` and `outcome`: submitted, full."
)
PROBE_ATTACHED = _metric(
    "pasta.probe.attached", "gauge", "1", "1 where a probe is attached, 0 with `reason` and `errno` where it is not."
)
PROBE_LAUNCH_DUTY = _metric("pasta.probe.launch.duty", "gauge", "1", "Share of time that launches are recorded.")
PROBE_LAUNCH_COST = _metric("pasta.probe.launch.cost", "gauge", "1", "Share of time that launch probes cost.")
USER_EVENTS = _metric(
    "pasta.user.events",
    "counter",
    "{event}",
    "Events of users' programs by `program`, `table`, `outcome`: ok, invalid, dropped, lost; full = times, not events.",
)
AGENT_PROCESSES = _metric(
    "pasta.agent.processes", "gauge", "{process}", "Processes by `state`: seen, publishing, unreadable."
)
PRESSURE_TIME = _metric("pasta.host.pressure", "counter", "s", "Pressure stall time by `resource` and `kind`.")
NETSTAT_OVERFLOWS = _metric(
    "pasta.host.listen.overflows", "counter", "{connection}", "Accept queue overflows, by `network_namespace`."
)
NETSTAT_DROPS = _metric(
    "pasta.host.listen.drops", "counter", "{connection}", "Drops at listening sockets, by `network_namespace`."
)
PROCESS_RUN_DELAY = _metric("pasta.process.run_delay", "counter", "s", "Time runnable without a CPU, by service, pid.")
PROCESS_CPU_TIME = _metric("pasta.process.cpu.time", "counter", "s", "Time on a CPU, by service and pid.")
CGROUP_THROTTLED = _metric(
    "pasta.cgroup.throttled", "counter", "s", "Time throttled by the CPU quota, by service, pid."
)
CGROUP_THROTTLED_COUNT = _metric(
    "pasta.cgroup.throttled.periods", "counter", "{period}", "Quota periods that ended throttled, by service and pid."
)
CGROUP_PRESSURE = _metric(
    "pasta.cgroup.pressure",
    "counter",
    "s",
    "Pressure stall time of the cgroup (v2), by `resource`, `kind`, service and pid.",
)
CGROUP_MEMORY_EVENTS = _metric(
    "pasta.cgroup.memory.events", "counter", "{event}", "Memory events of the cgroup, by `event`, service and pid."
)
