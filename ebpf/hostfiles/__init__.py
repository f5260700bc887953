"""Pure readers of /proc and cgroup files: roots are parameters, a missing file is an absent value and never a zero."""

from pasta_otel.ebpf.hostfiles.cgroup import CgroupDir, CpuStat, find_cgroup, read_cpu_stat, read_memory_events
from pasta_otel.ebpf.hostfiles.netstat import Netstat, parse_netstat, read_netstat
from pasta_otel.ebpf.hostfiles.pressure import Pressure, parse_pressure, read_pressure
from pasta_otel.ebpf.hostfiles.sampler import HostSampler
from pasta_otel.ebpf.hostfiles.schedstat import SchedStat, read_schedstat

__all__ = [
    "CgroupDir",
    "CpuStat",
    "HostSampler",
    "Netstat",
    "Pressure",
    "SchedStat",
    "find_cgroup",
    "parse_netstat",
    "parse_pressure",
    "read_cpu_stat",
    "read_memory_events",
    "read_netstat",
    "read_pressure",
    "read_schedstat",
]
