"""A CUDA device's UUID, asked of a driver that is not initialised yet, then is."""

from __future__ import annotations

import ctypes
import sys

import pytest

from pasta_otel.gpu.cupti import devices

RAW = bytes(range(16))


class Driver:
    """libcuda, as far as it is asked."""

    def __init__(self) -> None:
        self.initialised = False

    def cuDeviceGet(self, device: object, ordinal: int) -> int:  # noqa: N802 - the driver's name
        del device, ordinal
        return 0 if self.initialised else 3  # CUDA_ERROR_NOT_INITIALIZED

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802 - as above
        ctypes.memmove(count, (2).to_bytes(4, sys.byteorder), 4)
        return 0 if self.initialised else 3

    def cuDeviceGetUuid_v2(self, raw: object, device: object) -> int:  # noqa: N802 - as above
        del device
        ctypes.memmove(raw, RAW, 16)
        return 0


def test_an_answer_is_kept_and_its_absence_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(devices, "_known", {})
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda _: driver)
    assert devices.device_uuid(0) == "cuda:0"
    driver.initialised = True
    assert devices.device_uuid(0) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    driver.initialised = False
    assert devices.device_uuid(0).startswith("GPU-")


def test_devices_are_counted_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda _: driver)
    assert devices.device_count() == 0
    driver.initialised = True
    assert devices.device_count() == 2


def test_without_a_driver_the_ordinal_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(devices, "_known", {})
    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    assert devices.device_uuid(1) == "cuda:1"
    assert devices.device_count() == 0
