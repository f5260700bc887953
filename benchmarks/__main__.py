"""Run the benchmarks one after the other, each in a process of its own: ``python -m benchmarks [TOPIC ...]``.

Every topic prints its ratios to the peer and to the limit, and keeps all windows in benchmarks/results.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# topic -> (what is measured beside what, variable that must name data, or empty)
TOPICS = {
    "modules": ("module spans on a CPU transformer beside none, SDK spans and torch.profiler", ""),
    "receiver": ("receiver spans/s beside rotel under the same load", ""),
    "encoder": ("columnar OTLP encoder beside the SDK's", ""),
    "response": ("cost of flag and breaker with a live, dead and hung controller", ""),
    "store": ("SLI counts and attribution questions over 10 M spans", ""),
    "slo": ("1,000 SLOs over spans and over Prometheus beside Sloth's rules", ""),
    "kineto": ("trace import beside HTA's parser", ""),
    "ebpf": ("probe cost, agent size, floods", ""),
    "attribution": ("causes of recorded faults beside simple methods", "BENCH_DATA"),
}


def main(wanted: list[str]) -> int:
    unknown = sorted(set(wanted) - set(TOPICS))
    if unknown:
        print(f"unknown topic {', '.join(unknown)}; there are {', '.join(TOPICS)}", file=sys.stderr)
        return 2
    failed = []
    for topic in wanted or TOPICS:
        what, variable = TOPICS[topic]
        if not (Path(__file__).parent / f"{topic}.py").exists():
            continue
        print(f"\n== {topic}: {what}", flush=True)
        if variable and not os.environ.get(variable):
            print(f"skipped: {variable} must name the folder with the recorded faults")
            continue
        arguments = [os.environ[variable]] if variable else []
        if subprocess.run([sys.executable, "-m", f"benchmarks.{topic}", *arguments], check=False).returncode:
            failed.append(topic)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
