"""Every option is checked before anything listens: one line that names it, exit code 2 or 3, and no traceback."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import duckdb
import pytest

from pasta_otel.app.options import RANGES
from pasta_otel.app.sidecar import Sidecar
from pasta_otel.app.upstream import refuse_loop
from pasta_otel.cli import main
from pasta_otel.config import SETTINGS, load_settings
from pasta_otel.errors import InputError
from pasta_otel.exporters.store import DuckDBSpanStore
from tests.integration.serving import ask, options, running
from tests.integration.test_sidecar_health import SPEC


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Return the one line with which a command that does not start says why."""
    free = ("--otlp-grpc-port", "0", "--otlp-http-port", "0", "--api-port", "0") if arguments[0] == "sidecar" else ()
    with pytest.raises(SystemExit) as stop:
        main([arguments[0], *free, *arguments[1:]])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (code, "")
    (line,) = [line for line in err.splitlines() if line.startswith("pasta-otel: ")]
    assert "Traceback" not in err
    return line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--tick", text) for text in ("nan", "inf", "-inf", "0", "1e300", "1e-12")),
        *(("--grace", text) for text in ("nan", "inf", "-1", "1e300")),
        *(("--drain", text) for text in ("nan", "inf", "-1")),
        *(("--store-max-hours", text) for text in ("nan", "inf", "-3", "0")),
        *(("--store-max-mib", text) for text in ("0", "-1")),
        *((port, text) for port in ("--api-port", "--otlp-http-port", "--otlp-grpc-port") for text in ("-1", "99999")),
    ],
)
def test_a_number_out_of_range_is_refused_by_the_name_of_its_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
):
    assert refused(capsys, "sidecar", option, value).startswith(f"pasta-otel: {option}: expected a number from ")


def test_an_objective_that_the_windows_cannot_watch_is_logged_at_the_start(tmp_path: Path, caplog):
    (tmp_path / "slo.yaml").write_text(SPEC.replace("0.95", "0.5"))
    given = options(slo_paths=(str(tmp_path / "slo.yaml"),), windows="demo")

    async def start() -> None:
        async with running(Sidecar(given, environ={})):
            pass

    asyncio.run(start())
    (warning,) = [record for record in caplog.records if "can never fire" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith("slo checkout: page:30s/5s: can never fire: needs an error ratio above 1.2")


def test_every_number_of_the_options_has_a_range():
    given = options()
    values = {name: getattr(given, name) for name in type(given).__dataclass_fields__}
    numbers = {name for name, value in values.items() if type(value) in {int, float}}
    assert numbers == set(RANGES)


@pytest.mark.parametrize(
    ("upstream", "why"),
    [
        ("http://x:99999", "Port out of range"),
        ("http://x:port", "Port could not be cast"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://", "with a host"),
        ("http://a b:4318", "with a host"),
        ("ftp://x:1", "with a host"),
    ],
)
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_upstream_that_is_no_url_is_named_as_it_was_typed(
    upstream: str, why: str, protocol: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    line = refused(capsys, "sidecar", "--upstream", upstream, "--upstream-protocol", protocol)
    assert line.startswith("pasta-otel: --upstream: ")
    assert why in line
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", upstream)
    assert refused(capsys, "sidecar", "--upstream-protocol", protocol).startswith(
        "pasta-otel: OTEL_EXPORTER_OTLP_ENDPOINT: "
    )


def test_a_bare_host_is_no_http_endpoint(capsys: pytest.CaptureFixture[str]):
    line = refused(capsys, "sidecar", "--upstream", "notaurl")
    assert line == "pasta-otel: --upstream: expected an http or https URL, got 'notaurl'"


def test_a_ca_file_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("no PEM")
    environ = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem")}
    with pytest.raises(InputError, match=r"ca\.pem: OTEL_EXPORTER_OTLP_CERTIFICATE: cannot be used"):
        Sidecar(options(upstream="https://collector:4318"), environ=environ)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "0.0.0.0", "LOCALHOST."])
@pytest.mark.parametrize("ours", ["127.0.0.1", "0.0.0.0"])
def test_every_spelling_of_our_own_address_is_seen_as_a_loop(host: str, ours: str):
    with pytest.raises(InputError, match=f"--upstream: {host.lower()}:15318 is this sidecar's own port"):
        Sidecar(options(upstream=f"http://{host}:15318", host=ours, otlp_http_port=15318), environ={})


def test_ipv6_and_mapped_addresses_are_compared_as_addresses():
    for upstream, ours in (
        ("http://[::ffff:127.0.0.1]:5", "127.0.0.1"),
        ("http://[0:0::1]:5", "::1"),
        ("[::]:5", "::"),
    ):
        with pytest.raises(InputError, match="own port"):
            refuse_loop(options(upstream=upstream, host=ours), (None, 0, 5))


def test_another_port_another_machine_and_a_name_without_address_are_no_loop():
    for upstream in ("http://127.0.0.1:6", "http://192.0.2.1:5", "http://nowhere.invalid:5"):
        refuse_loop(options(upstream=upstream), (0, 5))
        refuse_loop(options(upstream=upstream, host="0.0.0.0"), (0, 5))


async def test_a_port_that_was_chosen_at_the_start_is_checked_too(monkeypatch: pytest.MonkeyPatch):
    sidecar = Sidecar(options(upstream="http://127.1:9"), environ={})
    start = sidecar._receiver.start

    async def start_on_port_9() -> None:
        await start()
        sidecar._receiver.http_port = 9

    monkeypatch.setattr(sidecar._receiver, "start", start_on_port_9)
    with pytest.raises(InputError, match=r"127\.1:9 is this sidecar's own port"):
        async with running(sidecar):
            pass


@pytest.mark.parametrize("option", ["--state", "--flagd-file", "--audit"])
@pytest.mark.parametrize("place", ["/dev/null", "/proc/x/y", "FILE"])
def test_a_place_where_nothing_can_be_written_is_named(
    option: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "FILE").write_text("")
    place = place.replace("FILE", str(tmp_path / "FILE"))
    rest = () if option == "--state" else ("--state", str(tmp_path / "state"))
    line = refused(capsys, "sidecar", option, place if option == "--state" else f"{place}/file", *rest)
    assert option in line
    assert place in line


@pytest.mark.parametrize("option", ["--audit", "--flagd-file", "--policy"])
def test_an_option_that_has_no_effect_without_state_is_refused(option: str, capsys: pytest.CaptureFixture[str]):
    line = refused(capsys, "sidecar", option, "/nonexist/file")
    assert line.startswith(f"pasta-otel: {option}: ")
    assert line.endswith("give --state too")


def test_a_directory_is_no_audit_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = refused(capsys, "sidecar", "--state", str(tmp_path), "--audit", "/")
    assert line == "pasta-otel: /: --audit: is a directory, expected a file"


def test_burn_rate_windows_are_checked_also_without_an_slo(capsys: pytest.CaptureFixture[str]):
    assert refused(capsys, "sidecar", "--windows", "nope").startswith("pasta-otel: nope: --windows: neither a file")


def test_an_empty_host_is_refused(capsys: pytest.CaptureFixture[str]):
    assert refused(capsys, "sidecar", "--host", "").startswith("pasta-otel: --host: ")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_files_that_are_no_certificate_or_key_are_told_apart(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    certificate, key = pair
    (tmp_path / "notpem").write_text("no PEM")
    bad, missing = str(tmp_path / "notpem"), str(tmp_path / "missing")
    for cert_file, key_file, option in (
        (bad, bad, "--tls-certificate"),
        (str(certificate), bad, "--tls-key"),
        (bad, str(key), "--tls-certificate"),
        (missing, str(key), "--tls-certificate"),
        (str(certificate), missing, "--tls-key"),
    ):
        line = refused(capsys, "sidecar", "--tls-certificate", cert_file, "--tls-key", key_file)
        assert f": {option}: " in line
    assert "--tls-key is missing" in refused(capsys, "sidecar", "--tls-certificate", str(certificate))


def test_a_key_with_a_passphrase_is_refused_and_asks_nobody(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkcs8", "-topk8", "-in", str(pair[1]), "-out", str(locked), "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    line = refused(capsys, "sidecar", "--tls-certificate", str(pair[0]), "--tls-key", str(locked))
    assert "without a passphrase" in line


@pytest.fixture(scope="module")
def store_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("store") / "good.duckdb"
    DuckDBSpanStore.open(str(path)).close()
    with duckdb.connect(str(path)) as connection:
        connection.execute("insert into operations select i, 's' || i, 'o' || i, 2 from range(50000) t(i)")
        connection.execute("checkpoint")
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.7, 0.95])
def test_a_store_file_that_was_cut_is_refused_by_name(
    share: float, store_file: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "cut.duckdb"
    path.write_bytes(store_file[: int(len(store_file) * share)])
    assert str(path) in refused(capsys, "sidecar", "--store", str(path))
    assert str(path) in refused(capsys, "attribute", "--service", "x", "--store", str(path))


@pytest.mark.parametrize("at", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_store_file_with_flipped_bytes_is_refused_by_name_or_serves(
    at: float, store_file: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "flipped.duckdb"
    damaged = bytearray(store_file)
    start = int(len(damaged) * at)
    damaged[start : start + 64] = bytes(byte ^ 0xFF for byte in damaged[start : start + 64])
    path.write_bytes(damaged)
    with pytest.raises(SystemExit) as stop:
        main(["attribute", "--service", "x", "--store", str(path)])
    err = capsys.readouterr().err
    assert stop.value.code in {2, 3}
    if stop.value.code == 2:
        assert err.startswith(f"pasta-otel: {path}: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 9}', '{"version": 1, "slos": {"a": {}}}'])
def test_a_damaged_state_file_is_refused_with_what_may_be_deleted_and_what_that_costs(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "slo.yaml").write_text(SPEC)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "slo.json").write_text(text)
    line = refused(capsys, "sidecar", "--slo", str(tmp_path / "slo.yaml"), "--state", str(tmp_path / "state"))
    assert line.startswith(f"pasta-otel: {tmp_path}/state/slo.json: ")
    assert "it may be deleted: then every SLO starts as no_data" in line


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_ipv6_address_is_bound_with_and_without_brackets(host: str):
    async with running(Sidecar(options(host=host), environ={})) as at:
        assert at["otlp_http"].startswith("http://[::1]:")
        assert at["otlp_grpc"].startswith("[::1]:")
        status, _ = await asyncio.to_thread(ask, f"{at['api']}/healthz")
    assert status == 200


@pytest.mark.parametrize("name", [setting.env for setting in SETTINGS if setting.env.endswith("_SECONDS")])
@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e300"])
def test_seconds_of_settings_are_finite(name: str, text: str):
    with pytest.raises(InputError, match=f"{name}: expected seconds"):
        load_settings({name: text})
