"""GPU probe against a stand-in for libcuda."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from reconciler.benchmark.harness import gpu
from reconciler.benchmark.harness.probe import Reason, Request

pytestmark = pytest.mark.covers("HOST-12")

REQUEST = Request(label="a", kind="vm", repetitions=3)


class Library:
    """A driver library with an H200 that takes 10 ms for each measurement."""

    def __init__(self, init: int = 0, sum_of_chains: float = 16.0) -> None:
        self.results = {"cuInit": init}
        self.sum_of_chains = sum_of_chains
        self.calls: list[str] = []
        self.next_address = 1 << 40

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return self.results.get(name, 0)

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _cuDeviceGetAttribute(self, number: Any, *_: Any) -> None:
        number._obj.value = 132

    def _cuDeviceGetName(self, text: Any, *_: Any) -> None:
        text._obj.value = b"NVIDIA H200"

    def _cuDriverGetVersion(self, number: Any) -> None:
        number._obj.value = 12080

    def _cuMemAlloc_v2(self, address: Any, size: Any) -> None:
        address._obj.value = self.next_address
        self.next_address += size.value

    def _cuEventElapsedTime(self, took: Any, *_: Any) -> None:
        took._obj.value = 10.0

    def _cuMemcpyDtoH_v2(self, text: Any, address: Any, size: Any) -> None:
        sums = address.value < (1 << 40) + 8 * 132 * 2048
        text._obj.raw = struct.pack("<d", self.sum_of_chains) if sums else b"\xa5" * size.value

    def _cuGetErrorName(self, number: Any, name: Any) -> None:
        name._obj.value = {802: b"CUDA_ERROR_SYSTEM_NOT_READY"}.get(number.value, b"CUDA_ERROR")


def measured(monkeypatch: pytest.MonkeyPatch, library: Library) -> dict[str, Any]:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    return gpu.measure(REQUEST)


def test_rates_follow_from_work_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    result = measured(monkeypatch, library)
    assert (result["subject"], result["tool"]["version"]) == ("NVIDIA H200", "12.8")
    rates = {each["metric"]: each["median"] for each in result["metrics"]}
    assert rates["gpu.fp64"] == pytest.approx(2 * 8 * 400_000 * 132 * 2048 / 0.01 / 1e12, rel=1e-5)
    assert rates["gpu.hbm_copy"] == pytest.approx(2 * (2 << 30) * 20 / 0.01 / 1e9, rel=1e-5)
    assert library.calls.count("cuLaunchKernel") == 4, "one to warm up"
    assert library.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


@pytest.mark.parametrize(
    ("library", "code", "status"),
    [
        (Library(init=100), "gpu_missing", "unavailable"),
        (Library(init=802), "cuda_system_not_ready", "failed"),
        (Library(init=3), "cuda_failed", "failed"),
        (Library(sum_of_chains=15.9), "result_wrong", "failed"),
    ],
)
def test_no_figure_without_a_result(
    monkeypatch: pytest.MonkeyPatch, library: Library, code: str, status: str
) -> None:
    with pytest.raises(Reason) as caught:
        measured(monkeypatch, library)
    assert (caught.value.code, caught.value.status) == (code, status)


def test_any_call_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    library.results["cuMemAlloc_v2"] = 2
    with pytest.raises(Reason, match="cuMemAlloc_v2") as caught:
        measured(monkeypatch, library)
    assert caught.value.code == "cuda_failed"
    assert library.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(Reason, match="cuda_driver_missing"):
        gpu.Gpu()


def test_the_kernels_chains_meet_at_two() -> None:
    for start in (0.0, 7.0, 132 * 2048.0 + 7):
        value = start
        for _ in range(200):
            value = (
                value / 2 + 1
            )  # exact, because halving loses no bits: the same as the fused operation
        assert value == 2.0
