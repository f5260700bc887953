"""Runs ``app.py`` under observation and compares what probes saw with what it did."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pasta_otel.ebpf import syscall
from pasta_otel.ebpf.layout import Aggregate, Event
from pasta_otel.ebpf.observer import Harvest, HostObserver
from pasta_otel.ebpf.probes import Probe, load_probes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS = ROOT / ".cache" / "tools" / "python"
FUNCTIONS = [symbol for probe in load_probes() if probe.library for api in probe.apis for symbol in api.symbols]


USED = {"cuLaunchKernel", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxSynchronize", "cuMemFree_v2"}


def some_functions() -> tuple[Probe, ...]:
    """Return the probes with the functions that most tests call: perf events detach at ten a second."""
    return tuple(
        probe._replace(apis=tuple(api for api in probe.apis if not api.symbols or api.name in USED))
        for probe in load_probes()
    )


class App:
    """The program under observation."""

    def __init__(self, library: Path, mode: str, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        environ = {**os.environ, "PASTA_TEST_FUNCTIONS": json.dumps(FUNCTIONS), "PYTHONPATH": f"{ROOT}:{TOOLS}"}
        command = [*prefix, sys.executable, str(HERE / "app.py"), str(library), mode, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.told: list[dict[str, Any]] = []
        self.pid = self.until("ready")["pid"]

    def until(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told: dict[str, Any] = json.loads(line)
            self.told.append(told)
            if told["event"] == event:
                return told
        raise AssertionError(f"the program ended before {event!r}: {self.process.wait()}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def run(self) -> None:
        self.go_on()
        self.until("done")

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [told for told in self.told if told["event"] == "span"]

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def base_names(probes: Iterable[Probe]) -> dict[str, str]:
    """Return how counts call each exported function: its variants count with it."""
    return {symbol: api.name for probe in probes for api in probe.apis for symbol in api.symbols}


def expected_calls(base: Mapping[str, str], app: App) -> Counter[tuple[str, str, str]]:
    """Return how often each span called each function, as the program tells it."""
    calls: Counter[tuple[str, str, str]] = Counter()
    for span in app.spans:
        for symbol, times in span["calls"].items():
            calls[span["trace_id"], span["span_id"], base[symbol]] += len(times)
    return calls


def linked_calls(observer: HostObserver, aggregates: list[Aggregate], pids: set[int]) -> Counter[tuple[str, str, str]]:
    """Return how often each span called each function, as the probes counted it."""
    calls: Counter[tuple[str, str, str]] = Counter()
    for item in aggregates:
        if item.tgid in pids and item.link == "slot" and observer.apis[item.api].symbols:
            calls[item.trace_id.hex(), item.span_id.hex(), observer.apis[item.api].name] += item.events
    return calls


def assert_inside(observer: HostObserver, app: App, events: list[Event]) -> int:
    """Assert that every recorded call lies inside one of its caller's own intervals; return how many there were."""
    base = base_names(load_probes())
    intervals: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for span in app.spans:
        for symbol, times in span["calls"].items():
            intervals.setdefault((span["span_id"], base[symbol]), []).extend(times)
    checked = 0
    for event in events:
        found = intervals.get((event.span_id.hex(), observer.apis[event.api].name))
        if found is None:
            continue
        assert any(start <= event.start_ns <= event.end_ns <= end for start, end in found), event
        checked += 1
    return checked


def assert_accounts(observer: HostObserver) -> None:
    """Assert that no event is unaccounted for (several tries: a program may be in the middle of one)."""
    for _ in range(20):
        counters = observer.counters()
        if all(account.balanced for account in counters.values()):
            return
        time.sleep(0.01)
    raise AssertionError(counters)


def host_pids(app: App) -> set[int]:
    """Return the ids of the program and its children as this pid namespace sees them."""
    found, waiting = set(), [app.process.pid]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            waiting += map(int, task.read_text().split())
    return found


def gather(observer: HostObserver, app: App) -> Harvest:
    """Let the program run, then bring in what was counted."""
    app.run()
    return observer.harvest()


def bpf_programs() -> Counter[str]:
    """Return the names of the BPF programs in the kernel."""
    found: Counter[str] = Counter()
    attribute = ctypes.create_string_buffer(16)
    number = 0
    while True:
        struct.pack_into("<IIII", attribute, 0, number, 0, 0, 0)
        try:
            syscall.bpf(11, attribute)  # BPF_PROG_GET_NEXT_ID
        except FileNotFoundError:
            return found
        number = struct.unpack_from("<I", attribute, 4)[0]
        try:
            fd = syscall.bpf(13, struct.pack("<IIII", number, 0, 0, 0))  # BPF_PROG_GET_FD_BY_ID
        except FileNotFoundError:
            continue
        info = ctypes.create_string_buffer(256)
        syscall.bpf(syscall.INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
        os.close(fd)
        found[info.raw[64:80].rstrip(b"\0").decode()] += 1
