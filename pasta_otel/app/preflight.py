"""What the options name on this machine, checked before anything listens: one line instead of a late traceback."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

from pasta_otel.app.options import SidecarOptions
from pasta_otel.errors import InputError
from pasta_otel.slo.spec.document import SpecError
from pasta_otel.slo.windows import BurnRateWindows, load_windows


def check_files(options: SidecarOptions) -> None:
    """Check folders and certificates.

    Raises:
        InputError: One cannot be used; names the option and the file.
    """
    if options.tls_certificate:
        _check_pair(options.tls_certificate, options.tls_key)
    if options.state_dir is not None:
        _check_folder("--state", options.state_dir)
    for option, file in (("--audit", options.audit), ("--flagd-file", options.flagd_file)):
        if file is not None:
            if file.is_dir():
                raise InputError("is a directory, expected a file", file=str(file), field=option)
            _check_folder(option, file.parent)


def chosen_windows(name: str) -> BurnRateWindows:
    """Return the burn-rate windows of a name or file, which are checked also where no SLO uses them.

    Raises:
        InputError: There are none, or the file is wrong.
    """
    try:
        return load_windows(name)
    except SpecError:
        raise
    except InputError as error:
        raise InputError(error.message, file=error.file, line=error.line, field="--windows", kind=error.kind) from error


def explained(error: InputError) -> InputError:
    """Return the error of a state file with what may be done about it, and what that costs; any other as it is."""
    if error.kind != "state":
        return error
    text = (
        f"{error.message}; it may be deleted: then every SLO starts as no_data, and a burn or alert under way begins"
        " anew and is notified again; budgets and counts (from the source) and what is degraded (by actions.json) stay"
    )
    return InputError(text, file=error.file, line=error.line, field=error.field, kind=error.kind)


def _check_folder(option: str, folder: Path) -> None:
    """Make a folder if it is missing, and see that files can be made in it, which permission bits alone do not say."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "is no directory" if folder.exists() and not folder.is_dir() else error.strerror or str(error)
        raise InputError(f"no files can be written there: {why}", file=str(folder), field=option) from error


def _check_pair(certificate: str, key: str) -> None:
    for option, file in (("--tls-certificate", certificate), ("--tls-key", key)):
        try:
            with Path(file).open("rb"):
                pass
        except OSError as error:
            raise InputError(error.strerror or str(error), file=file, field=option) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # a key with a passphrase is refused, where OpenSSL would ask for it on the terminal
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
        except (ssl.SSLError, OSError):
            raise InputError("holds no PEM certificate", file=certificate, field="--tls-certificate") from error
        text = "holds no PEM key of this certificate that can be read without a passphrase"
        raise InputError(text, file=key, field="--tls-key") from error
