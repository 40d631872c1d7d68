"""Task kinds for slices: provision, release, wipe, absence, drift, power, ingress; managed keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from reconciler.db import locks, rows
from reconciler.db import settings as site
from reconciler.db.schema import IngressRule, Pool
from reconciler.lifecycle import (
    app_operations,
    drift,
    guest_pool,
    guest_terminal,
    ingress,
    power,
    slice_telemetry,
    slices,
)
from reconciler.lifecycle.host import BOOT_CHANGED
from reconciler.lifecycle.task_failures import unfenced_slots
from reconciler.model import fabric, hardware
from reconciler.model.errors import Problem
from reconciler.model.fabric import Isolation
from reconciler.model.states import AllocationState, PowerAction, TaskKind
from reconciler.pools import remote
from reconciler.records import claims, images, queue, reports, segments
from reconciler.records import slots as slot_records
from reconciler.runs.paths import run_secret
from reconciler.trust.ca import GATEWAY, gateway_ca, open_trust
from reconciler.trust.downloads import url as download_url
from reconciler.work import partitions
from reconciler.work.handler import Handler, Work, canceled

# What a slice keeps from its launch (`Allocation.machine`).
_LASTING = ("vcpus", "memory_mib", "firmware")
_KEPT = "/etc/cloud/cloud.cfg.d/99-gpuaas-seed.cfg"
_NVLINK = "/etc/modprobe.d/gpuaas-nvlink.conf"
_WITHOUT_NVLINK = "options nvidia NVreg_NvLinkDisable=1\n"


def seed_documents(
    allocation: dict[str, Any],
    management_mac: str,
    *,
    without_nvlink: bool = False,
    further: Sequence[dict[str, str]] = (),
    commands: Sequence[list[str]] = (),
) -> dict[str, Any]:
    """Cloud-init documents user_data, meta_data and network_config, which the host renders.

    without_nvlink: the GPUs are joined by NVSwitches that the guest may not use. CUDA does not
    start while its driver waits for them. further: files of `guest_terminal` and `guest_pool`.
    commands: of the first boot.
    """
    user = {
        "name": allocation["username"],
        "shell": "/bin/bash",
        "sudo": "ALL=(ALL) NOPASSWD:ALL",
        "lock_passwd": True,
        "ssh_authorized_keys": list(allocation["ssh_keys"]),
    }
    return {
        "user_data": {
            "hostname": allocation["hostname"],
            "users": [user],
            "disable_root": True,
            "ssh_pwauth": False,
            # The seed is destroyed once the guest is ready. Later boots use what cloud-init has
            # kept, so that they do not look like a new instance with new host keys.
            "write_files": [
                {"path": _KEPT, "content": "manual_cache_clean: true\n"},
                *([{"path": _NVLINK, "content": _WITHOUT_NVLINK}] if without_nvlink else []),
                *further,
            ],
            **({"runcmd": list(commands)} if commands else {}),
        },
        "meta_data": {"instance-id": allocation["id"], "local-hostname": allocation["hostname"]},
        "network_config": {
            "version": 2,
            "ethernets": {
                # The fabric function has a different MAC, so it stays out of the management plane.
                "management": {"match": {"macaddress": management_mac}, "dhcp4": True}
            },
        },
    }


def image_document(work: Work, image: dict[str, Any]) -> dict[str, Any]:
    """Name, version, digest and size of the raw image, with its download URL for the host."""
    return {
        "name": image["name"],
        "version": image["version"],
        "digest": image["digest"],
        "size_bytes": image["size_bytes"],
        "url": download_url(
            work.settings, image, images.link_key(work.conn), work.task.started_at or 0.0
        ),
        "compression": image["compression"],
    }


def provision_begin(work: Work) -> None:
    """Set the slice to provisioning, and record what it keeps of its machine."""
    shape = _kept_shape(work)
    set_provisioning(work, {name: shape[name] for name in _LASTING})


def set_provisioning(work: Work, machine: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Set the task's allocation to provisioning; Problem `canceled` when it has ended."""
    key = work.allocation_id
    act = work.act.because("provisioning started")
    if slices.provision_started(work.conn, key, act, machine=machine):
        return
    state = work.allocation().state
    # Already provisioning: this run continues after a run that failed or never reached its host.
    if state != AllocationState.PROVISIONING:
        raise canceled(f"allocation {key} requested, or being provisioned", str(state))


def require_proven_boot(work: Work) -> None:
    """Refuse a known change of boot without a run. The host checks the boot id as well."""
    # Tasks queued by versions without this parameter have no proven boot.
    proven, current = work.parameters.get("boot_id", ""), work.node.boot_id
    if not proven or current != proven:
        raise Problem(
            BOOT_CHANGED,
            expected=f"node {work.node.id} under boot {proven}, for which its gate was proven",
            found=f"boot {current or 'unknown'}",
            remedy="discover the node and run its parity, then launch again",
        )


def provision_variables(work: Work) -> dict[str, Any]:
    allocation, slots = work.parameters["allocation"], work.parameters["slots"]
    require_proven_boot(work)
    files, commands = _workers(work)
    authority = _gateway_authority(work)
    return {
        "slice_allocation": allocation,
        "slice_slots": slots,
        "slice_image": image_document(work, work.parameters["image"]),
        "slice_vm": _kept_shape(work) | hardware.nvlink_partition(work.profile, slots),
        "slice_fabric": fabric_network(work),
        "slice_seed": {
            **seed_documents(
                allocation,
                slots[0]["management_mac"],
                without_nvlink=hardware.leaves_nvlink_alone(work.profile),
                further=[*_terminal(work, authority), *files],
                commands=commands,
            ),
            "tenant_data": work.parameters.get("tenant_data", {}),
        },
        "slice_gateway_authority": authority,
        "slice_ready_deadline": ready_deadline(work),
        "boot_id": work.parameters["boot_id"],
    }


def _gateway_authority(work: Work) -> str:
    """The authority that hosts accept for their relay account, and guests for terminals.

    It is read from the records, because another machine may have replaced the one of this process.
    """
    recorded = site.read(work.conn, site.AUTHORITIES, {})
    return str(recorded.get(GATEWAY) or gateway_ca(open_trust(work.settings.state_dir)))


def _terminal(work: Work, authority: str) -> list[dict[str, str]]:
    if not work.parameters.get("parameters", {}).get("terminal"):
        return []
    allocation, bridge = work.parameters["allocation"], work.profile["network"]["address"]
    return guest_terminal.files(allocation["id"], allocation["username"], authority, bridge)


def _workers(work: Work) -> tuple[list[dict[str, str]], list[list[str]]]:
    """Files and commands of the guest for the workers of its pool, with a token of this run."""
    pool, secret = worker_pool(work)
    if pool is None:
        return [], []
    url, names = work.settings.api_url, work.settings.api_names
    return guest_pool.files(pool, secret, url), guest_pool.commands(pool, names)


def worker_pool(work: Work) -> tuple[Pool | None, str]:
    """The pool of the allocation, if it has one, and the token that this run gives its workers."""
    secret = remote.PREFIX + run_secret(work.settings.state_dir, queue.run_id(work.task))
    return guest_pool.mint(work.conn, work.allocation_id, secret, work.act), secret


def machine_shape(
    profile: dict[str, Any], gpus: int, kept: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Shape of a VM: the profile's share of CPUs and memory per GPU, times `gpus`.

    kept: the part that is settled since the launch (`_LASTING`).
    """
    vm = profile["vm"]
    chosen = {name: vm[name] for name in ("mgmt_qos", "guest_runtime") if vm.get(name)}
    lasting = {
        "vcpus": vm["vcpus_per_gpu"] * gpus,
        "memory_mib": vm["memory_mib_per_gpu"] * gpus,
        "firmware": vm["firmware"],
        **kept,
    }
    return {
        **chosen,
        **lasting,
        "mgmt_attachment": vm.get("mgmt_attachment", "tap"),
        "host_cpus": vm.get("host_cpus", 0),
        "hugepages": vm["hugepages"],
        "nested": vm.get("nested", False),
        "qemu_arguments": vm["qemu_arguments"][lasting["firmware"]],
    }


def _kept_shape(work: Work) -> dict[str, Any]:
    """Shape of the task's VM: as it was launched, if it was, and else as the profile is now."""
    slots = work.parameters["slots"]
    return machine_shape(work.profile, len(slots), work.allocation().machine)


def fabric_network(work: Work) -> dict[str, Any]:
    """Network of the tenant on the fabric. Its number stays the project's while this task lives."""
    kind = fabric.isolation(work.profile)
    project = work.allocation().project_id
    network: dict[str, Any] = {
        "isolation": kind.value,
        "link": work.profile["fabric"].get("link") or fabric.INFINIBAND,
        "vlan": 0,
    }
    if kind is Isolation.SINGLE_TENANT:
        return network
    number = segments.assign(work.conn, project, kind, fabric.numbers(work.profile))
    if kind is Isolation.VLAN:
        network["vlan"] = number
    else:
        network["partition"] = f"0x{number:x}"
    names = slot_records.fabric_identities(work.conn, work.parameters["slots"])
    return {**network, "identities": names} if names else network


def ready_deadline(work: Work) -> int:
    """Seconds until an unreachable VM counts as failed; a launch may ask for less, not more."""
    allowed: int = work.profile["deadlines"]["ready"]
    return min(allowed, int(work.allocation().parameters.get("ready_deadline_s", allowed)))


def provision_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    host, port = work.settings.gateway
    # The history of each slot and claim keeps it for ever, and the console's text can be long.
    ready = {name: part for name, part in evidence["readiness"].items() if name != "console_tail"}
    connection = {
        "host": host,
        "port": port,
        "username": work.parameters["allocation"]["username"],
        # Read by the host over the guest's own port. Tenants get them with the allocation.
        "host_keys": evidence["readiness"].get("host_keys", []),
    }
    slices.provision_succeeded(
        work.conn,
        work.allocation_id,
        work.act.because("reachable", {"readiness": ready}),
        connection=connection,
        boot_id=work.parameters["boot_id"],
    )
    queue.forget_tenant_data(work.conn, work.task)
    return evidence


def claimed(work: Work) -> dict[str, Any]:
    """The allocation of the task, and what it has claimed."""
    return {
        "slice_allocation": {"id": work.allocation_id},
        "slice_slots": claims.bundles(work.conn, work.allocation_id),
    }


def absence_variables(work: Work) -> dict[str, Any]:
    """As `claimed`, without slots that another allocation has by now: its machine is no trace of
    this one. All of them if it has kept none, since a run needs one.
    """
    given = claimed(work)
    slots, id = given["slice_slots"], work.allocation_id
    kept = [slot for slot in slots if claims.last_holder(work.conn, slot["slot_id"]) == id]
    return {**given, "slice_slots": kept or slots}


def release_variables(work: Work) -> dict[str, Any]:
    limit = work.profile["deadlines"]["shutdown"]
    return {**claimed(work), "slice_shutdown_deadline": limit}


def release_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    slices.release_succeeded(
        work.conn,
        work.allocation_id,
        work.act.because("wiped and verified"),
        proofs=evidence["proofs"],
        absence=evidence["absence"],
    )
    return evidence


def wipe_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allocation": {"id": work.parameters["allocation"]["id"]},
        "slice_slots": work.parameters["slots"],
        # The VM has no tenant, so a graceful shutdown is not awaited.
        "slice_shutdown_deadline": 0,
    }


def wipe_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    act = work.act.because("wiped and verified")
    with locks.node(work.conn, work.task.node_id):
        proofs = {
            slot_id: evidence["proofs"].get(slot_id)
            for slot_id in unfenced_slots(work.conn, work.task)
        }
        missing = sorted(slot_id for slot_id, proof in proofs.items() if proof is None)
        if missing:
            raise Problem(
                "proof_missing",
                expected="a wipe proof of every slot of the task",
                found=f"none of {', '.join(missing)}",
                remedy="read the task's output; repair the slots again",
            )
        slices.cleanup_succeeded(
            work.conn, work.allocation_id, act, proofs=proofs, absence=evidence["absence"]
        )
    return evidence


def absence_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    reports.record_absence(
        work.conn,
        work.allocation_id,
        evidence["absence"],
        work.act.because("absence measured"),
        task_id=work.task.id,
        observed_at=work.task.started_at,
    )
    return evidence


def drift_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_slots": slot_records.bundles(work.conn, work.task.node_id),
        "slice_gateway_authority": _gateway_authority(work),
    }


def drift_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    # Use the start of the task, because it is earlier than the inspection of the host.
    since = work.task.started_at or 0.0
    refused = evidence.get("refused", {})
    slice_telemetry.record_refused(work.conn, work.task.node_id, refused, since=since)
    act = work.act.because("compared")
    return drift.reconcile(work.conn, work.task.node_id, evidence, act, since=since)


def managed_key_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allocation": work.parameters["allocation"],
        "slice_fence": work.parameters["fence"],
        "slice_managed_key": work.parameters["managed_key"],
    }


def managed_key_start(work: Work) -> None:
    """Problem `canceled`, which starts no run, if the operation is no longer wanted."""
    act = work.act.because("its run begins")
    reason = app_operations.began(work.conn, work.parameters["operation_id"], act)
    if reason:
        raise canceled("an operation that is still wanted", reason)


def managed_key_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    key = evidence["managed_key"]
    # A host that says a later time would never get the key anew.
    requested = work.parameters["managed_key"]["expires_at"]
    expires_at = float(min(key["expires_at"], requested)) if key["present"] else None
    act = work.act.because("as the host says", {"present": key["present"]})
    app_operations.succeeded(work.conn, work.parameters["operation_id"], act, expires_at=expires_at)
    return evidence


def power_begin(work: Work) -> None:
    """Problem `canceled`, which starts no run, when the allocation is not active any more."""
    if state := power.began(work.conn, work.allocation_id):
        raise canceled("an active allocation", state)


def power_variables(work: Work) -> dict[str, Any]:
    parameters, action = work.parameters, PowerAction(work.parameters["action"])
    partition: dict[str, Any] = {}
    if action != PowerAction.STOP:
        require_proven_boot(work)
        partition = hardware.nvlink_partition(work.profile, parameters["slots"])
    deadlines = work.profile["deadlines"]
    return {
        "slice_allocation": parameters["allocation"],
        "slice_slots": parameters["slots"],
        "slice_vm": _kept_shape(work) | partition,
        "slice_fabric": fabric_network(work),
        "slice_power": action.value,
        # Tasks that an earlier version queued have no number, which is older than all.
        "slice_power_fence": parameters.get("power_fence", 0),
        # A reset is for a guest that does not answer.
        "slice_shutdown_deadline": 0 if action == PowerAction.RESET else deadlines["shutdown"],
        "slice_ready_deadline": deadlines.get("start", deadlines["ready"]),
        "boot_id": parameters["boot_id"],
    }


def power_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    stopped = work.parameters["action"] == PowerAction.STOP
    boot_id = "" if stopped else work.parameters["boot_id"]
    if not power.replaced(work.conn, work.task):
        power.succeeded(work.conn, work.allocation_id, boot_id=boot_id)
    return evidence


def ingress_variables(work: Work) -> dict[str, Any]:
    rule = rows.get(work.conn, IngressRule, work.parameters["rule_id"])
    applied = {"rule": ingress.on_host(rule), "state": work.parameters["state"]}
    return {**claimed(work), "slice_ingress": applied}


def ingress_begin(work: Work) -> None:
    """Problem `canceled`, which starts no run, if the task is no longer wanted."""
    present = work.parameters["state"] == "present"
    reason = ingress.began(work.conn, work.parameters["rule_id"], present=present)
    if reason:
        raise canceled("a rule that still needs the task", reason)


def ingress_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    ingress.reported(
        work.conn,
        work.parameters["rule_id"],
        work.act.because("as the host says", evidence),
        present=work.parameters["state"] == "present",
        in_force=evidence["ingress"]["rules"],
    )
    return evidence


HANDLERS: dict[str, Handler] = {
    TaskKind.SLICE_VM_PROVISION: Handler(
        "provision_slice",
        provision_variables,
        provision_succeeded,
        provision_begin,
        deadlines=("clone", "ready"),
        arrange=partitions.join,
    ),
    TaskKind.SLICE_VM_RELEASE: Handler(
        "release_slice",
        release_variables,
        release_succeeded,
        deadlines=("shutdown",),
        wiped="slice_slots",
        arrange=partitions.leave,
    ),
    TaskKind.SLICE_WIPE: Handler(
        "release_slice",
        wipe_variables,
        wipe_succeeded,
        deadlines=("shutdown",),
        wiped="slice_slots",
        arrange=partitions.leave,
    ),
    TaskKind.SLICE_ABSENCE_VERIFY: Handler("verify_absent", absence_variables, absence_succeeded),
    # A failed comparison changes nothing: the content of the host is as unknown as before (I13).
    TaskKind.SLICE_DRIFT_RECONCILE: Handler(
        "reconcile_drift", drift_variables, drift_succeeded, arrange=partitions.look
    ),
    TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY: Handler(
        "managed_key", managed_key_variables, managed_key_succeeded, managed_key_start
    ),
    TaskKind.SLICE_VM_POWER: Handler(
        "power_slice",
        power_variables,
        power_succeeded,
        power_begin,
        deadlines=("shutdown", "ready"),
    ),
    TaskKind.SLICE_INGRESS_APPLY: Handler(
        "apply_ingress", ingress_variables, ingress_succeeded, ingress_begin
    ),
}
