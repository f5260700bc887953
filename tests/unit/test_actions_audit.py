"""The audit file: one line each, synced, redacted, owned by one process."""

from __future__ import annotations

import json
import os

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pasta_otel.errors import InputError
from pasta_otel.slo.actions.audit import AuditLog, redactor


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "audit.jsonl"


def test_entries_are_numbered_lines_that_a_new_process_continues(path):
    log = AuditLog(path)
    log.append([{"action": "a"}, {"action": "b\nc"}])
    log.close()
    log = AuditLog(path)
    log.append([{"action": "d"}])
    assert [(line["seq"], line["action"]) for line in map(json.loads, path.read_text().splitlines())] == [
        (1, "a"),
        (2, "b\nc"),
        (3, "d"),
    ]
    assert [line["action"] for line in log.recent(2)] == ["b\nc", "d"]
    log.close()


def test_a_torn_last_line_is_passed_over_and_does_not_swallow_the_next(path):
    log = AuditLog(path)
    log.append([{"action": "a"}])
    log.close()
    with path.open("a") as file:
        file.write('{"seq": 2, "act')
    log = AuditLog(path)
    assert log.damaged_lines == 1
    log.append([{"action": "b"}])
    assert [line["action"] for line in log.lines()] == ["a", "b"]
    log.close()


@pytest.mark.parametrize("kind", ["folder", "under a file", "owned"])
def test_without_an_audit_nothing_starts(path, kind):
    owner = None
    if kind == "folder":
        path.mkdir(parents=True)
    elif kind == "under a file":
        path.parent.write_text("")
    else:
        owner = AuditLog(path)
    with pytest.raises(InputError, match="cannot append") as refusal:
        AuditLog(path)
    assert refusal.value.file == str(path)
    if owner:
        owner.close()


@pytest.mark.parametrize("failing", ["fsync", "write"])
def test_an_entry_that_could_not_be_written_leaves_no_trace_and_no_half_line(path, monkeypatch, failing):
    log = AuditLog(path)
    log.append([{"action": "a"}])
    before, write = path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        if failing == "fsync":
            patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        else:
            patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        with pytest.raises(OSError, match="No space left"):
            log.append([{"action": "lost"}])
    assert path.read_bytes() == before
    log.append([{"action": "b"}])
    assert [(line["seq"], line["action"]) for line in log.lines()] == [(1, "a"), (3, "b")]
    assert [line["action"] for line in log.recent(9)] == ["a", "b"]
    log.close()


def test_secrets_never_stand_in_it(path):
    url = "https://hooks.example/T0/B0/abcdef"
    log = AuditLog(path, secrets=[url])
    log.append(
        [
            {
                "reason": f"POST {url} failed",
                "effect": {
                    "texts": ["Authorization: Bearer abc.def", "https://u:hunter2@h/p?key=k1&x=1&token=k2", url],
                    "n": 3,
                },
            }
        ]
    )
    text = path.read_text()
    assert not any(secret in text for secret in ("abcdef", "abc.def", "hunter2", "k1", "k2"))
    assert "x=1" in text
    log.close()


@given(st.text(min_size=4), st.text(), st.text())
def test_a_known_secret_is_masked_wherever_it_stands(secret, before, after):
    masked = redactor([secret])({"a": [before + secret + after]})
    assert secret not in masked["a"][0] or secret in "***"
