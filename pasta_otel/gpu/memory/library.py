"""Find the Compute Sanitizer's public library and compile the device patches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from pasta_otel.errors import MissingError

LIBRARY = "libsanitizer-public.so"
ENTRY = "sanitizerSubscribe"
"""A function by which the library is known."""
DRIVER = "libcuda.so.1"
NO_DRIVER = "install the NVIDIA driver (in a container: run it with the NVIDIA container toolkit)"
SETTINGS = ("PASTA_SANITIZER_LIBRARY", "PASTA_SANITIZER_PATCH")
ARCHITECTURES = (75, 80, 90, 100, 120)
"""Machine code of one serves every later minor version: 80 also 86 and 89, 100 also 103, 120 also 121."""
DEBIAN = "/usr/lib/nvidia-cuda-toolkit"
_PACKAGED = ("nvidia/*/compute-sanitizer", "nvidia/*/lib", "nvidia/*")
"""Where NVIDIA's packages put it, e.g. nvidia-cuda-sanitizer-api: 13.5 into the first of cu13, 13.0 into the second."""
PATCH_FLAGS = ("-fatbin", "--keep-device-functions", "-Xptxas", "--compile-as-tools-patch")
_HEADERS = frozenset({".cuh", ".h", ".hpp", ".inl"})
_TIMEOUT_S = 120
_MOST_LINES = 8
"""Of the compiler's message that are shown."""


def toolkits(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders where a CUDA toolkit may be, best first."""
    named = [environ.get("CUDA_HOME", ""), environ.get("CUDA_PATH", "")]
    tools = [shutil.which(name, path=environ.get("PATH")) for name in ("nvcc", "compute-sanitizer")]
    beside = [str(Path(tool).resolve().parents[1]) for tool in tools if tool]
    installed = ["/usr/local/cuda", *sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)]
    return [Path(folder) for folder in dict.fromkeys([*named, *beside, *installed, DEBIAN]) if folder]


def candidates(environ: Mapping[str, str], search_path: Iterable[str] = sys.path) -> Iterator[Path]:
    """Yield where the library may be, best first; only there if the user named a file."""
    if explicit := environ.get("PASTA_SANITIZER_LIBRARY"):
        yield Path(explicit)
        return
    for toolkit in toolkits(environ):
        yield toolkit / "compute-sanitizer" / LIBRARY
        yield toolkit / "extras" / "Sanitizer" / LIBRARY
    for entry in search_path:
        for folder in _PACKAGED:
            yield from sorted(Path(entry).glob(f"{folder}/{LIBRARY}"), reverse=True)  # cu13 before cu12


def find_library(environ: Mapping[str, str] = os.environ, search_path: Iterable[str] = sys.path) -> str:
    """Return the file of the Sanitizer API.

    Raises:
        MissingError: There is none.
    """
    for path in candidates(environ, search_path):
        if path.is_file():
            return str(path)
    explicit = environ.get("PASTA_SANITIZER_LIBRARY")
    what = f"{explicit} (PASTA_SANITIZER_LIBRARY) does not exist" if explicit else f"no {LIBRARY}"
    raise MissingError(what, how="install a CUDA toolkit or nvidia-cuda-sanitizer-api, or set PASTA_SANITIZER_LIBRARY")


def check_driver(name: str = DRIVER) -> None:
    """Check that CUDA's driver loads; the Sanitizer takes a subscription without one, and then nothing ever happens.

    Raises:
        MissingError: It does not.
    """
    try:
        ctypes.CDLL(name)  # initialises nothing
    except OSError as error:
        raise MissingError(f"no NVIDIA driver: {error}", how=NO_DRIVER) from error


def kernels() -> Path:
    """Return the folder of our own device functions; tools may include ``patch.cuh`` from there."""
    return Path(str(files("pasta_otel.gpu").joinpath("kernels")))


def source() -> Path:
    """Return the source of the device functions of ``analyze memory``."""
    return kernels() / "memory.cu"


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where compiled patches are kept."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", tempfile.gettempdir()), ".cache"))
    return Path(home) / "pasta-otel"


def find_nvcc(environ: Mapping[str, str]) -> str:
    """Return CUDA's compiler.

    Raises:
        MissingError: There is none.
    """
    folders = [str(toolkit / "bin") for toolkit in toolkits(environ)]
    nvcc = shutil.which("nvcc", path=os.pathsep.join([environ.get("PATH", ""), *folders]))
    if nvcc is None:
        raise MissingError(
            "no nvcc to compile the device patches, and none are built in",
            how="install a CUDA toolkit, or set PASTA_SANITIZER_PATCH to a file built elsewhere",
        )
    return nvcc


def find_patch(environ: Mapping[str, str] = os.environ, code: Path | None = None) -> str:
    """Return the file of compiled patches: the named one, the one built in, a cached one, else compile it.

    Args:
        environ: Environment variables.
        code: A tool's device functions; by default those of ``analyze memory``.

    Raises:
        MissingError: There is none and it cannot be compiled; says why.
    """
    code = code or source()
    found = ready_patch(environ, code)
    if not found.is_file():
        compile_patch(find_nvcc(environ), found, code=code)
    return str(found)


def ready_patch(environ: Mapping[str, str], code: Path) -> Path:
    """Return the file of compiled patches, which may have to be compiled yet.

    Raises:
        MissingError: The named one does not exist.
    """
    if explicit := environ.get("PASTA_SANITIZER_PATCH"):
        if not Path(explicit).is_file():
            raise MissingError(f"{explicit} (PASTA_SANITIZER_PATCH) does not exist")
        return Path(explicit)
    built_in = code.with_suffix(".fatbin")
    if built_in.parent == kernels() and built_in.is_file():
        return built_in
    return cache_folder(environ) / f"{code.stem}-{_digest(code)}.fatbin"


def _digest(code: Path) -> str:
    """Return a name for what the compiler is given: the source, what it may include, and the options."""
    beside = sorted(path for path in code.parent.iterdir() if path.suffix in _HEADERS)
    content = [path.read_bytes() for path in (code, kernels() / "patch.cuh", *beside)]
    options = repr((ARCHITECTURES, PATCH_FLAGS)).encode()
    return hashlib.sha256(b"\0".join([options, *content])).hexdigest()[:16]


def compile_patch(
    nvcc: str, target: Path, architectures: Iterable[int] = ARCHITECTURES, code: Path | None = None
) -> None:
    """Compile device functions into one file, for all architectures that the compiler knows.

    Raises:
        MissingError: The compiler refused.
    """
    known = known_architectures(nvcc)
    codes = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures if not known or one in known]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            _run_nvcc([nvcc, *codes, *PATCH_FLAGS, f"-I{kernels()}", str(code or source()), "-o", str(built)])
            built.replace(target)  # two processes may compile at once: the last one wins, whole
    except OSError as error:
        raise MissingError(f"the device patches cannot be kept: {error}", how="set XDG_CACHE_HOME") from error


def known_architectures(nvcc: str) -> frozenset[int]:
    """Return the compute capabilities that a compiler knows, as 90 for 9.0; none where it does not say."""
    try:
        said = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    words = (line.strip().removeprefix("sm_") for line in said.splitlines() if line.strip().startswith("sm_"))
    return frozenset(int(word) for word in words if word.isdecimal())


def _run_nvcc(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise MissingError(f"nvcc needs more than {_TIMEOUT_S} s for the device patches") from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        shown = "\n  ".join(line for line in reason[:_MOST_LINES] if line.strip())
        raise MissingError(f"nvcc cannot compile the device patches: {shown}")
