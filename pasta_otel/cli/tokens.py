"""Bearer tokens of what listens: a variable that is named must hold one, or nothing starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pasta_otel.bearer import checked_token
from pasta_otel.errors import InputError


def token_from(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the token of the variable that ``--token-env`` names; empty when no variable is named.

    Raises:
        InputError: The variable is not set, is empty, or holds what no header can carry; names it, never its value.
    """
    if not name:
        return ""
    environ = os.environ if environ is None else environ
    if name not in environ:
        raise InputError(f"the variable {name} is not set", field="--token-env", kind="token")
    try:
        token = checked_token(environ[name])
    except ValueError as error:
        raise InputError(f"the variable {name} {error}", field="--token-env", kind="token") from error
    if not token:
        raise InputError(f"the variable {name} is empty", field="--token-env", kind="token")
    return token
