"""Refusals of approval, each with its own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from reconciler.model import approval, discovery
from reconciler.model.bundle import Bundle, run_bundle
from reconciler.model.errors import Problem

Document = dict[str, Any]
DISK = "/dev/disk/by-id/nvme-eui.5e0000000000a000"


def refusal(bundle: Bundle, document: Document, *others: Bundle) -> str:
    with pytest.raises(Problem) as caught:
        approval.refuse(bundle, document, others)
    problem = caught.value
    assert problem.status == 422
    assert all(problem.document()[key] for key in ("code", "expected", "found", "remedy"))
    return problem.code


def with_disk(document: Document, path: str) -> Bundle:
    disk = discovery.disk(document, path)
    assert disk is not None
    first = Bundle.of(document["candidates"][0]["bundle"])
    return replace(
        first,
        nvme_device=path,
        nvme_serial=disk["serial"],
        nvme_eui=disk["eui"],
        nvme_size_bytes=disk["size_bytes"],
    )


@pytest.mark.covers("CTRL-3")
def test_accepts_a_free_candidate(bundle: Bundle, document: Document) -> None:
    approval.refuse(bundle, document)


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize("field", ["gpu_pci_address", "nvme_device", "management_mac"])
def test_incomplete(bundle: Bundle, document: Document, field: str) -> None:
    assert refusal(replace(bundle, **{field: ""}), document) == "bundle_incomplete"


@pytest.mark.covers("CTRL-3")
def test_os_disk_by_every_alias(recorded: Document) -> None:
    disk = next(row for row in recorded["nvme"] if row["os_disk"])
    names = [*disk["aliases"], *disk["partition_aliases"]]
    assert len(names) > 10
    for name in names:
        assert refusal(with_disk(recorded, name), recorded) == "os_disk"


@pytest.mark.covers("CTRL-3")
def test_os_disk_even_in_an_incomplete_bundle(recorded: Document) -> None:
    assert refusal(Bundle(0, nvme_device="/dev/nvme0n1"), recorded) == "os_disk"


@pytest.mark.covers("CTRL-3")
def test_mounted_share_as_recorded(recorded: Document) -> None:
    assert refusal(with_disk(recorded, DISK), recorded) == "mounted_child"


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize("code", approval.REMEDIES)
def test_every_disk_blocker_is_its_own_code(document: Document, bundle: Bundle, code: str) -> None:
    disk = discovery.disk(document, DISK)
    disk["blockers"] = [{"code": code, "detail": "as the host says"}]
    assert refusal(bundle, document) == code


@pytest.mark.covers("CTRL-3")
def test_unknown_blocker_refuses_too(document: Document, bundle: Bundle) -> None:
    disk = discovery.disk(document, DISK)
    disk["blockers"] = [{"code": "on_fire", "detail": ""}]
    assert refusal(bundle, document) == "on_fire"


Change = Callable[[Bundle], Bundle]


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("identity_mismatch", lambda b: replace(b, nvme_eui="5e0000000000dead")),
        ("identity_mismatch", lambda b: replace(b, nvme_serial="$(reboot)")),
        ("identity_mismatch", lambda b: replace(b, nvme_size_bytes=1)),
        ("disk_not_found", lambda b: replace(b, nvme_device="/dev/sda")),
        ("disk_not_by_identity", lambda b: replace(b, nvme_device="/dev/nvme3n1")),
        ("gpu_not_found", lambda b: replace(b, gpu_pci_address="0000:ff:00.0")),
        ("numa_mismatch", lambda b: replace(b, numa_node=1)),
        ("fabric_vf_not_found", lambda b: replace(b, fabric_vf_pci_address="0000:ff:00.0")),
        ("fabric_not_vf", lambda b: replace(b, fabric_vf_pci_address="0000:25:00.0")),
        ("mac_invalid", lambda b: replace(b, management_mac="53:54:00:64:00:0a")),
        ("mac_invalid", lambda b: replace(b, management_mac="not a mac")),
        ("ip_invalid", lambda b: replace(b, private_ip="10.101.0.10")),
        ("ip_invalid", lambda b: replace(b, private_ip="10.100.0.1")),
        ("ip_invalid", lambda b: replace(b, private_ip="10.100.0.255")),
        ("ip_invalid", lambda b: replace(b, private_ip="10.100.0.254")),
        ("ip_invalid", lambda b: replace(b, private_ip="{{ ip }}")),
    ],
)
def test_wrong_values(bundle: Bundle, document: Document, code: str, change: Change) -> None:
    assert refusal(change(bundle), document) == code


@pytest.mark.covers("CTRL-3")
def test_partition_of_a_free_disk(bundle: Bundle, document: Document) -> None:
    disk = discovery.disk(document, DISK)
    disk["partition_aliases"] = [f"{DISK}-part1"]
    assert refusal(replace(bundle, nvme_device=f"{DISK}-part1"), document) == "disk_is_partition"


@pytest.mark.covers("CTRL-3")
def test_gpu_with_a_live_neighbour(bundle: Bundle, document: Document) -> None:
    gpu = discovery.gpu(document, bundle.gpu_pci_address)
    gpu["blockers"] = [{"code": "group_not_viable", "detail": "0000:23:00.1 (nvidia)"}]
    assert refusal(bundle, document) == "group_not_viable"


def join(document: Document, *addresses: str) -> None:
    """Put devices into the same IOMMU group, each as free as before."""
    rows = [*document["gpu"], *discovery.functions(document)]
    for row in (row for row in rows if row["address"] in addresses):
        row["iommu_group"], row["group_members"] = "24", list(addresses)


@pytest.mark.covers("CTRL-3")
def test_a_second_gpu_of_the_group_would_go_with_the_first(
    bundle: Bundle, document: Document
) -> None:
    join(document, bundle.gpu_pci_address, "0000:24:00.0")
    assert refusal(bundle, document) == "group_shared"
    assert discovery.bundle_blockers(document, bundle, use=True)[0].code == "group_shared"


@pytest.mark.covers("CTRL-3")
def test_a_group_may_hold_the_devices_of_one_slot(bundle: Bundle, document: Document) -> None:
    join(document, bundle.gpu_pci_address, bundle.fabric_vf_pci_address)
    approval.refuse(bundle, document, [Bundle.of(document["candidates"][1]["bundle"])])


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize("field", ["gpu_pci_address", "fabric_vf_pci_address"])
def test_no_group_is_in_two_slots(bundle: Bundle, document: Document, field: str) -> None:
    other = Bundle.of(document["candidates"][1]["bundle"])
    join(document, getattr(bundle, field), other.fabric_vf_pci_address)
    approval.refuse(bundle, document)
    assert refusal(bundle, document, other) == "group_shared"


@pytest.mark.covers("CTRL-3")
def test_empty_document_refuses(bundle: Bundle) -> None:
    assert refusal(bundle, {}) == "disk_not_found"


def test_bundle_as_the_run_contract_has_it(bundle: Bundle) -> None:
    record = {**bundle.document(), "id": "s1", "fence": 3}
    assert run_bundle(record, fence=False) == {"slot_id": "s1", **bundle.document()}
    assert run_bundle({**record, "slot_id": "s2"}, fence=True)["slot_id"] == "s2"
    assert run_bundle(record, fence=True)["fence"] == 3
    assert bundle.identity == "eui.5e0000000000a000"
