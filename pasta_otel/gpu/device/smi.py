"""NVIDIA devices by ``nvidia-smi`` as a child process: where there is a driver but no NVML binding.

On a dying GPU nvidia-smi goes into uninterruptible sleep, which not even SIGKILL ends. So a child gets a time limit,
and while one is left over no other is started.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from pasta_otel.errors import InputError, MissingError
from pasta_otel.gpu.device.model import Snapshot, SourceDownError
from pasta_otel.gpu.device.smi_table import QUERY, parse_table

CHILD_LIMIT_S = 2.5  # below the sampler's limit, so that the child is ended by who started it
REAP_S = 0.2  # how long a killed child may take to go away
PROGRAM = "nvidia-smi"
_UNKNOWN_FIELD = re.compile(r'[Ff]ield "([\w.]+)" is not a valid field')  # an older driver; nothing else is printed
# what nvidia-smi prints, on stdout, instead of a table
COMPLAINTS = {
    "driver/library version mismatch": "version_mismatch",
    "couldn't communicate with the nvidia driver": "no_driver",
    "no devices were found": "no_devices",
    "insufficient permissions": "no_permission",
}


def smi_source(*, path: str | None = None) -> SmiSource:
    """Return the nvidia-smi source.

    Args:
        path: Where to look for the program; None = ``PATH``.

    Raises:
        MissingError: There is no nvidia-smi.
    """
    program = shutil.which(PROGRAM, path=path)
    if program is None:
        raise MissingError("no nvidia-smi", how="it comes with the NVIDIA driver")
    return SmiSource((program,))


class SmiSource:
    """All NVIDIA devices as nvidia-smi prints them.

    Args:
        program: The program, and arguments that go before the query.
        limit_s: How long it may take, seconds.
        environ: Its environment; None = ours.
    """

    name = "nvidia-smi"

    def __init__(
        self,
        program: Sequence[str] = (PROGRAM,),
        *,
        limit_s: float = CHILD_LIMIT_S,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._program, self._limit_s, self._environ = list(program), limit_s, environ
        self._fields = list(QUERY)
        self._left_over: subprocess.Popen[str] | None = None

    def read(self) -> Snapshot:
        """Run it once.

        Raises:
            SourceDownError: It hangs, is missing, or complains.
        """
        if self._left_over is not None:
            if self._left_over.poll() is None:
                raise SourceDownError("timeout", f"nvidia-smi (pid {self._left_over.pid}) still hangs")
            self._left_over = None
        output = self._run()
        while (unknown := _UNKNOWN_FIELD.search(output)) and unknown[1] in self._fields:
            self._fields.remove(unknown[1])
            output = self._run()
        try:
            return parse_table(output, self.name)
        except InputError as error:
            raise SourceDownError(_complaint(output), error.message) from error

    def close(self) -> None:
        """End a child that is left over, if it can be ended."""
        if self._left_over is not None:
            self._end(self._left_over)

    def _run(self) -> str:
        try:
            child = subprocess.Popen(
                [*self._program, f"--query-gpu={','.join(self._fields)}", "--format=csv"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=None if self._environ is None else dict(self._environ),
                start_new_session=True,  # so that what it started ends with it
            )
        except OSError as error:
            raise SourceDownError("no_tool", f"{self._program[0]}: {error.strerror}") from error
        try:
            output, _ = child.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired as error:
            self._end(child)
            raise SourceDownError("timeout", f"nvidia-smi did not answer within {self._limit_s:g} s") from error
        return output

    def _end(self, child: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        try:
            child.wait(REAP_S)
        except subprocess.TimeoutExpired:  # in uninterruptible sleep
            self._left_over = child
        else:
            self._left_over = None
        if child.stdout is not None:
            child.stdout.close()


def _complaint(output: str) -> str:
    lowered = output.lower()
    return next((reason for words, reason in COMPLAINTS.items() if words in lowered), "unreadable")
