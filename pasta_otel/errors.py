"""Errors that a user can act on, and the exit code each one means.

PastaError
├── InputError      bad input or wrong use: names file, line or field  (exit 2)
├── MissingError    the environment lacks something: says how to get it (exit 3)
└── StateError      a component was used in a state that does not allow it (exit 2)

Only ``pasta_otel.cli`` turns an error into an exit code.
"""

from __future__ import annotations


class PastaError(Exception):
    """Base of every error that pasta-otel raises on purpose."""

    exit_code = 2


class InputError(PastaError):
    """Report bad input with the place where it stands.

    Args:
        message: What is wrong, without the place.
        file: The file's name as the user gave it, if there is one.
        line: 1-based line in that file, if known.
        field: Dotted path of the field, e.g. ``spec.objectives[0].target``.
        kind: A stable machine-readable word, e.g. ``trace_format``.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        field: str | None = None,
        kind: str = "invalid",
    ) -> None:
        self.message, self.file, self.line, self.field, self.kind = message, file, line, field, kind
        place = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(": ".join(part for part in (place, field, message) if part))


class MissingError(PastaError):
    """Report what the environment lacks and how to get it."""

    exit_code = 3

    def __init__(self, message: str, *, how: str = "") -> None:
        self.message, self.how = message, how
        super().__init__(f"{message}; {how}" if how else message)


class StateError(PastaError):
    """Report a call that the component's present state does not allow."""
