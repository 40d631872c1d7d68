"""Approval through the API: all or none, and a stable code for each bad bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.db import journal
from reconciler.db.engine import transaction
from reconciler.db.schema import Slot
from reconciler.lifecycle import host, slices
from reconciler.profiles import hardware_profile
from reconciler.records import proofs
from reconciler.records import slots as slot_records
from reconciler.settings import Settings
from tests.unit.reconciler import relay
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, bundle, discovery
from tests.unit.reconciler.api.test_paging import pages

PATH = f"admin/nodes/{NODE}/resource-slots"
OS_DISK = "/dev/disk/by-id/nvme-eui.5e000000000000ff"


def approve(stack: Stack, *bundles: dict[str, Any]) -> Any:
    body = {"slots": bundles, "reason": "test"}
    return stack.client("admin").post(PATH, json=body)


@pytest.mark.covers("CTRL-3")
def test_approved_slots_stay_disabled(prepared: Stack) -> None:
    answer = approve(prepared, bundle(1), bundle(3))
    assert answer.status_code == 201, answer.text
    slots = answer.json()["items"]
    assert [slot["status"] for slot in slots] == ["disabled", "disabled"]
    assert [slot["slot_index"] for slot in slots] == [1, 3]
    policies = {slot["capacity_metadata"]["destructive_wipe_policy"] for slot in slots}
    assert policies == {hardware_profile(Settings().profiles_dir, "lab")["wipe_policy"]}
    admin = prepared.client("admin")
    assert [row["last_proof"] for row in admin.get(PATH).json()["items"]] == [None, None]

    shown = admin.get(f"{PATH}/{slots[0]['id']}").json()
    assert {"proof_missing", "parity_missing"} <= {row["code"] for row in shown["gate"]}
    assert [row["event"] for row in shown["history"]] == ["create"]
    assert shown["history"][0]["actor"].startswith("admin:admin#")
    assert shown["proofs"] == []


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize(
    ("index", "change", "code"),
    [
        (1, {"nvme_device": OS_DISK}, "os_disk"),
        (1, {"nvme_device": "/dev/nvme0n1"}, "os_disk"),
        (1, {"nvme_device": "/dev/nvme0n1p2"}, "os_disk"),
        (0, {}, "mounted_child"),
        (1, {"nvme_device": "/dev/nvme2n1"}, "disk_not_by_identity"),
        (1, {"nvme_device": "/dev/disk/by-id/nvme-eui.0000000000000000"}, "disk_not_found"),
        (1, {"nvme_eui": "5e0000000000a003"}, "identity_mismatch"),
        (1, {"nvme_serial": "$(reboot)"}, "identity_mismatch"),
        (1, {"nvme_size_bytes": 1}, "identity_mismatch"),
        (1, {"gpu_pci_address": "0000:99:00.0"}, "gpu_not_found"),
        (1, {"numa_node": 1}, "numa_mismatch"),
        (1, {"fabric_vf_pci_address": "0000:25:00.0"}, "fabric_not_vf"),
        (1, {"fabric_vf_pci_address": ""}, "bundle_incomplete"),
        (1, {"management_mac": "01:00:5e:00:00:01"}, "mac_invalid"),
        (1, {"private_ip": "10.100.0.1"}, "ip_invalid"),
        (1, {"private_ip": "{{ x }}"}, "ip_invalid"),
        (1, {"gpu_pci_address": "a\nb"}, "request_invalid"),
        (1, {"fence": 7}, "request_invalid"),
    ],
)
def test_bad_bundles(prepared: Stack, index: int, change: dict[str, Any], code: str) -> None:
    document = refused(prepared, lambda: approve(prepared, bundle(3), bundle(index) | change))
    assert (document["status"], document["code"]) == (422, code), document
    if code != "request_invalid":
        assert document["slot_index"] == index


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize(
    ("part", "code"),
    [
        *(("nvme", code) for code in ("swap_in_use", "lvm_member", "md_member")),
        ("nvme", "unexpected_filesystem"),
        ("gpu", "group_not_viable"),
    ],
)
def test_a_device_in_use(prepared: Stack, part: str, code: str) -> None:
    document, slot = discovery(), bundle(1)
    names = {slot["nvme_device"], slot["gpu_pci_address"]}
    (device,) = (row for row in document[part] if names & {row.get("by_id"), row.get("address")})
    device["blockers"] = [{"code": code, "detail": "nvme2n1"}]
    _rediscover(prepared, document)
    assert refused(prepared, lambda: approve(prepared, bundle(1)))["code"] == code


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("slot_index", "duplicate_slot_index"),
        ("gpu_pci_address", "duplicate_gpu"),
        ("fabric_vf_pci_address", "duplicate_fabric_vf"),
        ("management_mac", "duplicate_mac"),
        ("private_ip", "duplicate_ip"),
    ],
)
def test_nothing_is_in_two_slots(prepared: Stack, field: str, code: str) -> None:
    first = bundle(1)
    second = bundle(3) | {field: first[field]}
    if field == "gpu_pci_address":
        second["numa_node"] = first["numa_node"]
    problem = refused(prepared, lambda: approve(prepared, first, second))
    assert (problem["status"], problem["code"]) == (409, code)


@pytest.mark.covers("CTRL-3")
def test_no_disk_is_in_two_slots(prepared: Stack) -> None:
    first = bundle(1)
    disk = {name: first[name] for name in first if name.startswith("nvme_")}
    problem = refused(prepared, lambda: approve(prepared, first, bundle(3) | disk))
    assert (problem["status"], problem["code"]) == (409, "duplicate_disk")
    # Nor is it in a second slot of a later request.
    assert approve(prepared, first).status_code == 201
    problem = refused(prepared, lambda: approve(prepared, bundle(3) | disk))
    assert (problem["status"], problem["code"]) == (409, "duplicate_disk")


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize(
    ("vm", "code"),
    [
        ({}, ""),
        ({"vcpus_per_gpu": 2}, "numa_cpus_exceeded"),
        ({"host_cpus": 1}, "numa_cpus_exceeded"),
        ({"memory_mib_per_gpu": 4096}, "numa_memory_exceeded"),
        ({"host_memory_mib": 2500}, "numa_memory_exceeded"),
        ({"hugepages": True, "memory_mib_per_gpu": 1024}, "numa_hugepages_exceeded"),
    ],
)
def test_a_slot_beyond_its_numa_node_is_refused(
    prepared: Stack, tmp_path: Path, vm: dict[str, Any], code: str
) -> None:
    profile = hardware_profile(Settings().profiles_dir, "lab")
    (tmp_path / "lab.yml").write_text(yaml.safe_dump({**profile, "vm": {**profile["vm"], **vm}}))
    settings = prepared.settings.model_copy(update={"profiles_dir": tmp_path})
    stack = Stack(settings, prepared.engine, prepared.secrets)
    if not code:
        assert approve(stack, bundle(1)).status_code == 201
        return
    problem = refused(stack, lambda: approve(stack, bundle(1)))
    assert (problem["status"], problem["code"], problem["slot_index"]) == (422, code, 1)
    assert "NUMA node 0" in problem["expected"]


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize(("cpus", "fits"), [("0-5", True), ("0-4", False)])
def test_slots_share_no_core_with_each_other_nor_with_the_host(
    prepared: Stack, tmp_path: Path, cpus: str, fits: bool
) -> None:
    """Two slots with one CPU each, and one CPU for the host: three cores of two threads."""
    profile = hardware_profile(Settings().profiles_dir, "lab")
    vm = {**profile["vm"], "host_cpus": 1}
    (tmp_path / "lab.yml").write_text(yaml.safe_dump({**profile, "vm": vm}))
    settings = prepared.settings.model_copy(update={"profiles_dir": tmp_path})
    stack = Stack(settings, prepared.engine, prepared.secrets)
    document = discovery()
    for disk in document["nvme"]:
        disk["blockers"] = []
    for row in document["host"]["numa"]:
        row |= {"cpus": cpus, "threads_per_core": 2, "memory_mib": 65536}
    _rediscover(stack, document)
    if fits:
        assert approve(stack, bundle(1), bundle(0)).status_code == 201
        return
    problem = refused(stack, lambda: approve(stack, bundle(1), bundle(0)))
    assert problem["code"] == "numa_cpus_exceeded"
    assert problem["expected"].endswith("in whole cores of 2 CPUs")


@pytest.mark.covers("CTRL-3")
def test_slots_of_one_numa_node_are_counted_together(prepared: Stack) -> None:
    """A node of the lab host has one CPU; the other slots are on the other node."""
    document = discovery()
    for disk in document["nvme"]:
        disk["blockers"] = []
    _rediscover(prepared, document)
    problem = refused(prepared, lambda: approve(prepared, bundle(3), bundle(1), bundle(0)))
    assert (problem["code"], problem["slot_index"]) == ("numa_cpus_exceeded", 0)
    assert problem["expected"] == "2 CPUs for 2 slots on NUMA node 0, and 0 for the host"
    # All or none.
    assert prepared.client("admin").get(PATH).json()["items"] == []
    assert approve(prepared, bundle(3), bundle(1)).status_code == 201


@pytest.mark.covers("CTRL-3")
def test_an_approval_needs_a_reason_and_a_discovery(new: Stack) -> None:
    admin = new.client("admin")
    silent = admin.post(PATH, json={"slots": [bundle(1)], "reason": " "})
    assert silent.json()["code"] == "request_invalid"
    assert approve(new, bundle(1)).json()["code"] == "discovery_missing"
    assert admin.post(PATH, json={"slots": [], "reason": "x"}).json()["code"] == "request_invalid"


@pytest.mark.covers("CTRL-3", "CTRL-6")
def test_disable_enable_withdraw(selling: Stack) -> None:
    admin = selling.client("admin")
    slot = admin.get(PATH).json()["items"][0]
    at = f"{PATH}/{slot['id']}"
    assert slot["status"] == "available"
    assert slot["last_proof"]["kind"] == "transition"
    assert admin.post(f"{at}/withdraw").json()["code"] == "slot_in_use"
    assert admin.post(f"{at}/disable", json={"reason": "fan"}).json()["status"] == "disabled"
    assert admin.post(f"{at}/enable").json()["status"] == "available"
    assert admin.post(f"{at}/repair").json()["code"] == "slot_not_blocked"
    assert admin.post(f"{at}/destroy").json()["code"] == "request_invalid"
    admin.post(f"{at}/disable")
    assert admin.post(f"{at}/withdraw").status_code == 200
    assert len(admin.get(PATH).json()["items"]) == 1
    reasons = [row["reason"] for row in admin.get(at).json()["history"]]
    assert "fan" in reasons


@pytest.mark.covers("CTRL-6", "I20")
def test_who_gives_no_reason_is_named(selling: Stack) -> None:
    admin, nobody = selling.client("admin"), "no reason given by admin:admin"
    slot = admin.get(PATH).json()["items"][0]["id"]
    for act in ("disable", "enable", "disable", "withdraw"):
        answer = admin.post(f"{PATH}/{slot}/{act}")
        assert answer.status_code == 200, answer.text
        changed = answer.json()["status_reason"]
        assert changed == ("gate passed" if act == "enable" else nobody)
    off = {"enabled": False}
    assert admin.put(f"admin/nodes/{NODE}/scheduling", json=off).status_code == 200
    assert admin.put("admin/settings/slice-scheduling", json=off).status_code == 200
    assert admin.post(f"admin/nodes/{NODE}/drain", json={"reason": "why"}).status_code == 200
    audited = admin.get("admin/audit", params={"limit": 7}).json()["items"]
    assert [row["reason"] for row in audited] == ["why", *[nobody] * 6]
    with transaction(selling.engine) as conn:
        changes = journal.history_of(conn, "slot", slot)
        payloads = [
            event.payload
            for event in relay.pending_events(conn)
            if event.topic == "slot.disabled" and event.subject_id == slot
        ]
    assert [row.reason for row in changes][-3:] == [nobody, "gate passed", nobody]
    assert [payload["reason"] for payload in payloads][-2:] == [nobody, nobody]


@pytest.mark.covers("CTRL-7")
def test_a_machine_that_no_record_knows_goes_on_an_admins_word(selling: Stack) -> None:
    admin = selling.client("admin")
    at = f"{PATH}/{admin.get(PATH).json()['items'][0]['id']}"
    body = {"allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d", "reason": "restored"}
    for wrong in ({"allocation_id": "x; reboot"}, {"reason": " "}):
        answer = admin.post(f"{at}/remove-orphan", json=body | wrong)
        assert answer.json()["code"] == "request_invalid"
    assert admin.post(f"{at}/remove-orphan", json=body).json()["code"] == "slot_in_use"
    admin.post(f"{at}/disable")
    answer = admin.post(f"{at}/remove-orphan", json=body)
    assert (answer.status_code, answer.json()["kind"]) == (202, "slice.wipe")
    assert answer.json()["parameters"]["allocation"] == {"id": body["allocation_id"]}
    slot = admin.get(at).json()
    assert (slot["status"], slot["health_detail"]["step"]) == ("cleanup", "remove_orphan")
    # Blocked for want of evidence, it is written off only where a device of it has died.
    with transaction(selling.engine) as conn:
        record = slot_records.get(conn, slot["id"])
        slices.block(conn, record, "", ACT, step="nvme_wipe", error={"code": "device_not_found"})
    why = {"reason": "the disk is dead"}
    assert admin.post(f"{at}/withdraw", json=why).json()["code"] == "slot_in_use"
    document = discovery()
    document["nvme"] = [
        disk for disk in document["nvme"] if disk["identity"] != slot["nvme_identity"]
    ]
    _rediscover(selling, document)
    assert admin.post(f"{at}/withdraw").json()["code"] == "reason_required"
    assert admin.post(f"{at}/withdraw", json=why).status_code == 200
    assert slot["id"] not in {row["id"] for row in admin.get(PATH).json()["items"]}


def test_a_slot_is_found_only_under_its_node(selling: Stack) -> None:
    admin = selling.client("admin")
    slot = admin.get(PATH).json()["items"][0]["id"]
    body = {"id": "n2", "address": "192.0.2.8", "profile": "lab"}
    assert admin.post("admin/nodes", json=body).status_code == 201
    for answer in (
        *(
            admin.get(f"admin/nodes/n2/resource-slots/{slot}{part}")
            for part in ("", "/history", "/proofs")
        ),
        admin.post(f"admin/nodes/n2/resource-slots/{slot}/disable"),
        admin.get(f"{PATH}/none"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, "slot_not_found")
    assert admin.get("admin/nodes/none/resource-slots").json()["code"] == "node_not_found"
    assert admin.get("admin/nodes/n2/resource-slots").json()["items"] == []


@pytest.mark.covers("CTRL-1")
def test_a_slot_is_shown_with_the_newest_of_lists_that_only_grow(prepared: Stack) -> None:
    slot = approve(prepared, bundle(1)).json()["items"][0]["id"]
    admin, at = prepared.client("admin"), f"{PATH}/{slot}"
    few = admin.get(at).json()
    assert (few["history_next"], few["proofs_next"]) == (None, None)
    grow(prepared, slot, proven=23, changes=24)
    shown = admin.get(at).json()
    assert (len(shown["history"]), len(shown["proofs"])) == (20, 20)
    for name, newest in (("history", shown["history"][::-1]), ("proofs", shown["proofs"])):
        ids = [row["id"] for page in pages(admin, f"{at}/{name}", limit=7) for row in page]
        whole = admin.get(f"{at}/{name}").json()["items"]
        assert ids == [row["id"] for row in whole]
        assert len(ids) == len(set(ids)) == {"history": 25, "proofs": 23}[name]
        assert whole[:20] == newest
        older = admin.get(f"{at}/{name}", params={"cursor": shown[f"{name}_next"]}).json()
        assert (older["items"], older["next"]) == (whole[20:], None)
    assert shown["history"][-1]["generation"] == shown["generation"]
    assert admin.get(f"{PATH}/none/history").json()["code"] == "slot_not_found"
    wrong = admin.get(f"{at}/history", params={"cursor": shown["proofs_next"]})
    assert wrong.json()["code"] == "cursor_invalid"


def grow(stack: Stack, slot_id: str, *, proven: int, changes: int) -> None:
    """The past of a slot that was taken over, blocked and taken back again and again."""
    proof = {"disk": f"eui.{bundle(1)['nvme_eui']}", "verified": True, "method": "discard"}
    with transaction(stack.engine) as conn:
        for _ in range(proven):
            proofs.record_transition(conn, NODE, proof, ACT)
        for _ in range(changes // 2):
            slot = slot_records.get(conn, slot_id)
            slices.block(conn, slot, "", ACT, step="test", error={"code": "test"})
            journal.advance(conn, Slot, slot_id, "park", ACT)


def _rediscover(stack: Stack, document: dict[str, Any]) -> None:
    with transaction(stack.engine) as conn:
        host.record_discovery(conn, NODE, document, ACT)
