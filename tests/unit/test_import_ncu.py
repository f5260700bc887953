"""Handed case G07: Nsight Compute's CSV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pasta_otel.errors import InputError
from pasta_otel.gpu.imports.ncu import read_ncu, scale

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
EXPECTED = json.loads((CASES / "G07" / "expected.json").read_text())
READ, TIME = "dram__bytes_read.sum", "gpu__time_duration.sum"


def ncu(name):
    return read_ncu((CASES / "G07" / name).read_text(), name)


@pytest.mark.case("G07")
def test_ncu_values_are_in_base_units_and_columns_are_found_by_name():
    (kernel,) = ncu("new15.csv")
    assert kernel.name == "gemm(float*, const float*, int)"
    assert kernel.metrics[READ] == pytest.approx(EXPECTED["bytes"])
    assert kernel.metrics[TIME] == pytest.approx(EXPECTED["dur_s"])
    assert kernel.metrics["sm__warps_active.avg.pct_of_peak_sustained_active"] == pytest.approx(0.675)
    sectors = kernel.metrics["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    assert sectors == 1_048_576
    requests = kernel.metrics["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"]
    assert sectors / requests == EXPECTED["sectors_per_request"]
    assert (kernel.units[READ], kernel.units[TIME]) == ("By", "s")


@pytest.mark.case("G07")
def test_ncus_n_a_is_absent_not_zero():
    (kernel,) = ncu("new15.csv")
    assert "lts__t_sector_hit_rate.pct" not in kernel.metrics


@pytest.mark.case("G07")
def test_an_older_ncu_with_fewer_columns_is_read_too():
    (kernel,) = ncu("old12.csv")
    assert kernel.metrics[READ] == pytest.approx(EXPECTED["old_bytes"])
    assert kernel.metrics[TIME] == pytest.approx(EXPECTED["old_dur_s"])


@pytest.mark.case("G07")
def test_output_without_a_table_quotes_ncus_own_error():
    with pytest.raises(InputError) as caught:
        read_ncu("==PROF== hello\n==ERROR== ERR_NVGPUCTRPERM: no permission\n==ERROR== second\n")
    assert caught.value.kind == "ncu_no_table"
    assert "ERR_NVGPUCTRPERM" in str(caught.value)
    with pytest.raises(InputError, match="no table"):
        read_ncu("")


@pytest.mark.parametrize(
    ("unit", "factor", "base"),
    [
        ("Gbyte/second", 1e9, "By/s"),
        ("msecond", 1e-3, "s"),
        ("Mhz", 1e6, "Hz"),
        ("inst", 1, "{instruction}"),
        ("", 1, "1"),
    ],
)
def test_ncu_units_scale_by_thousands(unit, factor, base):
    assert scale(unit) == (factor, base)
