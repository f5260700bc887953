"""What nests too deep is refused with its place; it never ends in a RecursionError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pasta_otel.config import load_settings
from pasta_otel.errors import InputError
from pasta_otel.exporters.api import ApiProviders, create_app
from pasta_otel.slo.actions.audit import AuditLog
from pasta_otel.slo.actions.state import Checkpoint
from pasta_otel.slo.policy import load_policy

DEEP = "[" * 5000 + "]" * 5000
READERS: dict[str, Callable[[str], object]] = {
    "policy": load_policy,
    "settings": lambda path: load_settings({"PASTA_CONFIG": path}),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (DEEP, "nested deeper than 64 levels"),
        ("a: " + "{a: " * 5000 + "1" + "}" * 5000, "nested deeper than 64 levels"),
        ("mode: 2020-13-45", "not valid YAML"),
        ("mode: " + "1" * 5000, "not valid YAML"),
        ("? [a]\n: b", ""),
    ],
)
def test_hostile_yaml_is_refused_with_its_file(reader: str, text: str, why: str, tmp_path: Path):
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        READERS[reader](str(file))
    assert str(refused.value).startswith(str(file))
    assert why in str(refused.value)


def test_a_settings_file_that_is_not_utf8_is_refused(tmp_path: Path):
    (tmp_path / "s.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid YAML"):
        load_settings({"PASTA_CONFIG": str(tmp_path / "s.yaml")})


async def test_bodies_that_nest_too_deep_are_bad_requests():
    class Flags:
        def evaluate(self, key: str) -> None:
            return None

    app = create_app(ApiProviders(flags=Flags(), attribute=lambda question: question))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sidecar") as client:
        for path in ("/api/v1/attribute", "/ofrep/v1/evaluate/flags/x"):
            assert (await client.post(path, content="[" * 100_000)).status_code == 400


def test_a_checkpoint_and_an_audit_line_that_nest_too_deep_are_passed_over(tmp_path: Path):
    (tmp_path / "actions.json").write_text("[" * 100_000)
    (tmp_path / "audit.jsonl").write_text("[" * 100_000 + "\n")
    audit = AuditLog(tmp_path / "audit.jsonl")
    try:
        assert Checkpoint(tmp_path / "actions.json").load(audit.lines()).seq == 0
        assert audit.damaged_lines > 0
    finally:
        audit.close()
