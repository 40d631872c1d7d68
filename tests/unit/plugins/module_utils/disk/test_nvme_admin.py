"""NVMe admin commands: Identify, and a Format that reaches a single namespace."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _nvme_admin

pytestmark = pytest.mark.covers("HOST-9")

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]


def opened(namespace) -> int:
    return os.open(namespace.node, os.O_RDWR)


def test_identity_and_capabilities_come_from_identify(bench) -> None:
    descriptor = opened(bench.disk(oacs=0x12B, fna=0x4))
    identity = _nvme_admin.identify(descriptor)
    os.close(descriptor)
    assert (identity.serial, identity.model, identity.eui) == (
        "LABNVME0",
        "QEMU NVMe Ctrl",
        "5e0000000000a000",
    )
    assert identity.can_format and identity.can_crypto_erase and not identity.format_spreads


@pytest.mark.parametrize(
    ("controller", "method", "supported"),
    [
        ({"oacs": 0x2}, "user_data_erase", True),
        ({"oacs": 0x2}, "crypto_erase", False),
        ({"oacs": 0x2, "fna": 0x4}, "crypto_erase", True),
        ({"oacs": 0x0, "fna": 0x4}, "user_data_erase", False),
        ({"oacs": 0x2, "fna": 0x2}, "user_data_erase", True),
        ({"oacs": 0x2, "fna": 0x2, "active": (1, 2)}, "user_data_erase", False),
        ({"oacs": 0x2, "fna": 0x5, "active": (1, 2)}, "crypto_erase", False),
        # Namespaces that are detached, or attached to another controller only, are not active.
        ({"oacs": 0xA, "fna": 0x5, "allocated": (1, 2)}, "crypto_erase", False),
        ({"oacs": 0xA, "fna": 0x2, "allocated": (1, 2)}, "user_data_erase", False),
        ({"oacs": 0xA, "fna": 0x2, "allocated": (1,)}, "user_data_erase", True),
        ({"oacs": 0xA, "fna": 0x2}, "user_data_erase", False),
        ({"oacs": 0xA, "fna": 0x4}, "crypto_erase", True),
        ({"oacs": 0xA, "fna": 0x1}, "zero_fill", True),
        ({"oacs": 0x0, "active": (1, 2)}, "discard", True),
        ({"oacs": 0x0, "active": (1, 2)}, "zero_fill", True),
    ],
)
def test_an_erase_that_would_reach_other_namespaces_is_not_offered(
    bench, controller: dict[str, object], method: str, supported: bool
) -> None:
    descriptor = opened(bench.disk(**controller))
    identity = _nvme_admin.identify(descriptor)
    os.close(descriptor)
    assert identity.supports(method) is supported


def test_a_format_erases_and_keeps_block_size_and_protection(bench) -> None:
    namespace = bench.disk()
    descriptor = opened(namespace)
    identity = _nvme_admin.identify(descriptor)
    assert _nvme_admin.format_namespace(descriptor, identity, "user_data_erase", timeout=5) == 0
    assert _nvme_admin.format_namespace(descriptor, identity, "crypto_erase", timeout=5) == 0
    os.close(descriptor)
    assert namespace.formats == [0x1 | 1 << 9, 0x1 | 2 << 9]


def test_the_format_setting_repeats_every_field_of_the_present_format() -> None:
    controller, described = bytearray(4096), bytearray(4096)
    described[26] = 0b0111_0010  # LBAF 2, extended metadata, LBAF high bits 3
    described[29] = 0b1011  # protection type 3, first bytes
    identity = _nvme_admin.parse(1, bytes(controller), bytes(described), bytes(4096))
    assert identity.format_setting == 2 | 1 << 4 | 3 << 5 | 1 << 8 | 3 << 12
    assert (identity.eui, identity.nguid, identity.can_format) == ("", "", False)
