"""Why eBPF did not start: one stable word for each of the texts that kernels, bcc and libbpf produce."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

StartReason = Literal[
    "kernel_headers_missing",
    "not_privileged",
    "symbol_not_found",
    "symbol_not_traceable",
    "lockdown_or_helper_denied",
    "verifier_or_version",
    "bcc_missing",
    "kernel_lockdown_confidentiality",
    "libbpf_missing",
    "object_missing",
    "loader_cannot",
    "btf_missing",
    "library_stripped",
    "return_probes_unsafe",
    "tracefs_missing",
    "tracepoint_missing",
    "attach_refused",
    "compile_failed",
    "input_invalid",
    "pid_namespace",
    "no_ptrace",
    "unknown",
]

# first match wins: what names the true cause stands before what merely follows from it
_PATTERNS: tuple[tuple[StartReason, str], ...] = (
    ("bcc_missing", r"No module named '(bcc|bpfcc)|libbcc\.so.*cannot open"),
    (
        "kernel_headers_missing",
        r"kernel headers|CONFIG_IKHEADERS|kconfig\.h' file not found|/lib/modules/\S+/build",
    ),
    ("tracefs_missing", r"/sys/kernel/(debug/)?tracing\S*: Permission denied"),
    ("tracepoint_missing", r"/sys/kernel/(debug/)?tracing/events/\S+: No such file"),
    ("lockdown_or_helper_denied", r"cannot use helper|unknown func bpf_"),
    ("verifier_or_version", r"processed \d+ insns"),  # its refusal, whose errno is often that of a missing privilege
    (
        "not_privileged",
        r"super-user privileges|Operation not permitted|EPERM|Permission denied|CAP_(BPF|PERFMON|SYS_ADMIN)",
    ),
    ("symbol_not_found", r"could not determine address of symbol|could not find .*symbol|no such symbol"),
    ("symbol_not_traceable", r"probe entry may not exist|Failed to attach BPF program .* to k(ret)?probe"),
    ("attach_refused", r"^attaching .*Invalid argument"),
    ("verifier_or_version", r"Failed to load program|Invalid argument|program too large|invalid (mem|indirect)"),
    ("compile_failed", r"\d+ errors? generated|Failed to compile BPF module"),
)

HELP: dict[StartReason, str] = {
    "kernel_headers_missing": "install the headers of the running kernel, or use the CO-RE loader (needs BTF only)",
    "not_privileged": "run the agent with CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE",
    "symbol_not_found": "the library does not export that function: is it the one that the process maps?",
    "symbol_not_traceable": "this kernel does not let that function be probed; the tracepoint is used instead",
    "lockdown_or_helper_denied": "kernel lockdown or an old kernel forbids a helper; see /sys/kernel/security/lockdown",
    "verifier_or_version": "the kernel refused the program: its verifier log says why",
    "bcc_missing": "install bcc (Debian: python3-bpfcc), or use the CO-RE loader",
    "kernel_lockdown_confidentiality": "the kernel is locked down (confidentiality): eBPF cannot read anything",
    "libbpf_missing": "install libbpf 1.x (Debian, Ubuntu: apt-get install libbpf1)",
    "object_missing": "install clang and libbpf-dev and run `python -m pasta_otel.ebpf.build`",
    "loader_cannot": "use the core loader for this probe",
    "btf_missing": "use a kernel with CONFIG_DEBUG_INFO_BTF=y, or the bcc loader with the running kernel's headers",
    "library_stripped": "the functions' names are gone from this file: link dynamically, or keep its symbols",
    "return_probes_unsafe": "Linux 6.11 to 6.13 kill a traced process under seccomp: calls are counted, not timed",
    "tracefs_missing": "mount -t tracefs tracefs /sys/kernel/tracing, and give the agent CAP_DAC_READ_SEARCH",
    "tracepoint_missing": "this kernel has no such tracepoint: see `events` below /sys/kernel/tracing",
    "attach_refused": "the kernel cannot probe this place: has the file changed since its process mapped it?",
    "compile_failed": "the program is not valid C for this machine's headers: the compiler's words are in the text",
    "input_invalid": "the error names the file and the place in it",
    "pid_namespace": "run the agent with hostPID: true (docker: --pid=host)",
    "no_ptrace": "give the agent CAP_SYS_PTRACE: processes of other users are not seen without it",
    "unknown": "see the error text",
}


def start_reason(error: str) -> StartReason:
    """Return the reason that an error text names."""
    return next((reason for reason, pattern in _PATTERNS if re.search(pattern, error)), "unknown")


def lockdown_reason(text: str | None) -> StartReason | None:
    """Return why not even to try, from the text of ``/sys/kernel/security/lockdown``; None = go on.

    ``integrity`` only takes optional reads away; an absent file (None) is a kernel without lockdown.
    """
    return "kernel_lockdown_confidentiality" if text and "[confidentiality]" in text else None


def read_lockdown(sys_root: Path) -> str | None:
    """Return the lockdown file's text, or None when there is none."""
    try:
        return (sys_root / "kernel" / "security" / "lockdown").read_text(encoding="utf-8")
    except OSError:
        return None
