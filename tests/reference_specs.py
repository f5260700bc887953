"""Write tests/fixtures/samples/specs.tsv: what becomes of every sample; run it with .venv/bin/python, then read the diff."""

from __future__ import annotations

from pathlib import Path

from pasta_otel.slo.spec.load import check

SAMPLES = Path(__file__).parent / "fixtures" / "samples"
ORIGINS = ("OpenSLO+OpenSLO", "OpenSLO+go-sdk", "OpenSLO+oslo", "slok+sloth", "pyrra-dev+pyrra", "google+slo-generator")


def specs() -> list[Path]:
    found = [file for origin in ORIGINS for file in (SAMPLES / origin).rglob("*.y*ml")]
    return sorted(file for file in found if "_gen" not in file.parts)  # generated rules, not specifications


def rows(file: Path) -> list[str]:
    """Return one line a problem: file, accepted or refused, severity, line, field, kind."""
    found = check([file])
    name = str(file.relative_to(SAMPLES))
    verdict = "refused" if found.errors else "accepted"
    return [
        "\t".join((name, verdict, problem.severity, str(problem.line), problem.field, problem.kind))
        for problem in found.problems
    ] or [f"{name}\t{verdict}\t\t\t\t"]


if __name__ == "__main__":
    (SAMPLES / "specs.tsv").write_text("\n".join(row for file in specs() for row in rows(file)) + "\n")
