"""What uname(2) says of this host; the module ``platform`` costs a millisecond before attaching."""

from __future__ import annotations

import os
import re


def host_machine() -> str:
    """Return the machine's architecture, e.g. ``x86_64``."""
    return os.uname().machine


def linux_version(release: str | None = None) -> tuple[int, int, int]:
    """Return major, minor and patch of a Linux release (this host's by default); zeros where it names none."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release or os.uname().release)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)
