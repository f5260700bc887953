"""No password, token or header value that somebody configures is ever printed, however it is mistyped."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.app.options import SidecarOptions
from pasta_otel.app.upstream import forward_config
from pasta_otel.cli import main
from pasta_otel.errors import InputError, PastaError
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.headers import read_headers
from pasta_otel.model import CountRequest, TimeWindow
from pasta_otel.slo.actions.ofrep_client import OfrepTransport
from pasta_otel.slo.sources.page import fetch_page
from pasta_otel.slo.sources.router import ConnectedSource
from pasta_otel.urls import read_url, shown

SECRET = "S3CR3T"
URLS = (
    f"u:{SECRET}@127.0.0.1:9",
    f"ftp://u:{SECRET}@127.0.0.1:9",
    f"http://u:{SECRET}@127.0.0.1:9",
    f"http://{SECRET}@127.0.0.1:9",
    f"http://u:{SECRET}/x@127.0.0.1:9",
    f"http://u:{SECRET}?x@127.0.0.1:9",
    f"http://u:{SECRET}#x@127.0.0.1:9",
    f"http://u:{SECRET}@x:notaport",
    f"http://u:{SECRET}@[::1",
    f"http://u:{SECRET}@",
    f"http://u:{SECRET}@a b:1",
    f"http://u:{SECRET}@h\u2100:1",
    f"http://127.0.0.1:9/p?token={SECRET}",
    f"http://127.0.0.1:9/p?mail=a@b&token={SECRET}",
)
HEADERS = (
    f"authorization: Bearer {SECRET}",
    f"authorization: Bearer {SECRET}=",
    f"a=1,{SECRET}",
    f"={SECRET}",
    f"a=x%0d%0a{SECRET}",
    f"a={SECRET}\u20ac",
)
SLO = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: a}
spec:
  service: a
  budgetingMethod: Occurrences
  timeWindow: [{duration: 30d, isRolling: true}]
  indicator:
    metadata: {name: b}
    spec:
      ratioMetric:
        counter: true
        good: {metricSource: {type: prometheus, spec: {query: 'good_total'}}}
        total: {metricSource: {type: prometheus, spec: {query: 'all_total'}}}
  objectives: [{target: 0.9}]
"""
OTLP_JSON = {
    "resourceSpans": [
        {
            "resource": {},
            "scopeSpans": [{"spans": [{
                "traceId": "01" * 16, "spanId": "02" * 8, "name": "a",
                "startTimeUnixNano": "1", "endTimeUnixNano": "2",
            }]}],
        }
    ]
}  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_what_is_shown_of_a_url_holds_no_secret(url):
    assert SECRET not in shown(url)


def test_what_is_shown_of_a_url_says_where_it_leads():
    assert shown("http://u:p@h:1/v1?token=x#y") == "http://h:1/v1"
    assert shown("u:p@h") == "h"
    assert shown("https://h/a") == "https://h/a"


userinfo = st.text(st.characters(codec="utf-8"), min_size=1).map(lambda text: f"<{text}>")


@given(
    userinfo,
    st.sampled_from(["", "http://", "https://", "ftp://", "HTTP://"]),
    st.sampled_from(["h:1", "h", "", "[::1", "h:x"]),
)
def test_no_error_shows_a_password(secret, scheme, host):
    text = f"{scheme}u:{secret}@{host}"
    assert secret not in shown(text)
    said = ""
    try:
        said = read_url(text, field="F").plain
    except InputError as error:
        said = str(error)
    assert secret not in said
    assert secret not in shown(said)


@pytest.mark.parametrize("text", HEADERS)
def test_headers_that_cannot_be_read_are_refused_by_name_alone(text):
    with pytest.raises(InputError, match=r"^NAME: expected name=value") as caught:
        read_headers(text, field="NAME")
    assert SECRET not in str(caught.value)


def test_headers_are_read_as_the_specification_writes_them():
    text = " Authorization = Bearer%20a%3D%3D , x-tenant=a b=c,,X-Tenant=last"
    assert read_headers(text, field="NAME") == {"authorization": "Bearer a==", "x-tenant": "last"}
    assert read_headers("", field="NAME") == {}


def command(words, monkeypatch, capsys, caplog, **environ) -> tuple[int, str]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.DEBUG), pytest.raises(SystemExit) as stopped:
        main(list(words))
    written = capsys.readouterr()
    return int(stopped.value.code or 0), written.out + written.err + caplog.text


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    file = tmp_path / "spans.json"
    file.write_text(json.dumps(OTLP_JSON))
    return str(file)


@pytest.mark.parametrize("signal", ["", "TRACES_"])
@pytest.mark.parametrize("header", HEADERS)
def test_no_command_prints_a_header(header, signal, request_file, monkeypatch, capsys, caplog):
    variable = f"OTEL_EXPORTER_OTLP_{signal}HEADERS"
    sidecar = [
        "sidecar",
        "--upstream",
        "http://127.0.0.1:9",
        *(f"--{port}-port=0" for port in ("api", "otlp-grpc", "otlp-http")),
    ]
    for words in (["import", request_file, "--to", "otlp"], sidecar):
        code, said = command(words, monkeypatch, capsys, caplog, **{variable: header})
        assert code == 2
        assert f"{variable}: expected name=value" in said
        assert SECRET not in said


@pytest.mark.parametrize("url", URLS)
def test_no_command_prints_the_credentials_of_a_url(url, request_file, tmp_path, monkeypatch, capsys, caplog):
    (slo := tmp_path / "slo.yaml").write_text(SLO)
    for words, variable in (
        (["import", request_file, "--to", "otlp"], "OTEL_EXPORTER_OTLP_ENDPOINT"),
        (["import", request_file, "--to", "otlp"], "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        (["doctor"], "OTEL_EXPORTER_OTLP_ENDPOINT"),
        (["slo", "status"], "PASTA_CONTROLLER_URL"),
        (["attribute", "--service", "a"], "PASTA_CONTROLLER_URL"),
        (["slo", "status", "--server", url], ""),
        (["attribute", "--service", "a", "--server", url], ""),
        (["slo", "status", "--slo", str(slo), "--prometheus", url], ""),
    ):
        with monkeypatch.context() as patched:
            patched.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
            environ = {variable: url} if variable else {}
            _, said = command(words, patched, capsys, caplog, **environ)
        assert SECRET not in said, words


@pytest.mark.parametrize("url", URLS)
def test_nothing_that_reads_a_url_prints_its_credentials(url, caplog):
    def refused(call) -> str:
        try:
            return repr(call())
        except (PastaError, OSError) as error:
            return f"{error!r} {error}"

    said = [
        refused(lambda: OtlpConfig(url)),
        refused(lambda: OtlpConfig(url, protocol="grpc")),
        refused(lambda: OfrepTransport(url)),
        refused(lambda: fetch_page(url, timeout_seconds=0.2)),
        refused(lambda: SidecarOptions(upstream=url)),
        refused(lambda: forward_config(SidecarOptions(upstream=url), {})),
        refused(lambda: ConnectedSource({}, lambda _: url).counts([CountRequest("", TimeWindow(0, 1))], 1)),
        caplog.text,
    ]
    assert SECRET not in " ".join(said)


def test_credentials_of_a_url_are_sent_as_basic_authentication():
    config = OtlpConfig.from_env({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://u%40x:p%3Aw@h:1/p"})
    assert (config.endpoint, config.target) == ("http://h:1/p/v1/traces", "h:1")
    assert config.headers == (("authorization", "Basic dUB4OnA6dw=="),)
    own = OtlpConfig("http://u:p@h:1", headers=(("Authorization", "Bearer t"),))
    assert own.headers == (("Authorization", "Bearer t"),)
