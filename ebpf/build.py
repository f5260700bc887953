"""Builds what the loaders load: ``python -m pasta_otel.ebpf.build [FOLDER]``. Needs clang, libbpf-dev and cpp."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "bpf"
MARK = "pasta_end_of_shared_part"
TARGETS = {"x86_64": "x86", "aarch64": "arm64"}
CLANG = re.compile(r"clang-\d+")


class BuildError(Exception):
    """The objects could not be built; says what is missing."""


def find_tool(*names: str) -> str | None:
    """Return the first of some tools, or its newest versioned copy (``clang-16``)."""
    for name in names:
        if found := shutil.which(name):
            return found
        folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
        versions = [
            path for folder in folders for path in folder.glob(f"{name}-*") if path.name[len(name) + 1 :].isdigit()
        ]
        if versions:
            return str(max(versions, key=lambda path: int(path.name.rpartition("-")[2])))
    return None


def build(folder: Path, sources: Path = SOURCES, machine: str | None = None) -> list[Path]:
    """Compile every source to a CO-RE object, and expand it for bcc.

    Raises:
        BuildError: A tool or header is missing, or a source does not compile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [expand(source, folder) for source in sorted(sources.glob("*.bpf.c"))]
    return [*made, describe(sources, folder), compile_object(sources, folder, machine)]


def describe(sources: Path, folder: Path) -> Path:
    """Put the YAMLs beside the sources into one JSON, which the agent reads before it has imported anything."""
    try:
        import yaml  # noqa: PLC0415 - setup.py imports this module, perhaps where there is none
    except ImportError as error:
        raise BuildError("no PyYAML") from error
    target = folder / "probes.json"
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(sources.glob("*.yaml"))]
    target.write_text(json.dumps(documents), encoding="utf-8")
    return target


def compile_object(sources: Path, folder: Path, machine: str | None = None) -> Path:
    """Compile every source into one object for the CO-RE loader: it reads the kernel's types once per object, 8 ms."""
    clang = find_tool("clang")
    if clang is None:
        raise BuildError(
            "no clang: the CO-RE objects cannot be built (Debian, Ubuntu: apt-get install clang libbpf-dev)"
        )
    machine = machine or platform.machine()
    target = folder / f"pasta.{machine}.bpf.o"
    architecture = TARGETS[machine]
    flags = ["-O2", "-g", "-target", "bpf", f"-D__TARGET_ARCH_{architecture}", "-Wall", *_multiarch(machine)]
    text = "".join(f'#include "{source.name}"\n' for source in sorted(sources.glob("*.bpf.c")))
    _run([clang, *flags, f"-I{sources}", "-x", "c", "-c", "-", "-o", str(target)], text)
    if strip := find_tool("llvm-strip"):
        _run([strip, "-g", str(target)])  # debug sections only: BTF stays
    return target


def expand(source: Path, folder: Path) -> Path:
    """Expand one source's macros for bcc: the shared part and its own, apart."""
    text = f'#include "pasta.bpf.h"\n{MARK}\n#include "{source.name}"\n'
    command = [find_tool("cpp", "clang-cpp") or "cpp", "-P", "-DPASTA_BCC", f"-I{source.parent}"]
    shared, _, own = _run([*command, "-"], text).partition(MARK)
    (folder / "pasta.bcc.c").write_text(shared.strip() + "\n", encoding="utf-8")
    target = folder / source.name.replace(".bpf.c", ".bcc.c")
    target.write_text(own.strip() + "\n", encoding="utf-8")
    return target


def _multiarch(machine: str) -> list[str]:
    """Return where Debian keeps <asm/types.h>, which clang does not look at for the BPF target.

    Its own machine's has linux-libc-dev, another's linux-libc-dev-<machine>-cross.
    """
    folders = (f"/usr/include/{machine}-linux-gnu", f"/usr/{machine}-linux-gnu/include")
    return [f"-I{folder}" for folder in folders if Path(folder).is_dir()]


def _run(command: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(f"no {Path(command[0]).name}") from error
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def main() -> int:
    """Build into the package, or into the folder that is given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent / "objects"
    try:
        made = build(folder)
    except BuildError as error:
        print(f"pasta_otel.ebpf.build: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 3
    print("\n".join(map(str, made)))  # noqa: T201 - a command
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
