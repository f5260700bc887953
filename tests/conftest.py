"""Shared rules of the test suite: what needs the C extension skips without it; a handed case may not be skipped in CI."""

from __future__ import annotations

import importlib.util
import os

import pytest

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
