"""A server that is given a token asks for it, and one whose token is missing does not start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pasta_otel.app.sidecar import Sidecar
from pasta_otel.cli import main
from pasta_otel.errors import InputError
from tests.integration.serving import ask, options, running

JSON = {"Content-Type": "application/json"}
BEARER = {"Authorization": "Bearer abc"}


async def statuses(sidecar: Sidecar) -> dict[str, int]:
    async with running(sidecar) as at:

        def asked(url: str, **rest: Any) -> int:
            return ask(url, **rest)[0]

        ledger, otlp = f"{at['api']}/api/v1/ledger", f"{at['otlp_http']}/v1/traces"
        return {
            "api": await asyncio.to_thread(asked, ledger),
            "api with token": await asyncio.to_thread(asked, ledger, headers=BEARER),
            "health": await asyncio.to_thread(asked, f"{at['api']}/healthz"),
            "otlp": await asyncio.to_thread(asked, otlp, body=b"{}", headers=JSON),
            "otlp with token": await asyncio.to_thread(asked, otlp, body=b"{}", headers=JSON | BEARER),
        }


async def test_pasta_api_token_protects_the_api_and_leaves_otlp_to_plain_senders():
    found = await statuses(Sidecar(options(), environ={"PASTA_API_TOKEN": "abc\n"}))
    assert found == {"api": 401, "api with token": 200, "health": 200, "otlp": 200, "otlp with token": 200}


async def test_the_token_of_a_settings_file_protects_the_api_too(tmp_path: Path):
    (tmp_path / "pasta.yaml").write_text("api_token: abc\n")
    found = await statuses(Sidecar(options(), environ={"PASTA_CONFIG": str(tmp_path / "pasta.yaml")}))
    assert (found["api"], found["api with token"]) == (401, 200)


async def test_a_token_given_by_option_protects_otlp_and_api_and_wins_over_the_variable():
    found = await statuses(Sidecar(options(token="abc"), environ={"PASTA_API_TOKEN": "other"}))
    assert found == {"api": 401, "api with token": 200, "health": 200, "otlp": 401, "otlp with token": 200}


def test_a_token_variable_that_is_there_but_empty_is_refused():
    with pytest.raises(InputError, match="PASTA_API_TOKEN: is set but empty"):
        Sidecar(options(), environ={"PASTA_API_TOKEN": " "})


@pytest.mark.parametrize(
    "command",
    [("sidecar",), ("controller", "--slo", "x.yaml"), ("agent",)],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("value", [None, "", " \n", "two words", "kööl"])
def test_a_named_variable_without_a_token_stops_the_start_and_is_named_without_its_value(
    command: tuple[str, ...], value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("SECRET_HERE", raising=False)
    if value is not None:
        monkeypatch.setenv("SECRET_HERE", value)
    with pytest.raises(SystemExit) as stop:
        main([*command, "--token-env", "SECRET_HERE"])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith("pasta-otel: --token-env: the variable SECRET_HERE ")
    assert err.count("\n") == 1
    assert not (value or "").strip() or value not in err
