"""A flood loses nothing uncounted, and does not take the place of what must not be lost."""

import subprocess
import time
from collections import Counter

import pytest

from pasta_otel.ebpf.observer import Thresholds
from tests.ebpf.scenario import App, assert_accounts, base_names, expected_calls, linked_calls, some_functions

CALLS = 300_000
CUDA, LAUNCH, CRITICAL = 0, 1, 3


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_a_flood_is_counted_to_the_last_call_and_the_critical_ring_keeps_its_room(observe, standin, loader):
    observer = observe(loader, thresholds=Thresholds(sample=1))
    with App(standin, "flood", str(CALLS)) as app:
        observer.start()
        app.go_on()
        started = []
        while app.process.poll() is None and len(started) < 20:
            done = subprocess.Popen(["true"])
            done.wait()
            started.append(done.pid)
        app.until("done")
        harvest = observer.harvest()
        launches = [item for item in harvest.aggregates if item.tgid == app.pid and item.api == 0]
        assert [(item.link, item.events) for item in launches] == [("slot", CALLS)]
        assert sum(launches[0].histogram) == CALLS
        account = observer.counters()[LAUNCH]
        assert account.seen == account.submitted == account.linked == CALLS
        assert account.ring_submitted + account.ring_full == CALLS
        assert account.ring_full > 0  # nobody emptied the ring meanwhile
        assert sum(event.api == 0 for event in harvest.events) == account.ring_submitted
        execs = Counter(event.tgid for event in harvest.critical if event.kind == 1)
        assert set(started) <= set(execs)
        assert observer.counters()[CRITICAL].ring_full == 0
        assert_accounts(observer)


def test_both_loaders_count_the_same_stimulus_alike(observe, standin):
    found = []
    for loader in ("core", "bcc"):
        observer = observe(loader)
        with App(standin, "threads") as app:
            observer.start()
            app.run()
            harvest = observer.harvest()
        calls = linked_calls(observer, harvest.aggregates, {app.pid})
        assert calls == expected_calls(base_names(some_functions()), app)
        names = {(span["trace_id"], span["span_id"]): span["name"] for span in app.spans}
        found.append(sorted((names[trace, span], function, count) for (trace, span, function), count in calls.items()))
        observer.close()
    assert found[0] == found[1]


def test_a_full_aggregate_map_is_counted_and_nothing_is_invented(observe, standin):
    """More spans than the map has room for: what does not fit is in ``full``."""
    observer = observe()
    with App(standin, "spans", "17000") as app:
        observer.start()
        app.run()
        harvest = observer.harvest()
        told = sum(item.events for item in harvest.aggregates if item.tgid == app.pid and item.api == 0)
        account = observer.counters()[LAUNCH]
        assert account.seen == 17000
        assert account.full > 0
        assert told == account.submitted == 17000 - account.full
        assert_accounts(observer)


def test_launch_probes_come_and_go_while_calls_run(observe, standin):
    observer = observe(launch_timing="off")
    with App(standin, "threads") as app:
        observer.start()
        observer.time_launches("duration")
        observer.time_launches("off")
        app.run()
        harvest = observer.harvest()
        functions = {observer.apis[item.api].name for item in harvest.aggregates if item.tgid == app.pid}
        assert "cuStreamSynchronize" in functions
        assert "cuLaunchKernel" not in functions


def test_without_return_probes_calls_are_counted_and_linked_but_not_timed(observe, standin):
    from pasta_otel.ebpf.return_probes import return_probes_refusal

    observer = observe(return_refusal=return_probes_refusal("6.12.0", "x86_64"))
    with App(standin, "threads") as app:
        observer.start()
        app.run()
        harvest = observer.harvest()
        assert linked_calls(observer, harvest.aggregates, {app.pid}) == expected_calls(
            base_names(some_functions()), app
        )
        calls = [item for item in harvest.aggregates if observer.apis[item.api].symbols]
        assert {item.sum_ns for item in calls} == {0}


def test_a_launch_window_opens_and_closes_under_the_budget_and_weighs_what_it_records(observe, standin):
    from opentelemetry.metrics import NoOpMeter

    from pasta_otel.app.launches import LaunchWindows
    from pasta_otel.clock import SystemClock

    observer = observe(launch_timing="off", thresholds=Thresholds(0, 0))
    with App(standin, "flood", "20000000000") as app:
        observer.start()
        windows = LaunchWindows(observer, 0.5, SystemClock(), NoOpMeter("x"))
        app.go_on()
        recorded, weights = 0, []
        while not weights:
            time.sleep(min(windows.wait_s(), 0.5))
            if windows.due():
                weights.append(windows.record(time.sleep))
                recorded += sum(item.events for item in observer.harvest().aggregates if item.api == 0)
        seen = observer.counters()[LAUNCH].seen
        app.process.kill()
    assert recorded == seen > 0
    assert all(weight >= 1.0 for weight in weights)
    assert observer.counters()[LAUNCH].seen == seen  # nothing is attached between windows
