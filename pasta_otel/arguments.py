"""The arguments of ``instrument()``, checked at the call: found out later, they would fail a user's request."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from numbers import Real
from typing import Any

from pasta_otel.errors import InputError


def check_rate(value: Any) -> float | None:
    """Return a share of traces, 0..1; None stays None.

    Raises:
        InputError: It is no number, or outside.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:  # not NaN either
        raise InputError(f"expected a share between 0 and 1, got {_shown(value)}", field="sampling_rate")
    return float(value)


def check_row_limit(value: Any) -> int:
    """Return a number of rows.

    Raises:
        InputError: It is no whole number, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"expected a whole number from 0, got {_shown(value)}", field="row_limit")
    return value


def check_set_up(value: Any) -> None:
    """Raise InputError unless it is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise InputError(f"expected True, False or None, got {_shown(value)}", field="set_up")


def check_offers(value: object, method: str, field: str) -> None:
    """Raise InputError unless it is None or has the method by which we use it."""
    if value is not None and (isinstance(value, type) or not callable(getattr(value, method, None))):
        raise InputError(f"expected an object with {method}(), got {_shown(value)}", field=field)


def check_models(value: Any) -> Mapping[str, Any]:
    """Return names of root modules.

    Raises:
        InputError: No mapping, a bad name, no module, or one module under two names.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"expected names and their modules, got {_shown(value)}", field="models")
    names: dict[int, str] = {}
    for name, model in value.items():
        check_model(model, name, "models")
        if names.setdefault(id(model), name) != name:
            raise InputError(f"one module has two names, {names[id(model)]!r} and {name!r}", field="models")
    return value


def check_model(model: Any, name: Any, field: str) -> None:
    """Raise InputError unless this is a torch module and a name for it. Torch itself need not be imported for that."""
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"expected a name that is not empty, got {_shown(name)}", field=field)
    if isinstance(model, type) or not isinstance(getattr(model, "_modules", None), Mapping) or not _has_weakref(model):
        raise InputError(f"expected a torch.nn.Module under {name!r}, got {_shown(model)}", field=field)


def _has_weakref(value: object) -> bool:
    try:
        weakref.ref(value)
    except TypeError:
        return False
    return True


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else f"an object of {type(value).__qualname__}"
