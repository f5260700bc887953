"""One process has one instance id, and the exporters are those that the variables choose."""

from __future__ import annotations

import logging
import threading

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

from pasta_otel import semconv
from pasta_otel.app.chosen import exporter_environment, exporters
from pasta_otel.exporters.metrics import build_meter_provider
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.resource import ProcessIdentity, default_identity, identity_of
from pasta_otel.exporters.otlp.spans import build_tracer_provider
from pasta_otel.exporters.prometheus import PrometheusReader

ID = semconv.SERVICE_INSTANCE_ID


def test_traces_metrics_and_rows_of_one_process_say_one_instance_id():
    traces = build_tracer_provider(OtlpConfig("http://127.0.0.1:9"))
    reader = PrometheusReader()
    metrics = build_meter_provider(readers=[reader])
    metrics.get_meter("m").create_counter("c").add(1)
    said = str(traces.resource.attributes[ID])
    assert f'service_instance_id="{said}"' in reader.render("")[1].decode()
    assert identity_of(lambda: dict(traces.resource.attributes)).attributes()[ID] == said
    traces.shutdown()
    metrics.shutdown()


def test_the_id_that_the_user_chose_is_everybodys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"{ID}=mine")
    assert default_identity().attributes()[ID] == "mine"
    assert default_identity() is default_identity()


def test_rows_and_metrics_follow_a_provider_that_has_an_id_of_its_own():
    own = TracerProvider(resource=Resource({ID: "theirs"}), shutdown_on_exit=False)
    assert identity_of(lambda: dict(own.resource.attributes)).attributes()[ID] == "theirs"
    assert identity_of(dict) is default_identity()


def test_two_threads_that_ask_first_in_a_child_get_one_id(monkeypatch: pytest.MonkeyPatch):
    entered, made = threading.Barrier(2), []

    def new_id() -> str:
        entered.wait(10)  # both are past the look-up
        made.append(len(made))
        return str(len(made))

    identity = ProcessIdentity("parent", new_id=new_id)
    monkeypatch.setattr("pasta_otel.exporters.otlp.resource.os.getpid", lambda: -1)
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(identity.attributes()[ID])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert got[0] == got[1]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, {"otlp"}),
        ("", {"otlp"}),
        ("otlp", {"otlp"}),
        (" OTLP , console ", {"otlp", "console"}),
        ("none", set()),
        ("none,otlp", set()),
        ("console", {"console"}),
        ("otlp_proto_grpc", {"otlp"}),
        ("zipkin", set()),
    ],
)
def test_exporters_are_those_that_the_variable_names(
    value: str | None, chosen: set[str], caplog: pytest.LogCaptureFixture
):
    environ = {} if value is None else {"OTEL_TRACES_EXPORTER": value}
    with caplog.at_level(logging.WARNING):
        assert exporters("traces", environ) == chosen
    assert ("zipkin" in caplog.text) == (value == "zipkin")


def test_the_exporter_for_grpc_speaks_grpc_unless_a_variable_says_otherwise():
    environ = {"OTEL_TRACES_EXPORTER": "otlp_proto_grpc"}
    assert OtlpConfig.from_env(exporter_environment("traces", environ)).protocol == "grpc"
    said = {**environ, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    assert OtlpConfig.from_env(exporter_environment("traces", said)).protocol == "http/protobuf"
