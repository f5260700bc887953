"""Documentation is tested: every command, option, setting and metric stands in docs/reference, and nothing else does."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generator():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tests" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["commands.md", "settings.md", "metrics.md"])
def test_the_page_says_what_the_code_says(page: str) -> None:
    written = (REFERENCE / page).read_text()
    assert written == generator().PAGES[page](), "run .venv/bin/python tests/reference.py"


def test_every_variable_of_ours_that_the_code_reads_is_a_documented_setting() -> None:
    documented = set(re.findall(r"`(PASTA_[A-Z_]+)`", "".join(page.read_text() for page in PAGES)))
    code = "".join(
        path.read_text() for top in ("pasta_otel", "slo", "ebpf", "exporters") for path in (ROOT / top).rglob("*.py")
    )
    assert set(re.findall(r"[\"'](PASTA_[A-Z_]+)[\"']", code)) <= documented


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", file.read_text()):
        assert (file.parent / target).exists(), f"{page} links to {target}"


def test_every_reference_page_is_linked_from_the_readme_or_from_a_page_that_is() -> None:
    pages, unseen = {ROOT / "README.md"}, [ROOT / "README.md"]
    while unseen:
        page = unseen.pop()
        targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
        linked = {(page.parent / target).resolve() for target in targets if target.endswith(".md")}
        unseen += linked - pages
        pages |= linked
    assert set(REFERENCE.glob("*.md")) <= pages


def test_how_to_install_into_ones_own_service_is_told_with_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = {name for name, needs in project["optional-dependencies"].items() if needs}
    told = re.findall(r"pasta-otel\[([a-z0-9,]+)\]", (REFERENCE / "instrumentation.md").read_text())
    assert {extra for extras in told for extra in extras.split(",")} == offered
    readme = (ROOT / "README.md").read_text()
    for extra in ("torch", "sidecar"):  # what works today comes first
        assert 0 < readme.index(f"pip install '.[{extra}]'") < readme.index(f"pip install 'pasta-otel[{extra}]'")
    assert "opentelemetry-instrumentation-" in readme
