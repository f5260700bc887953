"""GPU kernels in double precision, mostly by accident: a Python float or a NumPy array became a float64 tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "fp64"
DOUBLE_NAMES = re.compile(r"dgemm|dgemv|ddot|f64f64|(?<![a-z])d884|\w<double\b")
"""cuBLAS and CUTLASS names, and templates whose first argument is the element type; a double elsewhere in a name is a
scalar parameter or an accumulator."""
FLOATS = frozenset({"float", "double", "c10::Half", "c10::BFloat16"})
TOP = 3


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks that spend a share of their GPU kernel time in double precision."""
    limits = thresholds(KIND)
    for rank in ranks:
        total = int(rank.duration_ns[rank.is_kernel].sum())
        if not total:
            continue
        by_name = np.array([is_double(name) for name in rank.timeline.names], np.bool_)
        types = np.array([FLOATS & set(name.split(",")) == {"double"} for name in rank.timeline.names], np.bool_)
        dtype = np.concatenate([rank.timeline.ops["dtype"], [0]])[rank.links.op]
        rows = np.flatnonzero(rank.is_kernel & (by_name[rank.work["name"]] | (types[dtype] & (rank.links.op >= 0))))
        double_ns = int(rank.duration_ns[rows].sum())
        if double_ns / total < limits["time_share"].value:
            continue
        sums: dict[str, int] = {}
        for row in rows.tolist():
            op = int(rank.links.op[row])
            where = rank.timeline.names[rank.timeline.ops["name"][op]] if op >= 0 else "unknown op"
            key = f"{rank.name(rank.work[row])[:100]} from {where}"
            sums[key] = sums.get(key, 0) + int(rank.duration_ns[row])
        top = sorted(sums.items(), key=lambda item: -item[1])[:TOP]
        yield Finding(
            KIND,
            rank.timeline.rank,
            double_ns / total,
            f"{len(rows)} GPU kernels compute in double precision, {double_ns / total:.1%} of the GPU kernel time",
            tuple(Evidence("kernel_time", ns / 1e9, "s", name) for name, ns in top),
            "make the tensors float32: torch.tensor(..., dtype=torch.float32), array.astype(np.float32) before"
            " torch.from_numpy",
            limits,
        )


def is_double(name: str) -> bool:
    """Return whether a GPU kernel's name says that its elements are doubles."""
    return DOUBLE_NAMES.search(name) is not None
