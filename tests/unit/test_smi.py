"""nvidia-smi: words instead of numbers, real tables, and a program that hangs (handed cases G01 and G05)."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pasta_otel.errors import InputError, MissingError
from pasta_otel.gpu.device.model import DeviceReading, Snapshot, SourceDownError
from pasta_otel.gpu.device.sampler import DeviceSampler
from pasta_otel.gpu.device.smi import SmiSource, smi_source
from pasta_otel.gpu.device.smi_table import QUERY, THROTTLES, number, parse_table

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = FIXTURES / "cases"
CAPTURES = FIXTURES / "samples" / "utkuozdemir+nvidia_gpu_exporter"


def values(read: DeviceReading) -> dict[tuple[str, ...], float]:
    return {(r.metric, *(str(v) for _, v in r.labels)): r.value for r in read.readings}


@pytest.mark.case("G01")
def test_words_are_absent_values_and_header_units_are_honoured():
    want = json.loads((CASES / "G01" / "expected.json").read_text())
    devices = {d.device.id: d for d in parse_table((CASES / "G01" / "smi.csv").read_text()).devices}
    assert {key: len(found.readings) for key, found in devices.items()} == want["counts"]
    first = want["gpu0"]
    assert values(devices["0"]) == {
        ("hw.gpu.utilization", "general"): first["util"],
        ("hw.gpu.memory.usage",): first["mem"],
        ("hw.power",): first["power"],
        ("hw.fan.speed_ratio",): first["fan"],
        ("hw.temperature", "gpu"): first["temp"],
        ("pasta.gpu.encoder.frame_rate",): first["fps"],
        ("pasta.gpu.clock.frequency", "sm"): first["sm_hz"],
    }
    assert values(devices["1"]) == {
        ("hw.gpu.memory.usage",): 536870912,
        ("hw.temperature", "gpu"): 40,
        ("pasta.gpu.clock.frequency", "sm"): 3.45e8,
    }
    assert values(devices["2"]) == {
        ("hw.gpu.utilization", "general"): 0,
        ("hw.gpu.memory.usage",): 0,
        ("pasta.gpu.clock.frequency", "sm"): 0,
    }
    assert [(d.down, d.state) for d in devices.values()] == [("", "ok"), ("", "ok"), ("lost", "failed")]
    assert [dict(d.device.info) for d in devices.values()] == [
        {"gpu.mig.mode": "disabled"},
        {"gpu.mig.mode": "enabled"},
        {},
    ]


# what nvidia_gpu_exporter made of the same table: another program's reading of the same bytes
THEIRS = {
    ("hw.gpu.utilization", "general"): "nvidia_smi_utilization_gpu_ratio",
    ("hw.gpu.utilization", "encoder"): "nvidia_smi_utilization_encoder_ratio",
    ("hw.gpu.utilization", "decoder"): "nvidia_smi_utilization_decoder_ratio",
    ("pasta.gpu.memory.activity",): "nvidia_smi_utilization_memory_ratio",
    ("hw.gpu.memory.limit",): "nvidia_smi_memory_total_bytes",
    ("hw.gpu.memory.usage",): "nvidia_smi_memory_used_bytes",
    ("hw.power",): "nvidia_smi_power_draw_watts",
    ("pasta.gpu.power.limit",): "nvidia_smi_enforced_power_limit_watts",
    ("hw.temperature", "gpu"): "nvidia_smi_temperature_gpu",
    ("hw.temperature", "memory"): "nvidia_smi_temperature_memory",
    ("hw.fan.speed_ratio",): "nvidia_smi_fan_speed_ratio",
    ("pasta.gpu.encoder.frame_rate",): "nvidia_smi_encoder_stats_average_fps",
    ("pasta.gpu.clock.frequency", "graphics"): "nvidia_smi_clocks_current_graphics_clock_hz",
    ("pasta.gpu.clock.frequency", "sm"): "nvidia_smi_clocks_current_sm_clock_hz",
    ("pasta.gpu.clock.frequency", "memory"): "nvidia_smi_clocks_current_memory_clock_hz",
    ("pasta.gpu.clock.frequency", "video"): "nvidia_smi_clocks_current_video_clock_hz",
    **{
        ("pasta.gpu.throttled.time", word): f"nvidia_smi_clocks_event_reasons_counters_{name}_seconds"
        for name, word in THROTTLES.items()
    },
    ("hw.errors", "corrected"): "nvidia_smi_ecc_errors_corrected_aggregate_total",
    ("hw.errors", "uncorrected"): "nvidia_smi_ecc_errors_uncorrected_aggregate_total",
}


@pytest.mark.parametrize("capture", sorted(CAPTURES.glob("*.csv")), ids=lambda path: path.stem)
def test_real_tables_say_what_another_exporter_reads_in_them(capture: Path):
    (read,) = parse_table(capture.read_text()).devices
    families = text_string_to_metric_families(capture.with_suffix(".metrics").read_text())
    theirs = {sample.name: sample.value for family in families for sample in family.samples}
    found = values(read)
    found.pop(("hw.gpu.memory.utilization",))  # ours alone
    assert found == {key: pytest.approx(theirs[name]) for key, name in THEIRS.items() if name in theirs}
    assert read.device.id.startswith("GPU-")


@pytest.mark.parametrize("capture", sorted(CAPTURES.glob("*.csv")), ids=lambda path: path.stem)
def test_every_field_that_we_query_is_known_to_real_drivers(capture: Path):
    known = {cell.strip().split(" [")[0] for cell in capture.read_text().splitlines()[0].split(",")}
    assert set(QUERY) <= known


@given(st.text(st.characters(exclude_categories=["Nd"])))
def test_no_text_without_a_digit_is_ever_a_number(text: str):
    assert number(text, "%") is None


@given(
    st.floats(0, 1e9, allow_nan=False).map(lambda value: round(value, 2)), st.sampled_from(["%", "MiB", "W", "MHz", ""])
)
def test_a_number_with_its_unit_is_read_whatever_the_header_says(value: float, unit: str):
    factor = {"%": 0.01, "MiB": 2**20, "W": 1, "MHz": 1e6, "": 1}[unit]
    assert number(f"{value:.2f} {unit}".strip(), unit) == pytest.approx(value * factor)


def test_a_number_in_a_unit_that_we_do_not_know_is_absent_rather_than_wrong():
    assert number("5 furlongs", "W") is None


def test_a_torn_row_is_counted_and_the_others_kept():
    read = parse_table("index, utilization.gpu [%]\n0, 5 %\n1, 6\n2\n")
    assert [d.device.id for d in read.devices] == ["0", "1"]
    assert read.parse_errors == 1
    assert values(read.devices[1])["hw.gpu.utilization", "general"] == 0.06  # the header's unit


@pytest.mark.parametrize("text", ["", "\n\n", "No devices were found\n", "a, b\n1, 2\n"])
def test_what_is_not_a_table_is_refused(text: str):
    with pytest.raises(InputError, match="not a table of nvidia-smi"):
        parse_table(text)


@given(
    st.text()
    | st.lists(st.text(st.characters(codec="ascii"))).map(lambda rows: "index, power.draw [W]\n" + "\n".join(rows))
)
def test_no_text_breaks_the_reader_and_every_reading_is_finite(text: str):
    try:
        snapshot = parse_table(text)
    except InputError:
        return
    assert all(math.isfinite(r.value) for device in snapshot.devices for r in device.readings)


def test_a_cell_without_end_is_refused():
    with pytest.raises(InputError, match="not a table"):
        parse_table("index, name\n0, " + "x" * 200_000)


def script(path: Path, text: str) -> list[str]:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def utilization(snapshot: Snapshot) -> float | None:
    return next((r.value for d in snapshot.devices for r in d.readings if r.metric == "hw.gpu.utilization"), None)


def children_of(state: Path) -> list[int]:
    """Processes that carry this state file in their environment: the fake's shell and its sleep."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"STATE={state}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.case("G05")
def test_after_a_hang_the_old_number_is_gone_and_it_comes_back_without_a_restart(tmp_path: Path):
    want = json.loads((CASES / "G05" / "expected.json").read_text())
    state = tmp_path / "state"
    program = ["/bin/sh", str(CASES / "G05" / "fake_nvidia_smi.sh")]
    source = SmiSource(program, limit_s=1.0, environ={"PATH": os.environ["PATH"], "STATE": str(state)})
    sampler = DeviceSampler(source, limit_s=5.0, reuse_ns=0)
    first = sampler.sample()
    assert (first.down, utilization(first)) == ("", want["first"])
    began = time.monotonic()
    for _ in range(2):
        hung = sampler.sample()
        assert (hung.down, utilization(hung)) == ("timeout", None)
        assert [(d.device.id, d.down) for d in hung.devices] == [("0", "timeout")]
        assert len(children_of(state)) <= want["max_children"]
    assert time.monotonic() - began < 2 * 5.0
    state.unlink()
    again = sampler.sample()
    assert (again.down, utilization(again)) == ("", 0.55)
    sampler.close()


def test_while_a_child_cannot_be_ended_no_other_is_started(tmp_path: Path):
    started = tmp_path / "started"
    source = SmiSource(script(tmp_path / "smi", f"echo x >> {started}; exec sleep 60\n"), limit_s=1.0)
    source._end = lambda child: setattr(source, "_left_over", child)  # as in uninterruptible sleep
    for _ in range(3):
        with pytest.raises(SourceDownError, match="timeout"):
            source.read()
    assert started.read_text() == "x\n"
    del source._end
    source.close()
    assert source._left_over is None
    with pytest.raises(SourceDownError, match="did not answer"):  # it could be ended: the next one is tried
        source.read()
    assert started.read_text() == "x\nx\n"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "version_mismatch"),
        ("NVIDIA-SMI has failed because it couldn\\'t communicate with the NVIDIA driver.", "no_driver"),
        ("No devices were found", "no_devices"),
        ("Failed to initialize NVML: Insufficient Permissions", "no_permission"),
        ("Segmentation fault", "unreadable"),
    ],
)
def test_what_it_prints_instead_of_a_table_is_a_state(tmp_path: Path, says: str, reason: str):
    source = SmiSource(script(tmp_path / "smi", f"echo {says.replace(' ', chr(92) + ' ')}; exit 9\n"))
    with pytest.raises(SourceDownError) as caught:
        source.read()
    assert caught.value.reason == reason


def test_a_field_that_an_older_driver_does_not_know_is_left_out(tmp_path: Path):
    text = (
        'case "$1" in *temperature.memory*) echo \'Field "temperature.memory" is not a valid field to query.\'; exit 2;; esac\n'
        'echo "index, utilization.gpu [%]"; echo "0, 7 %"\n'
    )
    assert utilization(SmiSource(script(tmp_path / "smi", text)).read()) == 0.07


def test_no_program_is_a_state_and_says_so(tmp_path: Path):
    with pytest.raises(SourceDownError, match="no_tool"):
        SmiSource([str(tmp_path / "nvidia-smi")]).read()
    with pytest.raises(MissingError, match="no nvidia-smi"):
        smi_source(path=str(tmp_path))
