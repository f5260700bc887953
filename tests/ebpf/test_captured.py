"""What C libraries write is caught, and everything is put back, whatever happens meanwhile."""

import ctypes
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pasta_otel.ebpf.captured import captured_output
from tests.ebpf.scenario import ROOT

LIBC = ctypes.CDLL(None)


def write(number: int, text: bytes) -> None:
    assert LIBC.write(number, text, len(text)) == len(text)


def test_what_is_written_to_both_outputs_is_caught_and_told_on_standard_error(capfd):
    with captured_output() as said:
        write(2, b"why")
        write(1, b" not")
        assert said.text == "why not"
    assert said.text == "why not"
    write(1, b"json")
    told = capfd.readouterr()
    assert (told.out, told.err) == ("json", "why not")


def test_outputs_are_put_back_when_the_body_raises(capfd):
    def fail() -> None:
        with captured_output():
            write(2, b"before")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    write(1, b"out")
    write(2, b"err")
    told = capfd.readouterr()
    assert (told.out, told.err) == ("out", "beforeerr")


def test_nothing_that_other_threads_write_meanwhile_is_lost_and_captures_do_not_mix(capfd):
    found: list[str] = []

    def capture(number: int) -> None:
        for turn in range(20):
            with captured_output() as said:
                write(2, f"<{number}.{turn}>".encode())
            found.append(said.text)

    threads = [threading.Thread(target=capture, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(100):
        write(2, f"[{turn}]".encode())
    for thread in threads:
        thread.join()
    told = capfd.readouterr().err
    assert all(f"[{turn}]" in told for turn in range(100))
    assert all(f"<{number}.{turn}>" in told for number in range(4) for turn in range(20))
    assert all(text.count("<") == 1 for text in found)
    assert len(found) == 80


def test_no_descriptor_is_left_open():
    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before = descriptors()
    for _ in range(10):
        with captured_output():
            write(2, b"x")
    assert descriptors() == before


CLOSED = """
import os
import resource
os.close(1); os.close(2)
from pasta_otel.ebpf.captured import captured_output
with captured_output() as said:
    os.write(2, b"why")
for number in (1, 2):
    try:
        os.fstat(number)
    except OSError:
        os.write(0, said.text.encode())
"""


def test_outputs_that_were_closed_are_closed_again():
    read, written = os.pipe()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CLOSED], check=False, stdin=written, env=environ)
    os.close(written)
    assert done.returncode in {0, 120}  # Python itself has no output to flush then
    with os.fdopen(read, "rb") as told:
        assert told.read() == b"whywhy"


def test_a_process_with_many_descriptors_captures_too():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("fewer than 2048 descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with captured_output() as said:
            write(2, b"why")
            assert said.text == "why"
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
