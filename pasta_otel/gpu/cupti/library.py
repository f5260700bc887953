"""Find libcupti: the copy that the process has loaded already, else one that fits what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pasta_otel._native import _cupti
from pasta_otel.errors import MissingError

SONAMES = ("libcupti.so.13", "libcupti.so.12")
# Where PyPI's packages put it, below a site-packages folder: CUDA 13, CUDA 12, and a copy bundled with torch.
_PACKAGED = ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib", "torch/lib")
_TOOLKIT = ("extras/CUPTI/lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib64")
_HOW = "install nvidia-cuda-cupti (or nvidia-cuda-cupti-cu12), or set PASTA_CUPTI_LIBRARY to its file"


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the files of libcupti mapped into a process, torch's own copy among them."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/") and len(line.split(maxsplit=5)) == 6)
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith("libcupti.so")))


def candidates(
    environ: os._Environ[str] | dict[str, str] = os.environ,
    search_path: Iterable[str] = sys.path,
    loaded: Callable[[], list[str]] = loaded_libraries,
) -> Iterator[str]:
    """Yield where libcupti may be, best first; the last ones are names for the dynamic linker."""
    if explicit := environ.get("PASTA_CUPTI_LIBRARY"):
        yield explicit
        return
    yield from loaded()
    roots = [Path(entry, folder) for entry in search_path for folder in _PACKAGED]
    toolkits = [environ.get("CUDA_HOME", ""), environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    roots += [Path(toolkit, folder) for toolkit in toolkits if toolkit for folder in _TOOLKIT]
    for soname in SONAMES:
        yield from (str(root / soname) for root in roots if (root / soname).is_file())
    yield from SONAMES


def load(paths: Iterable[str] | None = None) -> str:
    """Load the first libcupti whose record layout is known, and return its path.

    Raises:
        MissingError: There is none, or only ones that cannot be used; says why each was refused.
    """
    refused = []
    for path in dict.fromkeys(candidates() if paths is None else paths):
        try:
            _cupti.load(path)
        except OSError as error:
            refused.append(str(error))
        else:
            return path
    raise MissingError(f"no usable libcupti: {'; '.join(refused) or 'none found'}", how=_HOW)
