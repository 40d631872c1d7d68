"""Domain renderer, read back: its output can contain no other device."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _domain
from ansible_collections.gpuaas.slice.plugins.module_utils.slice._domain import Domain
from hypothesis import given
from hypothesis import strategies as st

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
DISK = "/dev/disk/by-id/nvme-eui.5e0000000000a003"


def domain(**changes: Any) -> Domain:
    base = Domain(
        allocation_id=ALLOCATION,
        vcpus=2,
        memory_mib=768,
        mac="52:54:00:64:00:0a",
        bridge="ovsbr0",
        disks=(DISK,),
        gpus=("0000:43:00.0",),
    )
    return replace(base, **changes)


addresses = st.from_regex(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", fullmatch=True)
arguments = st.text(st.sampled_from(string.printable[:95]), min_size=1, max_size=20)


@st.composite
def domains(draw: st.DrawFn) -> Domain:
    passed = draw(st.lists(addresses, min_size=1, max_size=6, unique=True))
    cut = draw(st.integers(1, len(passed)))
    vcpus = draw(st.integers(1, 8))
    cpus = st.one_of(st.just(()), st.permutations(range(8)).map(lambda all_: tuple(all_[:vcpus])))
    suffixes = st.from_regex(r"[A-Za-z0-9._:+-]{1,20}", fullmatch=True)
    disks = draw(st.lists(suffixes, min_size=1, max_size=3, unique=True))
    return domain(
        vcpus=vcpus,
        memory_mib=draw(st.integers(128, 1 << 20)),
        disks=tuple(f"/dev/disk/by-id/nvme-{suffix}" for suffix in disks),
        gpus=tuple(passed[:cut]),
        fabric_vfs=tuple(passed[cut:]),
        cpus=draw(cpus),
        numa_node=draw(st.one_of(st.none(), st.integers(0, 7))),
        firmware=draw(st.sampled_from(["bios", "uefi"])),
        hugepages=draw(st.booleans()),
        nested=draw(st.booleans()),
        seed_path=draw(st.sampled_from(["", f"/var/lib/gpuaas/seeds/{ALLOCATION}.iso"])),
        qemu_arguments=tuple(draw(st.lists(arguments, max_size=4))),
    )


@given(domains())
def test_what_is_written_is_read_back_and_nothing_else(machine: Domain) -> None:
    assert _domain.parse(_domain.render(machine)) == _domain.describe(machine)


@given(st.text(max_size=30), st.sampled_from(["mac", "bridge", "disks", "gpus", "seed_path"]))
def test_hostile_text_is_refused_or_stays_one_value(text: str, field: str) -> None:
    value = (text,) if field in ("disks", "gpus") else text
    machine = domain(**{field: value})
    try:
        xml = _domain.render(machine)
    except Refusal as refusal:
        assert refusal.code == "spec_invalid"
    else:
        assert _domain.parse(xml) == _domain.describe(machine)


def test_every_passed_device_has_a_root_port_of_its_own() -> None:
    machine = domain(gpus=("0000:43:00.0", "0000:44:00.0"), fabric_vfs=("0000:25:10.1",))
    root = ET.XML(_domain.render(machine))
    ports = {c.get("index") for c in root.iter("controller") if c.get("model") == "pcie-root-port"}
    buses = [place.get("bus") for place in root.iterfind("devices/hostdev/address")]
    assert ports == {"1", "2", "3"}
    assert buses == ["0x01", "0x02", "0x03"]
    assert all(d.get("managed") == "no" for d in root.iter("hostdev"))


def test_uefi_is_without_secure_boot_and_with_its_own_nvram() -> None:
    root = ET.XML(_domain.render(domain(firmware="uefi")))
    loader, nvram = root.find("os/loader"), root.find("os/nvram")
    assert loader is not None and nvram is not None
    assert loader.get("secure") == "no"
    assert ALLOCATION.replace("-", "") in (nvram.text or "")


@given(domains())
def test_no_option_rom_and_nested_virtualization_only_by_profile(machine: Domain) -> None:
    root = ET.XML(_domain.render(machine))
    devices = root.findall("devices/hostdev")
    roms = [rom.attrib for rom in root.iterfind("devices/hostdev/rom")]
    assert roms == [{"bar": "off"}] * len(devices)
    disabled = {f.get("name") for f in root.findall("cpu/feature") if f.get("policy") == "disable"}
    assert disabled == (set() if machine.nested else {"vmx", "svm"})


@pytest.mark.parametrize(
    ("written", "edited", "field"),
    [
        ('<rom bar="off" />', '<rom bar="on" />', "option_roms"),
        ('<rom bar="off" />', "", "option_roms"),
        ('<rom bar="off" />', '<rom bar="off" file="/tmp/rom" />', "option_roms"),
        ('policy="disable" name="vmx"', 'policy="require" name="vmx"', "nested"),
        ('<feature policy="disable" name="svm" />', "", "nested"),
    ],
)
def test_an_option_rom_or_nested_virtualization_added_by_hand_is_a_difference(
    written: str, edited: str, field: str
) -> None:
    machine = domain()
    xml = _domain.render(machine)
    assert written in xml
    actual = _domain.parse(xml.replace(written, edited))
    assert list(_domain.differences(_domain.describe(machine), actual)) == [field]


def test_no_graphics_tpm_or_channel() -> None:
    root = ET.XML(_domain.render(domain()))
    kinds = {device.tag for device in root.findall("devices/*")}
    assert not kinds & {"graphics", "video", "tpm", "channel", "filesystem", "redirdev"}


def test_memory_limit_leaves_room_for_pinning() -> None:
    limit = ET.XML(_domain.render(domain(memory_mib=65536))).findtext("memtune/hard_limit")
    assert int(limit or 0) >= 65536 * 5 // 4


@pytest.mark.parametrize(
    "change",
    [
        {"allocation_id": ALLOCATION.upper()},
        {"allocation_id": "x"},
        {"mac": "53:54:00:64:00:0a"},
        {"disks": ("/dev/nvme0n1",)},
        {"disks": ()},
        {"gpus": ()},
        {"gpus": ("43:00.0",)},
        {"gpus": ("0000:43:00.0", "0000:43:00.0")},
        {"cpus": (1,)},
        {"vcpus": 0},
        {"firmware": "coreboot"},
        {"qemu_arguments": ("a\nb",)},
        {"seed_path": "/etc/shadow"},
    ],
)
def test_refused(change: dict[str, object]) -> None:
    with pytest.raises(Refusal, match="spec_invalid"):
        _domain.render(domain(**change))


def test_a_device_that_somebody_added_is_a_difference() -> None:
    machine = domain()
    changed = _domain.render(machine).replace("</devices>", "<graphics type='vnc'/></devices>")
    differences = _domain.differences(_domain.describe(machine), _domain.parse(changed))
    assert differences == {"other_devices": ([], ["graphics:vnc"])}


def test_libvirts_own_units_and_additions_are_no_difference() -> None:
    machine = domain()
    xml = _domain.render(machine).replace('unit="MiB">768<', 'unit="KiB">786432<', 1)
    added = "<emulator>/usr/bin/kvm</emulator><input type='mouse'/><audio id='1' type='none'/>"
    xml = xml.replace("</devices>", f"{added}</devices>")
    assert _domain.parse(xml) == _domain.describe(machine)


def test_options_of_a_module_become_a_domain() -> None:
    options = {
        "vcpus": 2,
        "memory_mib": 768,
        "mac": "52:54:00:64:00:0a",
        "bridge": "ovsbr0",
        "disks": [DISK],
        "gpus": ["0000:43:00.0"],
        "numa_node": -1,
    }
    assert _domain.from_options(ALLOCATION, options) == domain()
