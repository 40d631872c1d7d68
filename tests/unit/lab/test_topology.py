"""The QEMU argument list of a lab host."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lab import topology
from lab.topology import Machine


def machine(accel: str = "tcg") -> Machine:
    return Machine(Path("/lab"), Path("/fw/CODE.fd"), accel, 2222)


def values(option: str, accel: str = "tcg") -> list[str]:
    """The value after each `option`."""
    words = topology.arguments(machine(accel))
    return [value for word, value in itertools.pairwise(words) if word == option]


def devices(kind: str) -> list[str]:
    return [value for value in values("-device") if value.split(",")[0] == kind]


def test_every_bus_of_a_device_exists_before_it_is_used() -> None:
    buses = {"pcie.0"}
    for value in values("-device"):
        fields = dict(part.split("=", 1) for part in value.split(",")[1:] if "=" in part)
        if fields.get("bus", "channels.0") != "channels.0":
            assert fields["bus"] in buses, value
        if "id" in fields:
            buses.add(fields["id"])


def test_each_passthrough_device_has_a_root_port_of_its_own() -> None:
    users = [
        value.split("bus=")[1].split(",")[0]
        for kind in ("edu", "igb", "nvme")
        for value in devices(kind)
    ]
    assert len(users) == len(set(users)) == 4 + 1 + 5
    assert all(user.startswith("port.") for user in users)


def test_two_gpus_and_two_disks_lie_on_each_node() -> None:
    ports = devices("pcie-root-port")
    for node in ("node0", "node1"):
        here = [port for port in ports if port.endswith(f"bus={node}")]
        assert len([port for port in here if "port.gpu" in port]) == 2
        assert len([port for port in here if "port.data" in port]) == 2
    assert {value.split("numa_node=")[1] for value in devices("pxb-pcie")} == {"0", "1"}


def test_chassis_numbers_are_unique() -> None:
    chassis = [port.split("chassis=")[1].split(",")[0] for port in devices("pcie-root-port")]
    assert len(chassis) == len(set(chassis))


def test_disks_have_their_identities_and_one_a_subsystem() -> None:
    namespaces = devices("nvme-ns")
    assert [value.split("eui64=")[1].split(",")[0] for value in namespaces] == [
        "0x5e000000000000ff",
        "0x5e0000000000a000",
        "0x5e0000000000a001",
        "0x5e0000000000a002",
        "0x5e0000000000a003",
    ]
    assert "bootindex=0" in namespaces[0]
    assert [value for value in devices("nvme") if "subsys=" in value] == [
        "nvme,id=nvme.data3,serial=LABNVME3,bus=port.data3,subsys=subsys.data3"
    ]


def test_virtio_devices_stay_off_the_numa_bridges() -> None:
    for value in values("-device"):
        if value.startswith("virtio-") and "pci" in value:
            assert "bus=pcie.0" in value


def test_what_the_host_flushed_survives_a_power_cut() -> None:
    drives = [value for value in values("-drive") if value.startswith("if=none")]
    assert len(drives) == 5
    assert all(value.endswith("cache=writeback") for value in drives)


def test_the_gpu_stand_in_reaches_all_memory() -> None:
    assert all(value.endswith("dma_mask=0xffffffffffff") for value in devices("edu"))


def test_the_management_port_is_open_to_this_machine_only() -> None:
    assert "user,id=management,hostfwd=tcp:127.0.0.1:2222-:22" in values("-netdev")


@pytest.mark.parametrize(
    ("accel", "words", "cpu"),
    [("kvm", "kvm", "host"), ("tcg", "tcg,thread=multi", "EPYC,+svm,+x2apic")],
)
def test_the_processor_follows_the_accelerator(accel: str, words: str, cpu: str) -> None:
    assert values("-cpu", accel) == [cpu]
    assert values("-accel", accel) == [words]
