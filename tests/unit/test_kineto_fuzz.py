"""Fuzzed files end in one clear error or in events, never in a crash: bit flips, cuts, splices, hostile numbers."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from pasta_otel.errors import InputError
from pasta_otel.gpu.analysis.report import analyze
from pasta_otel.gpu.findings import find
from pasta_otel.gpu.imports.detect import detect
from pasta_otel.gpu.imports.jaeger import read_jaeger
from pasta_otel.gpu.imports.otlp import read_otlp
from pasta_otel.gpu.imports.spans import timeline_spans
from pasta_otel.gpu.imports.traces import TraceCollector
from pasta_otel.gpu.kineto import ReadOptions, read_trace

SAMPLES = Path(__file__).parents[1] / "fixtures" / "samples"
HTA = SAMPLES / "facebookresearch+HolisticTraceAnalysis"
SOURCES = {
    "kineto": [HTA / "backward_thread.json", HTA / "triton_example.json.gz", HTA / "base.json.gz",
               HTA / "event_sync_trace.json.gz", SAMPLES / "pytorch+kineto" / "gpu_metrics_input.json.gz"],
    "otlp-json": sorted((SAMPLES / "jaegertracing+jaeger").rglob("link_attributes_trace.json")),
    "jaeger": [*sorted((SAMPLES / "jaegertracing+jaeger").rglob("otlp2jaeger-out.json")),
               SAMPLES / "uber-research+CRISP" / "test_cases" / "16.json"],
}  # fmt: skip
HOSTILE = [b"1e999", b"-1e999", b"99999999999999999999999", b"-1", b"NaN", b"Infinity", b"null", b"[]", b"{}", b'""',
           b"true", b'"\\ud800"', b"18446744073709551615", b"-9223372036854775808", b"1e-400", b"9223372036854775807"]  # fmt: skip


def text_of(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def flip(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text))]


def splice(rng: random.Random, text: bytes) -> bytes:
    low, high = sorted(rng.randrange(len(text)) for _ in range(2))
    return text[:low] + text[high:] if rng.random() < 0.5 else text[:high] + text[low:]


def numbers(rng: random.Random, text: bytes) -> bytes:
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text))
        start = text.find(b": ", at) + 2 if text.find(b": ", at) >= 0 else text.find(b":", at) + 1
        end = min((place for place in (text.find(b",", start), text.find(b"}", start)) if place >= 0), default=start)
        text = text[:start] + rng.choice(HOSTILE) + text[end:]
    return text


def import_it(path: Path, kind: str) -> None:
    detect(path)
    if kind == "kineto":
        read_strictly(path)
        timeline = read_trace(path).timeline
        analyze([timeline])
        find([timeline])
        for _ in timeline_spans(timeline, python=True):
            pass
    else:
        collector = TraceCollector()
        for request in (read_jaeger if kind == "jaeger" else read_otlp)(path):
            collector.add(request)
        collector.document()


def read_strictly(path: Path) -> None:
    try:
        read_trace(path, ReadOptions(strict=True))
    except InputError as error:
        assert error.kind in {"trace_format", "too_large"}  # noqa: PT017 - strict reading refuses, lenient goes on


def rounds(kind: str, change, count: int, tmp_path: Path) -> None:
    rng = random.Random(f"{kind} {change.__name__}")
    for number in range(count):
        text = change(rng, text_of(rng.choice(SOURCES[kind])))
        packed = gzip.compress(text) if rng.random() < 0.2 else text
        path = tmp_path / f"{number}.json"
        path.write_bytes(flip(rng, packed) if packed is not text else packed)
        try:
            import_it(path, kind)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017 - a clear error names the file
        path.unlink()


@pytest.mark.parametrize("change", [flip, cut, splice, numbers])
@pytest.mark.parametrize("kind", SOURCES)
def test_damaged_files_end_in_events_or_one_clear_error(kind, change, tmp_path):
    rounds(kind, change, 40, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("change", [flip, cut, splice, numbers])
@pytest.mark.parametrize("kind", SOURCES)
def test_many_damaged_files_end_in_events_or_one_clear_error(kind, change, tmp_path):
    rounds(kind, change, 2000, tmp_path)


@pytest.mark.parametrize("content", [b"\x00" * 4096, b"\xff" * 4096, b"\x1f\x8b", b"\x1f\x8b\x08" + b"\x00" * 100, b"{", b"[",
                                     b"[" * 200_000, b'{"traceEvents": [' + b'{"args": ' * 100_000, b"\xef\xbb\xbf", b" ",
                                     b'{"resourceSpans": 3}', b'{"data": [{"spans": [1]}]}', b'{"traceEvents": 3}'])  # fmt: skip
def test_garbage_is_refused_by_name(content, tmp_path):
    path = tmp_path / "garbage.json"
    path.write_bytes(content)
    for kind in SOURCES:
        try:
            import_it(path, kind)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017 - a clear error names the file
