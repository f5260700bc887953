"""Compiling device functions: for what architectures, and what is said where the compiler refuses."""

from __future__ import annotations

import os
import shutil

import pytest

from pasta_otel.errors import MissingError
from pasta_otel.gpu.memory import library


def nvcc(folder, script):
    """Return a compiler that does what a shell script does."""
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


WRITES = '[ "$1" = --list-gpu-code ] && exit 1; last=""; for word in "$@"; do last="$word"; done; echo "$@" > "$last"'


def test_only_architectures_that_the_compiler_knows_are_asked_for(tmp_path):
    compiler = nvcc(tmp_path, f'if [ "$1" = --list-gpu-code ]; then echo sm_80; echo sm_90; exit 0; fi\n{WRITES}')
    target = tmp_path / "patch.fatbin"
    library.compile_patch(compiler, target)
    asked = [word for word in target.read_text().split() if word.startswith("-gencode")]
    assert asked == ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]


def test_a_compiler_that_does_not_say_is_asked_for_all(tmp_path):
    compiler = nvcc(tmp_path, f'[ "$1" = --list-gpu-code ] && exit 1\n{WRITES}')
    target = tmp_path / "patch.fatbin"
    library.compile_patch(compiler, target)
    assert target.read_text().count("-gencode") == len(library.ARCHITECTURES)


def test_the_first_lines_of_the_compilers_message_are_shown(tmp_path):
    compiler = nvcc(
        tmp_path, '[ "$1" = --list-gpu-code ] && exit 1\nfor i in $(seq 30); do echo "line $i" >&2; done; exit 1'
    )
    with pytest.raises(MissingError) as refused:
        library.compile_patch(compiler, tmp_path / "patch.fatbin")
    lines = str(refused.value).splitlines()
    assert lines[0] == "nvcc cannot compile the device patches: line 1"
    assert 2 < len(lines) < 12
    assert not list(tmp_path.glob("*.fatbin"))


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MissingError, match=r"the device patches cannot be kept: .*; set XDG_CACHE_HOME"):
        library.compile_patch(nvcc(tmp_path, WRITES), tmp_path / "file" / "patch.fatbin")


def test_a_compiler_that_is_gone_is_said(tmp_path):
    with pytest.raises(MissingError):
        library.compile_patch("/nonexistent/nvcc", tmp_path / "patch.fatbin")


def test_our_own_device_functions_compile_for_every_architecture(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PASTA_SANITIZER_PATCH": ""}
    found = library.find_patch(environ)
    assert library.find_patch(environ) == found
