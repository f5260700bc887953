"""Matrix products and convolutions that ran outside the tensor cores of a GPU that has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from pasta_otel.gpu.classes import CLASSES
from pasta_otel.gpu.findings.model import Evidence, Finding, RankTrace, thresholds

KIND = "tensor_cores_missed"
SCALAR_NAMES = re.compile(r"sgemm|dgemm|cgemm|zgemm|gemmSN|simt|scudnn|fma_f32|_sgemv|ffma", re.IGNORECASE)
"""GPU kernels of cuBLAS, cuDNN and CUTLASS that multiply with the scalar units: their names say so (sgemm, simt)."""
TENSOR_NAMES = re.compile(
    r"tensorop|s884|s1688|s16816|s161616|h884|h1688|h16816|i8816|i16832|gmma|hmma|imma|xmma_.*tf32"
)
TOP = 3


def find(ranks: Sequence[RankTrace]) -> Iterable[Finding]:
    """Find ranks on NVIDIA GPUs with tensor cores whose matrix products use the scalar units."""
    limits = thresholds(KIND)
    products = [CLASSES.index("gemm"), CLASSES.index("conv")]
    for rank in ranks:
        total = int(rank.duration_ns[rank.is_kernel].sum())
        if not total or not _has_tensor_cores(rank, limits["compute_major"].value):
            continue
        rows = np.flatnonzero(rank.is_kernel & np.isin(rank.codes, products))
        missed = np.array([row for row in rows.tolist() if _is_scalar(rank.name(rank.work[row]))], np.int64)
        missed_ns = int(rank.duration_ns[missed].sum()) if len(missed) else 0
        if missed_ns / total < limits["time_share"].value:
            continue
        by_name: dict[str, int] = {}
        for row in missed.tolist():
            name = rank.name(rank.work[row])
            by_name[name] = by_name.get(name, 0) + int(rank.duration_ns[row])
        evidence = [Evidence("missed_time", missed_ns / 1e9, "s", f"{len(missed)} of {len(rows)} matrix products")]
        for name, ns in sorted(by_name.items(), key=lambda item: -item[1])[:TOP]:
            evidence.append(Evidence("kernel_time", ns / 1e9, "s", name[:120]))
        yield Finding(
            KIND,
            rank.timeline.rank,
            missed_ns / total,
            f"{missed_ns / total:.0%} of the GPU kernel time are matrix products outside the tensor cores",
            tuple(evidence),
            "use bfloat16 or float16 (torch.autocast), or on compute capability 8.0 and later"
            " torch.set_float32_matmul_precision('high'); make the inner dimensions multiples of 8",
            limits,
        )


def _is_scalar(name: str) -> bool:
    return SCALAR_NAMES.search(name) is not None and TENSOR_NAMES.search(name) is None


def _has_tensor_cores(rank: RankTrace, from_major: float) -> bool:
    devices = rank.timeline.devices.values()
    majors = [device.get("computeMajor", device.get("major")) for device in devices if _is_nvidia(device.get("name"))]
    return any(isinstance(major, int) and major >= from_major for major in majors)


def _is_nvidia(name: object) -> bool:
    return isinstance(name, str) and re.search(r"NVIDIA|Tesla|Quadro|GeForce", name) is not None
