"""Shared rules of the test suite: what needs the C extension skips without it; a handed case may not be skipped in CI.

With ``-n 2`` (pytest-xdist) two workers take a file each, in the order of collection. What needs the machine for itself,
since it measures times that another test would change, or keeps every CPU busy, is marked ``alone``: it waits for the
other worker's test to end, and the other worker waits for it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.turns import turn

# An installation without a C compiler has no extension and no GPU kernel capture: see setup.py
NATIVE = importlib.util.find_spec("pasta_otel._native._cupti") is not None
MAY_LACK_NATIVE = not NATIVE and os.environ.get("CI") != "true"
NO_NATIVE = "Skipped: the C extension is not installed (no C compiler or Python.h when it was installed)"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """Skip a module that cannot be imported because of the missing extension, and for no other reason."""
    outcome = yield
    report = outcome.get_result()
    if MAY_LACK_NATIVE and report.failed and "cannot import name '_cupti'" in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, NO_NATIVE)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.get_closest_marker("case") and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"a handed case must run in CI, but it was skipped: {report.longrepr}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Keep a file's tests together, which share its fixtures, and all of eBPF's, which see each other in the kernel."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/ebpf" if file.startswith("tests/ebpf/") else file

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # first: waiting is no part of the test's time
def pytest_runtest_protocol(item: pytest.Item):
    if not hasattr(item.config, "workerinput"):
        return (yield)
    here = Path(__file__)
    with turn(here.parent, here, alone=item.get_closest_marker("alone") is not None):
        return (yield)
