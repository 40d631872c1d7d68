"""Wipe of a disk: its methods in order, read-back, and failures that are no proof."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _device, _nvme_wipe

pytestmark = pytest.mark.covers("HOST-9")

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]
MIB = 1 << 20
SIZE = 48 * MIB
CANARY = b"tenant-canary"
CAN_CRYPTO_ERASE = 0x4


def wipe(methods: list[str]) -> dict[str, Any]:
    disk = _block.resolve("nvme1n1")
    with _block.exclusive(disk) as descriptor:
        return _nvme_wipe.erase(descriptor, disk, methods)


def write_canaries(bench) -> None:
    for offset in (0, 449, 20 * MIB + 7, SIZE - 20):
        bench.write("nvme1n1", offset, CANARY)


def is_clean(bench) -> bool:
    return not any(bench.read("nvme1n1", 0, SIZE))


@pytest.mark.parametrize(
    ("method", "kind", "settings"),
    [
        ("crypto_erase", "purge", [2]),
        ("user_data_erase", "purge", [1]),
        ("discard", "clear", []),
        ("zero_fill", "clear", []),
    ],
)
def test_a_wipe_leaves_zeros_and_says_how(
    bench, method: str, kind: str, settings: list[int]
) -> None:
    namespace = bench.disk(fna=CAN_CRYPTO_ERASE)
    write_canaries(bench)
    proof = wipe([method])
    assert is_clean(bench)
    assert [command >> 9 & 7 for command in namespace.formats] == settings
    assert (proof["method"], proof["class"], proof["verified"]) == (method, kind, True)
    assert (proof["disk"], proof["serial"]) == ("eui.5e0000000000a000", "LABNVME0")
    assert proof["size_bytes"] == SIZE and proof["started_at"] < proof["finished_at"]


def test_methods_that_the_controller_lacks_are_left_out(bench) -> None:
    namespace = bench.disk(oacs=0)
    write_canaries(bench)
    proof = wipe(["crypto_erase", "user_data_erase", "zero_fill"])
    assert proof["method"] == "zero_fill" and namespace.formats == []
    assert [attempt["method"] for attempt in proof["attempts"]] == [
        "crypto_erase",
        "user_data_erase",
    ]


def test_a_discard_that_leaves_bytes_is_made_good(bench) -> None:
    bench.disk(leaves={"discard"})
    write_canaries(bench)
    proof = wipe(["discard"])
    assert is_clean(bench)
    # The piece in the middle; both ends were overwritten with the signatures.
    assert proof["controller_status"]["rewritten_bytes"] == MIB


@pytest.mark.parametrize("method", ["crypto_erase", "user_data_erase"])
def test_an_erase_that_leaves_bytes_is_no_proof_and_the_next_method_is_tried(
    bench, method: str
) -> None:
    """The controller reports success. Only the read-back can tell, and the proof names the method
    used."""
    bench.disk(leaves={"format"}, fna=CAN_CRYPTO_ERASE)
    write_canaries(bench)
    bench.write("nvme1n1", 3 * MIB, CANARY)
    proof = wipe([method, "zero_fill"])
    assert is_clean(bench)
    assert [(attempt["method"], attempt["outcome"][:10]) for attempt in proof["attempts"]] == [
        (method, "bytes left")
    ]
    assert (proof["method"], proof["class"], proof["verified"]) == ("zero_fill", "clear", True)
    assert (proof["disk"], proof["serial"]) == ("eui.5e0000000000a000", "LABNVME0")
    assert proof["started_at"] < proof["finished_at"]
    assert proof["controller_status"]["status"] == 0
    # Both ends and the part between: so small a disk is read as a whole.
    assert (proof["sample_offsets"], proof["sample_bytes"]) == ([0], SIZE)


def test_a_crypto_erase_that_leaves_bytes_alone_is_refused(bench) -> None:
    bench.disk(leaves={"format"}, fna=CAN_CRYPTO_ERASE)
    bench.write("nvme1n1", 3 * MIB, CANARY)
    with pytest.raises(Refusal) as caught:
        wipe(["crypto_erase", "user_data_erase"])
    assert caught.value.code == "wipe_not_verified"
    assert caught.value.found.count("bytes left") == 2


def test_a_wipe_that_cannot_be_proven_fails(bench) -> None:
    bench.disk(leaves={"format"}, refuses=0)
    bench.write("nvme1n1", 3 * MIB, CANARY)
    with pytest.raises(Refusal) as caught:
        wipe(["user_data_erase"])
    assert caught.value.code == "wipe_not_verified"


# Recorded by the structures of the specifications; not run on hardware. A reservation of type 1
# (write exclusive) with a single registered host.
RESERVED = bytes.fromhex("0500000001010000000000000000000000000000000000000100010000000000")
RESERVED += bytes.fromhex("aabbccddeeff0011") + bytes.fromhex("0000000000000abc")
# Level 0 discovery: header, TPer (0001), Locking (0002) with its flags, Opal 2 (0203).
LEVEL_0 = (
    "00000064" + "00000001" + "00" * 40 + "0001100c01" + "00" * 11 + "0002100c{:02x}" + "00" * 11
)
LEVEL_0 += "02031010" + "07fe0001" + "00" * 12


@pytest.mark.parametrize(
    ("left", "code"),
    [
        ({"reservations": RESERVED}, "disk_reserved"),
        ({"security": bytes.fromhex(LEVEL_0.format(0x0F))}, "disk_locked"),
        # Locking is enabled, and no range is locked: not the cause.
        ({"security": bytes.fromhex(LEVEL_0.format(0x0B))}, "wipe_not_verified"),
        ({"reservations": bytes(24), "security": b"\xff" * 60}, "wipe_not_verified"),
        ({"reservations": b"\x01", "security": b"\0"}, "wipe_not_verified"),
        ({}, "wipe_not_verified"),
    ],
)
def test_what_a_former_tenant_left_on_the_disk_is_named(
    bench, left: dict[str, bytes], code: str
) -> None:
    bench.disk(refuses=0x4083, leaves={"format"}, **left)
    with pytest.raises(Refusal) as caught:
        wipe(["user_data_erase"])
    assert caught.value.code == code
    assert "refused" in caught.value.found
    assert all((caught.value.expected, caught.value.remedy))


def test_a_refused_format_is_recorded_with_the_controllers_status(bench) -> None:
    bench.disk(refuses=0x2002)
    proof = wipe(["user_data_erase", "zero_fill"])
    assert str(0x2002) in proof["attempts"][0]["outcome"]


def test_zeros_are_written_where_the_driver_knows_no_request_for_them(bench) -> None:
    bench.disk(unsupported={_device.BLKZEROOUT, _device.BLKRRPART})
    write_canaries(bench)
    assert wipe(["zero_fill"])["controller_status"]["command"] == "writes"
    assert is_clean(bench)


def test_signatures_go_first_and_their_places_are_read_back(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", 18 * MIB, 10 * MIB, minor=2)
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", 18 * MIB, b"XFSB")
    disk = _block.resolve("nvme1n1")
    with _block.exclusive(disk) as descriptor:
        marks = _nvme_wipe.clear_signatures(descriptor, disk)
    assert {512, 18 * MIB, 27 * MIB, 47 * MIB} <= set(marks)
    assert is_clean(bench)
