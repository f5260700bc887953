import os
import shutil
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# abi3 from 3.11, the first version whose limited API has the buffer protocol. Free-threaded builds have no limited API.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
LIMITED = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]

# Without a compiler the package is built as pure Python (and tagged so): all of it but GPU kernel capture and memory
# analysis works, and the end by SIGTERM waits for C calls. A compiler that fails is an error, and PASTA_NATIVE=require
# makes a missing one an error too: releases set it.
COMPILER = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()[0]
HEADERS = Path(sysconfig.get_path("include")) / "Python.h"
NATIVE = os.environ.get("PASTA_NATIVE") == "require" or bool(shutil.which(COMPILER) and HEADERS.exists())
if not NATIVE:
    sys.stderr.write(
        "pasta-otel: no C compiler or Python.h: no GPU capture, no memory analysis (gcc and python3-dev bring it)\n"
    )


class BuildWithProbes(build_py):
    """Compile the host probes beside the Python files; without clang the agent works with files alone, and says so."""

    def run(self) -> None:
        super().run()
        source = Path("pasta_otel", "ebpf")
        folder = source if self.editable_mode else Path(self.build_lib, source)
        spec = spec_from_file_location("pasta_bpf_build", source / "build.py")
        builder = module_from_spec(spec)
        spec.loader.exec_module(builder)
        try:
            builder.build(folder / "objects")
        except builder.BuildError as error:
            if os.environ.get("PASTA_NATIVE") == "require":
                raise
            sys.stderr.write(f"pasta-otel: no eBPF probes in this build: {error}\n")
        if not self.editable_mode:
            self._compile_patches(Path(self.build_lib, "pasta_otel", "gpu", "kernels", "memory.fatbin"))

    def _compile_patches(self, target: Path) -> None:
        """Compile the device patches of memory analysis; without nvcc, `analyze memory` does it where it runs."""
        sys.path.insert(0, str(Path(__file__).parent))
        try:
            from pasta_otel.gpu.memory import library  # noqa: PLC0415 - from the tree that is being built

            library.compile_patch(library.find_nvcc(os.environ), target)
        except Exception as error:  # noqa: BLE001 - a build without them is whole
            sys.stderr.write(f"pasta-otel: no device patches in this build: {error}\n")
        finally:
            sys.path.pop(0)


def extension(
    name: str, sources: tuple[str, ...], headers: tuple[str, ...] = (), package: str = "_native"
) -> Extension:
    return Extension(
        f"pasta_otel.{package}.{name}",
        sources=[f"pasta_otel/{package}/{source}.c" for source in sources],
        depends=[f"pasta_otel/{package}/{header}.h" for header in headers],
        define_macros=[*LIMITED, ("_GNU_SOURCE", "1")],
        extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-cast-function-type"],
        libraries=["dl", "pthread", "rt"],
        py_limited_api=not FREE_THREADED,
        optional=False,
    )


setup(
    cmdclass={"build_py": BuildWithProbes},
    ext_modules=[
        extension("_cupti", ("module", "rows", "decode", "live"), ("rows", "decode", "live")),
        extension("_sanitizer", ("sanitizer", "calls", "patches", "notes"), ("calls", "patches", "notes")),
        extension("_deadline", ("_deadline",), package="termination"),
    ]
    if NATIVE
    else [],
    options={} if FREE_THREADED or not NATIVE else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
