"""Shared rules of the test suite: a handed case may not be skipped in CI."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.get_closest_marker("case") and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"a handed case must run in CI, but it was skipped: {report.longrepr}"
