"""Host events carry the span of the thread they happened on, in every way that a Python service runs code."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pasta_otel.ebpf import layout
from pasta_otel.ebpf.layout import Aggregate
from pasta_otel.ebpf.ports import RefusedError, Site
from pasta_otel.ebpf.probes import load_probes
from tests.ebpf.scenario import (
    TOOLS,
    App,
    assert_accounts,
    assert_inside,
    base_names,
    expected_calls,
    gather,
    host_pids,
    linked_calls,
)
from tests.support import wait_for

LOADERS = ("core", "core_perf", "bcc")
BASE = base_names(load_probes())


@pytest.fixture(params=LOADERS)
def loader(request) -> str:
    return request.param


def of_calls(observer, aggregates: tuple[Aggregate, ...], pids: set[int]) -> list[Aggregate]:
    return [item for item in aggregates if item.tgid in pids and observer.apis[item.api].symbols]


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_every_driver_function_is_seen_once_with_its_span_inside_the_callers_interval(observe, standin, loader):
    with App(standin, "every") as app:
        observer = observe(loader, probes=load_probes())
        observer.start()
        assert {item.refusal.reason for item in observer.report() if item.refusal} <= {"loader_cannot"}
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)
        assert assert_inside(observer, app, harvest.events) == sum(expected_calls(BASE, app).values())
        assert_accounts(observer)


def test_sizes_of_copies_and_allocations_are_summed_in_bytes(observe, standin):
    with App(standin, "every") as app:
        observer = observe(probes=load_probes())
        observer.start()
        harvest = gather(observer, app)
        sizes = {observer.apis[item.api].name: item.size for item in of_calls(observer, harvest.aggregates, {app.pid})}
        assert sizes["cuMemcpyHtoD_v2"] == 2 * 1000  # it and its per-thread-stream copy
        assert sizes["cuMemsetD32_v2"] == 2 * 4000
        assert sizes["cuMemAlloc_v2"] == 1000
        assert sizes["cuLaunchKernel"] == 0


@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_concurrent_spans_get_their_own_calls_and_no_others(observe, standin, loader, mode):
    with App(standin, mode) as app:
        observer = observe(loader)
        observer.start()
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)
        assert assert_inside(observer, app, harvest.events) == sum(expected_calls(BASE, app).values())
        assert_accounts(observer)


def test_calls_of_a_task_without_a_span_are_counted_as_unlinked(observe, standin):
    with App(standin, "asyncio") as app:
        observer = observe()
        observer.start()
        harvest = gather(observer, app)
        free = [
            a for a in of_calls(observer, harvest.aggregates, {app.pid}) if observer.apis[a.api].name == "cuMemFree_v2"
        ]
        assert [(item.link, item.events) for item in free] == [("none", 20)]


def test_in_an_event_loop_that_cannot_be_followed_calls_are_stale_and_linked_to_nothing(observe, standin):
    with App(standin, "stale") as app:
        observer = observe()
        observer.start()
        harvest = gather(observer, app)
        launches = [a for a in of_calls(observer, harvest.aggregates, {app.pid}) if a.api == 0]
        steps = sum(len(span["calls"]["cuLaunchKernel"]) for span in app.spans)
        links = {item.link: item.events for item in launches}
        assert sum(links.values()) == steps
        assert links["stale"] > 0
        # within a step the loop's own hook still publishes nothing that is not certain
        assert set(links) <= {"stale", "none"}
        assert not any(any(item.span_id) for item in launches)


@pytest.fixture
def with_uvloop() -> None:
    if not (TOOLS / "uvloop").exists():
        pytest.skip("no uvloop: tests/tools.sh brings it")


@pytest.mark.usefixtures("with_uvloop")
def test_tasks_in_uvloop_are_linked_as_in_asyncios_own_loop(observe, standin):
    with App(standin, "uvloop") as app:
        observer = observe()
        observer.start()
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)
        assert assert_inside(observer, app, harvest.events) == sum(expected_calls(BASE, app).values())
        others = [
            (item.link, item.events)
            for item in of_calls(observer, harvest.aggregates, {app.pid})
            if item.link != "slot"
        ]
        assert others == [("none", 20)]  # of the task without a span


@pytest.mark.usefixtures("with_uvloop")
def test_a_span_that_a_callback_in_uvloop_leaves_behind_is_stale_and_linked_to_nothing(observe, standin):
    with App(standin, "callbacks") as app:
        observer = observe()
        observer.start()
        harvest = gather(observer, app)
        launches = of_calls(observer, harvest.aggregates, {app.pid})
        assert [(item.link, item.events) for item in launches] == [("stale", 1)]


def test_functions_in_anyios_worker_threads_are_linked_to_their_callers_span(observe, standin):
    with App(standin, "anyio") as app:
        observer = observe()
        observer.start()
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)
        free = [a for a in of_calls(observer, harvest.aggregates, {app.pid}) if a.link != "slot"]
        assert [(item.link, item.events) for item in free] == [("none", 4)]  # after the span had ended


def test_a_forked_child_is_linked_to_its_own_spans(observe, standin, loader):
    with App(standin, "fork") as app:
        observer = observe(loader)
        observer.start()
        app.go_on()
        child = app.until("child")["pid"]
        observer.refresh()
        app.go_on()
        app.until("done")
        harvest = observer.harvest()
        assert linked_calls(observer, harvest.aggregates, {app.pid, child}) == expected_calls(BASE, app)
        assert {span["pid"] for span in app.spans} == {app.pid, child}


def test_a_child_that_works_and_ends_before_anybody_looks_is_linked_all_the_same(observe, standin):
    with App(standin, "fork_at_once") as app:
        observer = observe()
        observer.start()
        harvest = gather(observer, app)
        children = {span["pid"] for span in app.spans}
        assert app.pid not in children
        assert linked_calls(observer, harvest.aggregates, children) == expected_calls(BASE, app)
        assert {event.tgid for event in harvest.critical if event.kind == layout.FORK} >= children
        observer.refresh()  # which also forgets children that nobody saw
        assert {pid for pid in children if observer._process_map.get(pid.to_bytes(4, "little"))} == set()


def test_a_process_that_starts_another_program_is_found_again_long_before_its_turn(observe, standin, loader):
    with App(standin, "become") as app:
        observer = observe(loader)
        observer.start()
        known = observer.processes.processes[app.pid]
        known.began_s -= 3600  # an old process, which is looked at every 15 s
        known.next_scan_s = time.monotonic() + 15
        app.go_on()
        app.until("ready")
        began = time.monotonic()
        wait_for(lambda: observer.attend() is not None and observer.service_of(app.pid) == "app-work")
        assert time.monotonic() - began < 5  # it took its new program's age, not its own
        app.told.clear()
        observer.harvest()
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)


def test_a_process_in_its_own_pid_namespace_is_linked(observe, standin, loader):
    with App(standin, "threads", prefix=("unshare", "--pid", "--fork", "--mount-proc")) as app:
        assert app.pid == 1  # as the program sees itself
        observer = observe(loader)
        observer.start()
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, host_pids(app)) == expected_calls(BASE, app)


def test_a_library_that_only_its_process_can_see_is_probed_through_that_processs_root(observe, standin):
    hidden = Path("/mnt") / standin.name
    put = f'mount -t tmpfs none /mnt && cp {standin} /mnt && exec "$@"'
    with App(hidden, "threads", prefix=("unshare", "--mount", "sh", "-c", put, "sh")) as app:
        assert not hidden.exists()
        observer = observe()
        observer.start()
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)
        assert str(hidden) in {item.target for item in observer.report()}


def test_a_library_that_a_running_program_loads_later_is_found(observe, standin):
    code = "import ctypes, sys; sys.stdin.readline(); ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.readline()"
    command = [sys.executable, "-c", code, str(standin)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        observer = observe()
        observer.start()
        assert observer.targets == 0
        program.stdin.write(b"\n")
        program.stdin.flush()
        program.stdout.readline()
        wait_for(lambda: observer.refresh() and observer.targets == 1)
        program.communicate(b"\n")


def test_two_programs_on_one_node_are_told_apart(observe, standin):
    with App(standin, "threads") as first, App(standin, "asyncio") as second:
        observer = observe()
        observer.start()
        first.run()
        harvest = gather(observer, second)
        for app in (first, second):
            assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)
            assert observer.service_of(app.pid) == f"app-{'threads' if app is first else 'asyncio'}"


def test_a_wait_inside_a_driver_call_is_an_absence_from_the_cpu_of_the_same_span(observe, standin, loader):
    with App(standin, "threads") as app:
        observer = observe(loader)
        observer.start()
        harvest = gather(observer, app)
        for span in (span for span in app.spans if span["name"] == "inner"):
            slept = [
                item
                for item in harvest.aggregates
                if item.span_id.hex() == span["span_id"] and observer.apis[item.api].name == "sleeping"
            ]
            assert sum(item.events for item in slept) >= len(span["calls"]["cuStreamSynchronize"])
        assert_accounts(observer)


def test_a_program_that_comes_later_is_found(observe, standin):
    observer = observe()
    observer.start()
    with App(standin, "work") as app:
        observer.refresh()
        harvest = gather(observer, app)
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(BASE, app)
    for _ in range(100):
        if observer.refresh().gone:
            break
        time.sleep(0.02)
    assert observer.service_of(app.pid) == ""
    assert not [item for item in observer.report() if item.target == str(standin)]


def test_a_place_that_the_kernel_cannot_probe_is_refused_as_such_and_not_as_a_program(observe, standin):
    observer = observe()
    nowhere = [Site("cuLaunchKernel", 1 << 40, 1)]
    with pytest.raises(RefusedError) as refused:
        observer.loaded.attach_uprobes("cuda", "call_count", str(standin), nowhere)
    assert refused.value.refusal.reason == "attach_refused"
