"""Gate: it opens only on complete, present evidence of this slot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.model import discovery, gate
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.gate import DiskProof, Failures, GateEvidence, Sighting, blockers
from reconciler.model.proof import accepts, check_gpu, check_proof, nothing_written
from reconciler.records.reports import install_id
from reconciler.runs import contract
from tests.unit.reconciler.wipes import ISOLATED

PARITY = {"checks": [ISOLATED]}
PROFILES = Path(__file__).resolve().parents[4] / "profiles"


@pytest.fixture
def evidence(bundle: Bundle, document: dict[str, Any]) -> GateEvidence:
    """Transition proof at 10, approval at 20, discovery and parity at 30."""
    return GateEvidence(
        bundle=bundle,
        approved_at=20,
        disk_generation=0,
        node_state="ready",
        node_mode="slice",
        boot_id="b1",
        install_id="i1",
        reboot_required=False,
        discovery=Sighting(30, "b1", "i1", document),
        parity=Sighting(30, "b1", "i1", PARITY | {"reset_gpus": [bundle.gpu_pci_address]}),
        proof=DiskProof(bundle.identity, 0, 10, "discard", "i1"),
    )


def codes(evidence: GateEvidence) -> list[str]:
    return [blocker.code for blocker in blockers(evidence)]


@pytest.mark.covers("CTRL-3")
def test_opens(evidence: GateEvidence) -> None:
    assert codes(evidence) == []


@pytest.mark.covers("CTRL-3", "I4", "I16")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"discovery": None}, ["discovery_missing"]),
        ({"parity": None}, ["parity_missing"]),
        ({"proof": None}, ["proof_missing"]),
        ({"proof": DiskProof("eui.other", 0, 10, "discard", "i1")}, ["proof_mismatch"]),
        ({"disk_generation": 1}, ["proof_outdated"]),
        ({"exclusive_ended_at": 11}, ["proof_outdated"]),
        ({"restored_at": 11}, ["proof_outdated"]),
        ({"boot_id": "b2"}, ["discovery_stale", "parity_stale"]),
        ({"install_id": "i2"}, ["proof_stale", "discovery_stale", "parity_stale"]),
        ({"approved_at": 31}, ["discovery_stale", "parity_stale"]),
        ({"boot_id": ""}, ["discovery_stale", "parity_stale"]),
        ({"reboot_required": True}, ["reboot_required"]),
        ({"reinstall_required": True}, ["reinstall_required"]),
        ({"firmware": "firmware_changed"}, ["firmware_changed"]),
        ({"firmware": "firmware_unverified"}, ["firmware_unverified"]),
        ({"node_mode": "baremetal"}, ["node_not_slice"]),
        ({"node_state": "bootstrapping"}, ["node_not_ready"]),
        (
            {"parity": Sighting(30, "b1", "i1", PARITY, failures=2)},
            ["parity_failed", "gpu_unproven"],
        ),
        ({"wipe_policy": "purge"}, ["proof_class_refused"]),
        ({"wipe_policy": "whatever"}, ["proof_class_refused"]),
    ],
)
def test_closed(evidence: GateEvidence, change: dict[str, Any], expected: list[str]) -> None:
    assert codes(replace(evidence, **change)) == expected


@pytest.mark.covers("SLICE-9")
@pytest.mark.parametrize(
    ("checks", "found"),
    [
        ([], "no such check in the parity report"),
        (None, "no such check in the parity report"),
        ([{"check": "fabric_vfs", "status": "PASS"}], "no such check in the parity report"),
        ([{"check": "fabric_isolation", "status": "FAIL", "detail": "VLAN 0"}], "found VLAN 0"),
        ([{"check": "fabric_isolation", "status": "WARN", "detail": "VLAN 0"}], "found VLAN 0"),
        (
            [{"check": "fabric_isolation", "status": "PASS", "detail": "not_applicable"}],
            "found not_applicable",
        ),
    ],
)
def test_a_fabric_without_isolation_is_not_sold(
    evidence: GateEvidence, checks: Any, found: str
) -> None:
    gpus = {"reset_gpus": [evidence.bundle.gpu_pci_address]}
    parity = Sighting(30, "b1", "i1", {"checks": checks, **gpus})
    (blocker,) = blockers(replace(evidence, parity=parity))
    assert blocker.code == "fabric_not_isolated"
    for text in ("expected 0000:", found, "fabric.isolation single_tenant"):
        assert text in blocker.detail


@pytest.mark.covers("CTRL-3", "I4")
@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        (Failures(1, 29, "not_clean"), []),
        (Failures(1, 31, "not_clean"), ["launch_failed"]),
        (Failures(2, 29, "not_clean"), ["launches_failed"]),
    ],
)
def test_a_launch_that_failed_on_the_host_closes_until_it_was_looked_at(
    evidence: GateEvidence, failures: Failures, expected: list[str]
) -> None:
    assert codes(replace(evidence, failures=failures)) == expected
    blind = codes(replace(evidence, failures=failures, parity=None))
    assert blind[-1] == "parity_missing" and blind[0].startswith("launch")


@pytest.mark.covers("CTRL-3")
def test_only_failures_of_others_leave_the_slot_on_sale() -> None:
    for code in (
        "canceled",
        "image_digest_mismatch",
        "image_unreachable",
        "awx_untrusted",
        "variables_invalid",
    ):
        assert not gate.fails_on_host(code), code
    for code in ("not_clean", "disk_dirty", "image_no_room", "step_failed", "", "profile_unknown"):
        assert gate.fails_on_host(code), code


@pytest.mark.covers("CTRL-3")
def test_incomplete_bundle(evidence: GateEvidence) -> None:
    bundle = replace(evidence.bundle, management_mac="")
    assert codes(replace(evidence, bundle=bundle)) == ["bundle_incomplete"]


@pytest.mark.covers("CTRL-3")
def test_discovery_blocker_of_the_node_and_of_the_slot(
    evidence: GateEvidence, document: dict[str, Any]
) -> None:
    document["candidate_summary"]["blockers"] = ["missing_nat"]
    document["reboot_required"] = True
    gpu = discovery.gpu(document, evidence.bundle.gpu_pci_address)
    gpu["blockers"] = [{"code": "group_not_viable", "detail": "x"}]
    assert codes(evidence) == [
        "discovery:missing_nat",
        "discovery:group_not_viable",
        "discovery:reboot_required",
    ]


@pytest.mark.covers("CTRL-3")
def test_another_slots_mounted_disk_closes_nothing(evidence: GateEvidence) -> None:
    assert any(row["mounts"] for row in evidence.discovery.document["nvme"])
    assert codes(evidence) == []


@pytest.mark.covers("CTRL-3", "I4")
def test_use_of_the_disk_counts_until_a_later_wipe(
    evidence: GateEvidence, document: dict[str, Any]
) -> None:
    disk = discovery.disk_by_identity(document, evidence.bundle.identity)
    disk["blockers"] = [{"code": "qemu_in_use", "detail": "pid 7"}]
    assert codes(evidence) == ["discovery:qemu_in_use"]
    gpu = evidence.bundle.gpu_pci_address
    wiped = DiskProof(evidence.bundle.identity, 0, 40, "zero_fill", "i1", gpu)
    assert codes(replace(evidence, proof=wiped)) == []
    disk["blockers"] = [{"code": "duplicate_identity", "detail": ""}]
    assert codes(replace(evidence, proof=wiped)) == ["discovery:duplicate_identity"]


@pytest.mark.covers("I18")
def test_the_newer_of_parity_and_proof_tells_whether_the_gpu_was_reset(
    evidence: GateEvidence,
) -> None:
    gpu = evidence.bundle.gpu_pci_address
    parity = Sighting(30, "b1", "i1", PARITY | {"reset_gpus": ["0000:99:00.0"]})
    used = replace(evidence, parity=parity)
    assert codes(used) == ["gpu_unproven"]
    wiped = DiskProof(evidence.bundle.identity, 0, 40, "zero_fill", "i1", gpu)
    assert codes(replace(used, proof=wiped)) == []
    assert codes(replace(used, proof=replace(wiped, gpu="0000:99:00.0"))) == ["gpu_unproven"]
    # Used since: the later report does not list it any more.
    assert codes(replace(used, proof=replace(wiped, recorded_at=29))) == ["gpu_unproven"]
    dead = PARITY | {"dead_gpus": [gpu], "reset_gpus": [gpu]}
    assert codes(replace(evidence, parity=replace(parity, document=dead))) == ["gpu_dead"]


def test_a_slot_whose_disk_or_function_is_lost_is_closed_and_no_other(
    evidence: GateEvidence,
) -> None:
    assert evidence.parity is not None
    for lost, expected in (
        (evidence.bundle.nvme_device, ["device_missing"]),
        (evidence.bundle.fabric_vf_pci_address, ["device_missing"]),
        ("/dev/disk/by-id/nvme-eui.another", []),
    ):
        document = {**evidence.parity.document, "missing_devices": [lost]}
        parity = replace(evidence.parity, document=document)
        assert codes(replace(evidence, parity=parity)) == expected


LINK = {"speed": "32.0 GT/s PCIe", "width": "16"}
RESET = {"address": "0000:43:00.0", "verified": True, "link": LINK}


@pytest.mark.covers("I18")
@pytest.mark.parametrize(
    ("evidence", "code"),
    [
        (RESET, ""),
        ({**RESET, "link": {"speed": "64.0 GT/s PCIe", "width": "16"}}, ""),
        (None, "gpu_unproven"),
        ([RESET], "gpu_unproven"),
        ({**RESET, "verified": "true"}, "gpu_unproven"),
        ({**RESET, "address": "0000:44:00.0"}, "gpu_unproven"),
        ({**RESET, "link": {**LINK, "width": "8"}}, "gpu_link_degraded"),
        ({**RESET, "link": {**LINK, "speed": "2.5 GT/s PCIe"}}, "gpu_link_degraded"),
        ({**RESET, "link": {**LINK, "speed": "1e999"}}, "gpu_link_degraded"),
        ({**RESET, "link": 5}, "gpu_link_degraded"),
    ],
)
def test_reset_of_a_gpu_refused(evidence: object, code: str) -> None:
    if not code:
        check_gpu(evidence, address="0000:43:00.0", link=LINK)
        return
    with pytest.raises(Problem) as caught:
        check_gpu(evidence, address="0000:43:00.0", link=LINK)
    assert caught.value.code == code
    assert all((caught.value.expected, caught.value.found, caught.value.remedy))


@pytest.mark.covers("CTRL-3")
def test_as_recorded_before_bootstrap(evidence: GateEvidence, recorded: dict[str, Any]) -> None:
    closed = codes(replace(evidence, discovery=Sighting(30, "b1", "i1", recorded)))
    assert "discovery:missing_ovsbr0" in closed
    assert "discovery:mounted_child" in closed
    assert "discovery:fabric_vf_not_found" in closed


def test_install_id_ignores_the_comment_of_the_key() -> None:
    assert install_id("m", "ssh-ed25519 AAAA root@a") == install_id("m", "ssh-ed25519 AAAA")
    assert install_id("m", "ssh-ed25519 AAAA") != install_id("m", "ssh-ed25519 BBBB")
    assert install_id("", "ssh-ed25519 AAAA") == ""


PROOF = {"disk": "eui.1", "serial": "S", "size_bytes": 5, "method": "zero_fill", "verified": True}


def test_proof_for_the_disk() -> None:
    check_proof(PROOF, identity="eui.1", serial="S", size_bytes=5)


@pytest.mark.covers("I4")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"disk": "eui.2"}, "proof_mismatch"),
        ({"disk": ""}, "proof_mismatch"),
        ({"serial": "T"}, "proof_mismatch"),
        ({"size_bytes": 4}, "proof_mismatch"),
        ({"verified": False}, "proof_unverified"),
        ({"verified": "true"}, "proof_unverified"),
        ({"method": ""}, "proof_class_refused"),
        ({"method": "magnet", "class": "purge"}, "proof_class_refused"),
    ],
)
def test_proof_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(Problem, match=code):
        check_proof({**PROOF, **change}, identity="eui.1", serial="S", size_bytes=5)


@pytest.mark.covers("I4")
@pytest.mark.parametrize(
    ("policy", "counted"),
    [
        ("clear", {"crypto_erase", "user_data_erase", "discard", "zero_fill"}),
        ("blkdiscard", {"crypto_erase", "user_data_erase", "discard", "zero_fill"}),
        ("purge", {"crypto_erase", "user_data_erase"}),
        ("unheard of", set()),
    ],
)
def test_a_policy_counts_its_class_and_better(policy: str, counted: set[str]) -> None:
    methods = contract.schema("common")["$defs"]["wipe_methods"]["items"]["enum"]
    assert {method for method in methods if accepts(policy, method)} == counted


@pytest.mark.covers("I4")
def test_what_the_class_calls_itself_decides_nothing() -> None:
    proof = {**PROOF, "method": "zero_fill", "class": "purge"}
    with pytest.raises(Problem, match="proof_class_refused"):
        check_proof(proof, identity="eui.1", policy="purge")


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yml")), ids=lambda path: path.stem)
def test_a_profile_accepts_what_it_wipes_with(path: Path) -> None:
    """Otherwise a host would wipe for hours with a method after which nothing may be sold."""
    profile = yaml.safe_load(path.read_text())
    refused = [
        name for name in profile["wipe_methods"] if not accepts(profile["wipe_policy"], name)
    ]
    assert refused == []


@pytest.mark.covers("I4")
def test_an_untouched_disk_is_as_clean_as_it_was_sold(evidence: GateEvidence) -> None:
    untouched = DiskProof(evidence.bundle.identity, 0, 10, None, "i1")
    assert codes(replace(evidence, proof=untouched, wipe_policy="purge")) == []


@pytest.mark.covers("I13")
def test_untouched_must_be_said_outright() -> None:
    assert nothing_written({"disk_written": False, "leftovers": False})
    assert not nothing_written({"disk_written": False})
    assert not nothing_written({})
