"""Write docs/reference/{settings,metrics}.md from the code's own tables: `.venv/bin/python tests/reference.py`."""

from __future__ import annotations

from pathlib import Path

from pasta_otel.config import SETTINGS
from pasta_otel.semconv import METRICS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def settings() -> str:
    rows = [f"| `{s.env}` | `{s.default}` | {f'`{s.yaml}`' if s.yaml else ''} | {s.meaning} |" for s in SETTINGS]
    return "\n".join(
        [
            "# Settings",
            "",
            "Standard `OTEL_*` variables hold first, then these, then the YAML file that `PASTA_CONFIG` names.",
            "",
            "| variable | default | in YAML | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def metrics() -> str:
    rows = [f"| `{m.name}` | {m.instrument} | `{m.unit}` | {m.description} |" for m in sorted(METRICS.values())]
    return "\n".join(
        [
            "# Metrics",
            "",
            "OpenTelemetry names; on `/metrics` they appear with `_` for `.`, the unit and `_total` as the OpenTelemetry-to-Prometheus",
            "rules say. Every instrument holds at most 2000 attribute sets, then `otel.metric.overflow=true`.",
            "",
            "| metric | instrument | unit | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    (REFERENCE / "settings.md").write_text(settings())
    (REFERENCE / "metrics.md").write_text(metrics())
