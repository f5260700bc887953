"""SIGTERM ends a program in time, whatever it is doing, by the signal, after what was pending is finished."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import wait_for

NATIVE = pytest.mark.skipif(
    importlib.util.find_spec("pasta_otel.termination._deadline") is None, reason="built without a C compiler"
)
LIMIT_S = 2.0
FINISHED = "finished\n"
START = f"""
import os, sys, time
from pasta_otel.termination import at_sigterm
{{before}}
at_sigterm(lambda seconds: os.write(1, b"finished\\n"), {LIMIT_S})
def up():
    os.write(1, b"up\\n")
"""
HANG = """
import ctypes
mutex = ctypes.create_string_buffer(64)
lock = ctypes.{library}(None).pthread_mutex_lock
lock(mutex)
up()
lock(mutex)  # for ever, and no signal wakes it
"""


def program(rest: str, before: str = "") -> subprocess.Popen[str]:
    """Start a program that finishes something at SIGTERM, and return it once it has called ``up``."""
    text = START.format(before=before) + textwrap.dedent(rest)
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Send SIGTERM; return the exit code and what was printed since."""
    time.sleep(0.3)  # into the call that follows `up`; a test that is too early is easier to pass, and no less right
    process.send_signal(signal.SIGTERM)
    try:
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, out


@NATIVE
@pytest.mark.parametrize("rest", ["up(); sum(range(10**11))", HANG.format(library="PyDLL")], ids=["long", "hung"])
def test_a_call_that_keeps_the_interpreter_does_not_keep_the_process(rest: str) -> None:
    assert ended(program(rest))[0] == -signal.SIGTERM


@NATIVE
def test_a_hung_call_that_lets_others_run_ends_at_once_with_what_was_pending() -> None:
    assert ended(program(HANG.format(library="CDLL"))) == (-signal.SIGTERM, FINISHED)


@NATIVE
def test_a_long_call_that_returns_in_time_is_followed_by_what_was_pending() -> None:
    rest = "import ctypes; up(); ctypes.PyDLL(None).usleep(900_000); ctypes.PyDLL(None).usleep(900_000); time.sleep(60)"
    assert ended(program(rest)) == (-signal.SIGTERM, FINISHED)


@NATIVE
def test_finishing_itself_ends_at_the_limit() -> None:
    rest = "at_sigterm(lambda seconds: time.sleep(60), 99); up(); time.sleep(60)"
    assert ended(program(rest)) == (-signal.SIGTERM, FINISHED)


@NATIVE
def test_a_second_signal_does_not_cut_the_first_ones_time() -> None:
    rest = "at_sigterm(lambda seconds: (time.sleep(0.3), os.write(1, b'late\\n')), 99); up(); time.sleep(60)"
    process = program(rest)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == FINISHED
    assert ended(process) == (-signal.SIGTERM, "late\n")


def test_one_that_fails_keeps_neither_the_others_nor_the_end() -> None:
    before = "at_sigterm(lambda seconds: 1 / 0, 2.0)"
    assert ended(program("up(); time.sleep(60)", before)) == (-signal.SIGTERM, FINISHED)


def test_without_the_extension_a_program_that_runs_python_ends_the_same_way() -> None:
    before = "sys.modules['pasta_otel.termination._deadline'] = None"
    rest = "up()\nwhile True: pass"
    assert ended(program(rest, before)) == (-signal.SIGTERM, FINISHED)


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ("import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); up(); time.sleep(60)", (7, "")),
        (
            """
            import signal  # as uvicorn does: its own while it serves, then the one before it, and the signal again
            captured = []
            before = signal.signal(signal.SIGTERM, lambda *_: captured.append(os.write(1, b"own\\n")))
            up()
            while not captured:
                time.sleep(0.01)
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)
            time.sleep(60)
            """,
            (-signal.SIGTERM, "own\n" + FINISHED),
        ),
        (
            """
            import asyncio, signal
            async def main():
                ended = asyncio.Event()
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
                up()
                await ended.wait()
                os.write(1, b"own\\n")
            asyncio.run(main())
            """,
            (0, "own\n"),
        ),
        (
            """
            import asyncio, signal  # another signal's handler: asyncio has the wakeup fd
            async def main():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
                up()
                await asyncio.sleep(60)
            asyncio.run(main())
            """,
            (-signal.SIGTERM, FINISHED),
        ),
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); up(); time.sleep(60)", (-signal.SIGTERM, "")),
        ("up(); os.execv('/bin/sh', ['sh', '-c', 'sleep 0.5; kill -TERM $$'])", (-signal.SIGTERM, None)),
    ],
    ids=["own", "restored", "asyncio", "wakeup fd", "default", "exec"],
)
def test_a_program_that_handles_signals_itself_is_left_alone(rest: str, told: tuple[int, str | None]) -> None:
    code, out = ended(program(rest))
    assert (code, out if told[1] is not None else None) == told


@NATIVE
@pytest.mark.parametrize("rest", ["time.sleep(60)", HANG.format(library="CDLL").replace("up()", "")])
def test_a_forked_child_ends_by_itself_and_leaves_its_parent(rest: str) -> None:
    parent = program(
        f"""
        child = os.fork()
        if child == 0:
            up()
{textwrap.indent(rest, " " * 12)}
        os.write(1, b"%d\\n" % os.waitpid(child, 0)[1])
        time.sleep(60)
        """
    )
    assert parent.stdout is not None
    (child,) = wait_for(lambda: _children(parent.pid))
    subprocess.run(["kill", "-TERM", child], check=True)
    assert parent.stdout.readline() == FINISHED
    assert parent.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    assert ended(parent) == (-signal.SIGTERM, FINISHED)


@NATIVE
def test_a_child_that_keeps_the_interpreter_ends_at_the_limit_too() -> None:
    parent = program("""
        child = os.fork()
        if child == 0:
            up()
            sum(range(10**11))
        os.write(1, b"%d\\n" % os.waitpid(child, 0)[1])
        """)
    (child,) = wait_for(lambda: _children(parent.pid))
    subprocess.run(["kill", "-TERM", child], check=True)
    assert parent.communicate(timeout=60)[0].endswith(f"{int(signal.SIGTERM)}\n")


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_programs_that_ignore_the_signal_go_on_ignoring_it() -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from pasta_otel.termination import at_sigterm\nat_sigterm(print, 1.0)\n"
        "signal.raise_signal(signal.SIGTERM); print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "on\n")


@NATIVE
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(seconds: float) -> None:
    from pasta_otel.termination import _deadline

    install: Callable[[float], None] = _deadline.install
    with pytest.raises(ValueError, match="above 0"):
        install(seconds)
