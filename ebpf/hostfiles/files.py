"""Reading small kernel text files that may vanish at any moment."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Return the file's text, or None when it is not there or may not be read (the process ended, no permission)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def key_values(text: str) -> dict[str, int]:
    """Return ``name number`` lines as a dict; lines of another form are left out."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if number.strip().isdigit():
            found[name] = int(number)
    return found
