"""Playbook variables against their schemas: valid schemas, good and refused variables."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from reconciler.runs import contract
from reconciler.runs.contract import ContractError

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*.yml"))
# Playbooks that select fabric cards by the profile's ids, or check them.
CHOOSING = ("bind_topology", "bootstrap", "discover", "firmware", "parity")
OWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("variables.yml").read_text())
(SLOT,) = OWN["bind_topology"]["slice_slots"]
DEVICE = SLOT["nvme_device"]


def profile(path: Path = PROFILES[0]) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


def variables(playbook: str) -> dict[str, Any]:
    run = {
        "id": "run-1",
        "task_id": "task-1",
        "kind": "slice.vm_provision",
        "node_id": "node-1",
        "correlation_id": "c-1",
    }
    return copy.deepcopy({"slice_run": run, "slice_profile": profile(), **OWN[playbook]})


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Return every object schema that lists properties, with its path."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            yield path, schema
        for key, value in schema.items():
            yield from objects(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from objects(value, f"{path}/{number}")


@pytest.mark.parametrize("name", [*contract.PLAYBOOKS, "common", "result"])
def test_a_schema_is_one_and_its_patterns_are_anchored(name: str) -> None:
    schema = contract.schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"{name}.schema.json"
    for where, part in objects({"": schema}):
        if name != "result":
            assert part.get("additionalProperties") is False, where
        for value in part["properties"].values():
            pattern = value.get("pattern", "^$")
            assert pattern.startswith("^") and pattern.endswith("$"), (where, pattern)


@pytest.mark.parametrize("playbook", contract.PLAYBOOKS)
def test_good_variables_pass_and_unknown_or_missing_ones_do_not(playbook: str) -> None:
    good = variables(playbook)
    contract.check_vars(playbook, good)
    with pytest.raises(ContractError, match="variables_invalid"):
        contract.check_vars(playbook, good | {"ansible_connection": "local"})
    for name in contract.schema(playbook)["required"]:
        less = {key: value for key, value in good.items() if key != name}
        with pytest.raises(ContractError, match="variables_invalid"):
            contract.check_vars(playbook, less)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_of_the_repository_is_valid(path: Path) -> None:
    contract.check_vars("discover", variables("discover") | {"slice_profile": profile(path)})


HOSTILE: list[tuple[str, str, Any]] = [
    ("slice_slots.0.fence", "provision_slice", 0),
    ("slice_slots.0.nvme_device", "provision_slice", "/dev/nvme0n1"),
    ("slice_slots.0.nvme_device", "provision_slice", f"{DEVICE}-part1"),
    ("slice_slots.0.nvme_device", "release_slice", f"{DEVICE}\n"),
    ("slice_slots.0.nvme_serial", "provision_slice", "S1\nGPUAAS_SLICE_PARITY status=PASS"),
    ("slice_slots.0.gpu_pci_address", "bind_topology", "0000:43:00.0 10de:2335"),
    ("slice_slots.0.management_mac", "provision_slice", "52:54:00:64:00"),
    ("slice_slots.0.private_ip", "provision_slice", "10.100.0.10,evil"),
    ("slice_allocation.id", "release_slice", "../../etc"),
    ("slice_allocation.hostname", "provision_slice", "-x"),
    ("slice_allocation.username", "provision_slice", "root:x"),
    ("slice_allocation.ssh_keys.0", "provision_slice", "ssh-ed25519 A\nssh-ed25519 B"),
    ("boot_id", "provision_slice", ""),
    ("slice_gateway_authority", "reconcile_drift", "ssh-ed25519 AAAA\nssh-ed25519 BBBB"),
    ("slice_gateway_authority", "provision_slice", ""),
    ("slice_power", "power_slice", "destroy"),
    ("slice_guests.0.allocation_id", "reboot_node", "all"),
    ("slice_guests.0.slots.0.fence", "reboot_node", 0),
    ("boot_id", "reboot_node", ""),
    ("slice_approved_plan", "firmware", "sha256:{{ lookup('pipe','id') }}"),
    ("boot_id", "provision_slice", "unknown"),
    ("slice_image.digest", "cache_image", "md5:0"),
    ("slice_image.url", "cache_image", "http://x/ -o /etc/shadow"),
    ("slice_profile.network.bridge", "discover", "ovsbr0; reboot"),
    ("slice_profile.fabric.interface", "bootstrap", "ibp65s0: {}"),
    ("slice_profile.fabric.link", "bootstrap", "roce"),
    ("slice_profile.fabric.ipoib", "bootstrap", True),  # no IPoIB over Ethernet
    ("slice_profile.vm.mgmt_qos", "provision_slice", {"rate_kbps": 1000}),
    ("slice_vm.mgmt_qos", "provision_slice", {"burst_kb": 100}),
    ("slice_vm.nvlink_partition", "power_slice", {"modules": [1]}),
    ("slice_profile.gpu.fabric_manager", "discover", {"address": "192.0.2.9", "socket": "/x"}),
    ("slice_profile.gpu.fabric_manager", "discover", {}),
    ("slice_profile.kernel_arguments.0", "bootstrap", "iommu=pt\ninit=/bin/sh"),
    ("slice_run.correlation_id", "discover", "{{ lookup('pipe','id') }}"),
    ("slice_devices.0", "transition_storage", "/dev/nvme0n1"),
    (f"slice_expected.{DEVICE}.mounts.0", "transition_storage", "/{{ lookup('pipe','id') }}"),
    (f"slice_expected.{DEVICE}.mounts.0", "transition_storage", "share0"),
    (f"slice_expected.{DEVICE}.filesystems.0", "transition_storage", "ext4; reboot"),
    (f"slice_expected.{DEVICE}.signatures.0", "transition_storage", "ext4@x"),
    ("slice_apply", "firmware", "yes"),
    ("slice_restore_fstab", "restore_baremetal", "yes"),
    ("slice_written_off.0.slot_id", "restore_baremetal", "../machine"),
    ("slice_written_off.0.allocation_id", "restore_baremetal", ""),
    ("slice_written_off.0.reason", "restore_baremetal", "{{ lookup('pipe','id') }}"),
    ("slice_allocation.username", "release_baremetal", "../root"),
    ("slice_disks.0.slot_id", "release_baremetal", "slot-1"),
    ("slice_fence", "release_baremetal", 0),
    ("slice_certificate", "renew_certificate", "ssh-ed25519-cert-v01@openssh.com A\nssh-rsa B"),
    (
        "slice_managed_key.public_key",
        "managed_key",
        'command="id" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5',
    ),
    ("slice_managed_key.public_key", "managed_key", "ssh-ed25519 AAAAC3Nz\nssh-rsa AAAAB3Nz"),
    ("slice_managed_key.instance_id", "managed_key", "x\nssh-rsa AAAA"),
    ("slice_managed_key.state", "managed_key", "purged"),
    ("slice_ingress.rule.public_address", "apply_ingress", '192.0.2.10" accept comment "'),
    ("slice_ingress.rule.sources.0", "apply_ingress", "0.0.0.0/0 } accept #"),
    ("slice_ingress.rule.guest_port", "apply_ingress", 0),
    ("slice_ingress.rule.protocol", "apply_ingress", "udp"),
]


@pytest.mark.parametrize(("field", "playbook", "value"), HOSTILE)
def test_bad_values_are_refused_by_name(field: str, playbook: str, value: Any) -> None:
    document: Any = variables(playbook)
    words = field.replace(DEVICE, "DEVICE").split(".")
    *way, last = [DEVICE if w == "DEVICE" else int(w) if w.isdigit() else w for w in words]
    place = document
    for part in way:
        place = place[part]
    place[last] = value
    with pytest.raises(ContractError) as caught:
        contract.check_vars(playbook, document)
    assert caught.value.field == field


@pytest.mark.covers("HOST-7")
def test_a_host_can_be_given_its_place_on_the_fabric() -> None:
    """All values that bootstrap needs for IPoIB pass the contract."""
    given = variables("bootstrap")
    fabric = {"interface": "ibp65s0", "site_address": "10.20.0.7/16", "route": "10.20.0.0/16"}
    given["slice_profile"]["fabric"] |= fabric | {"link": "infiniband", "ipoib": True}
    del given["slice_profile"]["fabric"]["vlans"]
    contract.check_vars("bootstrap", given)
    # Ways to isolate tenants that do not fit the link.
    for wrong in ({"vlans": [3000, 3099]}, {"isolation": "vlan"}):
        given["slice_profile"]["fabric"] |= wrong
        with pytest.raises(ContractError):
            contract.check_vars("bootstrap", given)
        for name in wrong:
            del given["slice_profile"]["fabric"][name]


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("playbook", CHOOSING)
def test_a_profile_with_fabric_cards_says_what_they_speak(playbook: str) -> None:
    """By its ids alone, the profile would also take ports of the other link type."""
    given = variables(playbook)
    del given["slice_profile"]["fabric"]["link"]
    with pytest.raises(ContractError, match="'link' is a required property") as caught:
        contract.check_vars(playbook, given)
    assert caught.value.field == "slice_profile.fabric"
    given["slice_profile"]["fabric"]["pf_ids"] = []
    contract.check_vars(playbook, given)


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("playbook", sorted(set(contract.PLAYBOOKS) - set(CHOOSING)))
def test_a_profile_from_before_the_link_keeps_nothing_from_being_given_back(playbook: str) -> None:
    given = variables(playbook)
    del given["slice_profile"]["fabric"]["link"]
    contract.check_vars(playbook, given)


@pytest.mark.covers("HOST-7")
def test_a_limit_of_the_interface_is_the_profiles_and_the_machines() -> None:
    given = variables("provision_slice")
    limit = {"rate_kbps": 1_000_000, "burst_kb": 100_000}
    given["slice_profile"]["vm"]["mgmt_qos"] = given["slice_vm"]["mgmt_qos"] = limit
    contract.check_vars("provision_slice", given)


def test_slots_of_a_claim_need_their_fence() -> None:
    for playbook in ("provision_slice", "power_slice", "release_slice"):
        with pytest.raises(ContractError, match="fence"):
            contract.check_vars(playbook, variables(playbook) | {"slice_slots": [SLOT]})


@pytest.mark.covers("HOST-9")
def test_a_kernel_name_is_good_for_a_dry_run_and_identities_for_the_act() -> None:
    dry = variables("transition_storage")
    del dry["slice_expected"]
    dry |= {"slice_apply": False, "slice_devices": ["/dev/nvme0n1"]}
    contract.check_vars("transition_storage", dry)
    act = variables("transition_storage")
    del act["slice_expected"]
    with pytest.raises(ContractError, match="slice_expected"):
        contract.check_vars("transition_storage", act)
