"""Kernel symbols whose names compilers decorate."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CLONE = re.compile(r"(\.(isra|constprop|part)\.\d+)+")  # complete copies; .cold is only a fragment of one


def find_symbol(kallsyms: Iterable[str], name: str) -> str | None:
    """Return the traceable symbol for a kernel function, or None: then use a tracepoint.

    The exact name wins, then its copies (``name.isra.0``); never a ``.cold`` fragment, a ``__pfx_`` twin or a longer
    identifier. Addresses do not matter: unprivileged readers see zeros.
    """
    names = {fields[2] for fields in map(str.split, kallsyms) if len(fields) >= 3}
    copies = sorted(n for n in names if n.startswith(name) and _CLONE.fullmatch(n[len(name) :]))
    return name if name in names else next(iter(copies), None)
