"""A double of the ``amdsmi`` module, built from its documentation; nobody has held it against an AMD card.

A function that a fake device has no answer for raises AMDSMI_STATUS_NOT_SUPPORTED, as the library does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

NOT_SUPPORTED = 2
NA = "N/A"


class AmdSmiException(Exception):  # noqa: N818  # amdsmi's own name
    """Base of amdsmi's errors."""


class AmdSmiLibraryException(AmdSmiException):
    """An error of the library under amdsmi.

    Args:
        err_code: ``amdsmi_status_t``.
    """

    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def __str__(self) -> str:
        """Return it as amdsmi prints it, over two lines."""
        return f"Error code:\n\t{self.err_code} | (its words)"


class AmdSmiTemperatureType(IntEnum):
    """Sensors; amdsmi_temperature_type_t."""

    EDGE = 0
    HOTSPOT = 1
    VRAM = 2


class AmdSmiTemperatureMetric(IntEnum):
    """Which value of a sensor."""

    CURRENT = 0


class AmdSmiClkType(IntEnum):
    """Clock domains; amdsmi_clk_type_t."""

    SYS = 0
    GFX = 1
    MEM = 5
    VCLK0 = 7


@dataclass
class FakeAmdGpu:
    """One device.

    Attributes:
        answers: By function name without ``amdsmi_``: the value, or a callable over the remaining arguments.
        error: ``amdsmi_status_t`` that every call raises, or None.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    error: int | None = None


class FakeAmdSmi:
    """What ``AmdSource`` uses of ``amdsmi``.

    Attributes:
        gpus: The devices.
        init_error: ``amdsmi_status_t`` that ``amdsmi_init`` raises, or None.
        sessions: How often ``amdsmi_init`` was called.
    """

    AmdSmiException = AmdSmiException
    AmdSmiTemperatureType = AmdSmiTemperatureType
    AmdSmiTemperatureMetric = AmdSmiTemperatureMetric
    AmdSmiClkType = AmdSmiClkType

    def __init__(self, *gpus: FakeAmdGpu) -> None:
        self.gpus = list(gpus)
        self.init_error: int | None = None
        self.sessions = 0

    def amdsmi_init(self) -> None:
        """Begin a session."""
        if self.init_error is not None:
            raise AmdSmiLibraryException(self.init_error)
        self.sessions += 1

    def amdsmi_shut_down(self) -> None:
        """End it."""

    def amdsmi_get_processor_handles(self) -> list[FakeAmdGpu]:
        """Return the devices."""
        return list(self.gpus)

    def __getattr__(self, function: str) -> Callable[..., Any]:
        """Return any device function: the device's own answer."""
        if not function.startswith("amdsmi_get_"):
            raise AttributeError(function)
        return lambda gpu, *arguments: _answer(gpu, function.removeprefix("amdsmi_"), arguments)


def _answer(gpu: FakeAmdGpu, function: str, arguments: tuple[Any, ...]) -> Any:
    answer = gpu.answers.get(function)
    if gpu.error is not None or answer is None:
        raise AmdSmiLibraryException(NOT_SUPPORTED if gpu.error is None else gpu.error)
    return answer(*arguments) if callable(answer) else answer


def full_amd_gpu(**changes: Any) -> FakeAmdGpu:
    """Return a device that answers everything, in amdsmi's units; ``changes`` replaces answers by function name."""
    answers: dict[str, Any] = {
        "get_gpu_device_uuid": "a1ff74a1-0000-1000-8000-000000000001",
        "get_gpu_asic_info": {"market_name": "AMD Instinct MI300X", "asic_serial": "0x01", "vendor_id": "0x1002"},
        "get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.8.5", "driver_date": NA},
        "get_gpu_activity": {"gfx_activity": 83, "umc_activity": 12, "mm_activity": NA},
        "get_gpu_vram_usage": {"vram_total": 196592, "vram_used": 49148},
        "get_power_info": {
            "current_socket_power": 420,
            "average_socket_power": NA,
            "gfx_voltage": 0,
            "soc_voltage": NA,
            "mem_voltage": NA,
            "power_limit": 750,
        },
        "get_power_cap_info": {"power_cap": 750_000_000, "min_power_cap": 0, "max_power_cap": 750_000_000},
        "get_energy_count": {"energy_accumulator": 1_000_000, "counter_resolution": 15.25, "timestamp": 1},
        "get_temp_metric": lambda sensor, _metric: {0: 45, 1: 61, 2: 52}[sensor],
        "get_clock_info": lambda kind: {"clk": {1: 2100, 5: 1300, 7: 29}[kind], "min_clk": 132, "max_clk": 2100},
        "get_gpu_total_ecc_count": {"correctable_count": 4, "uncorrectable_count": 0, "deferred_count": 1},
        "get_pcie_info": {
            "pcie_static": {"max_pcie_width": 16},
            "pcie_metric": {"pcie_bandwidth": 800, "pcie_replay_count": 2},
        },
        "get_violation_status": {"active_ppt_pwr": True, "active_socket_thrm": False, "active_hbm_thrm": NA},
        "get_gpu_process_list": [
            {"name": "python", "pid": 77, "mem": 5, "memory_usage": {"gtt_mem": 1, "cpu_mem": 2, "vram_mem": 1 << 30}}
        ],
    }
    return FakeAmdGpu(answers | changes)
