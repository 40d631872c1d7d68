"""Model of a host, as far as the modules of provision, power and release change it.

The ledger is the collection's own (`_ledger.py`) over files in memory, so fences are judged by the
code that judges them on a host. The rest follows the modules' documentation: their refusals, their
changes, and no change on a second call.
"""

from __future__ import annotations

import contextlib
import copy
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

from tests.unit.reconciler import wipes

Document = dict[str, Any]
MACHINE = "machine"
NOW = "2026-01-01T00:00:00+00:00"


class Tree:
    """As much of `_host` as the ledger needs: files by name, in memory."""

    STATE_DIRECTORY = "/var/lib/gpuaas"

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self._clock = 0

    def document(self, name: str, *, code: str, remedy: str) -> Document | None:
        loaded: Document | None = json.loads(self.files.get(name, "null"))
        return loaded

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        self.files[name] = text

    def path(self, name: str) -> _Folder:
        return _Folder(self.files, name)

    def now(self) -> str:
        self._clock += 1
        return f"2026-01-01T00:00:00.{self._clock:06}+00:00"

    @contextlib.contextmanager
    def locked(self, _directory: str, *, mode: int) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class _Folder:
    files: dict[str, str]
    name: str

    def iterdir(self) -> list[PurePath]:
        return [PurePath(file) for file in self.files if file.startswith(self.name)]


def refuse(code: str, found: str = "otherwise") -> Refusal:
    """A refusal of this model; only its code matters."""
    return Refusal(code, expected="as the module wants it", found=found, remedy="see the module")


@dataclass
class Host:
    """disks: identity to whose bytes are on it, "" for none.

    running: allocation to the disks that its machine has open. off: machines that are defined only.
    """

    boot_id: str
    tree: Tree = field(default_factory=Tree)
    disks: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, Document] = field(default_factory=dict)
    clones: dict[str, tuple[str, int]] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    plans: set[str] = field(default_factory=set)
    reservations: dict[str, str] = field(default_factory=dict)
    seeds: set[str] = field(default_factory=set)
    vlans: dict[str, int] = field(default_factory=dict)
    running: dict[str, tuple[str, ...]] = field(default_factory=dict)
    off: set[str] = field(default_factory=set)
    accounts: set[str] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)
    baselines: set[str] = field(default_factory=set)
    forwards: dict[str, str] = field(default_factory=dict)
    ways: set[str] = field(default_factory=set)

    def copied(self) -> Host:
        return copy.deepcopy(self)

    def seen(self) -> Document:
        """Everything but times: two hosts that are alike give the same."""
        entries = {
            entry.slot_id: (
                *(entry.fence, entry.power_fence, entry.allocation_id),
                *(entry.dirty, entry.gpu_used),
            )
            for entry in self.ledger()
        }
        named = {name: copy.copy(value) for name, value in vars(self).items()}
        del named["tree"], named["proofs"]
        return named | {"ledger": entries, "proven": set(self.proofs)}

    def ledger(self) -> list[_ledger.Entry]:
        with self.at():
            return _ledger.entries()

    @contextlib.contextmanager
    def at(self) -> Iterator[None]:
        """The collection's ledger code works on this host."""
        before = _ledger._host
        _ledger._host = self.tree  # type: ignore[assignment]
        try:
            yield
        finally:
            _ledger._host = before

    def act(self, module: str, params: Document, dry: bool) -> Document:
        """The answer of a module; KeyError for a module that this model does not have."""
        with self.at():
            host = self.copied() if dry else self
            if dry:
                # In check mode a module reports the state before its change.
                return {"changed": False, **MODULES[module](host, params)}
            before = self.seen()
            outcome = MODULES[module](host, params)
            return {"changed": before != self.seen(), **outcome}

    def wiped(self, slot: Document) -> Document:
        """Nothing is on the disk any more; the proof of it."""
        disk = disk_of(slot)
        self.disks[disk] = ""
        self.proofs[disk] = {
            "slot_id": slot["slot_id"],
            "disk": disk,
            "serial": slot["nvme_serial"],
            "method": "user_data_erase",
            "started_at": NOW,
            "finished_at": NOW,
            "size_bytes": slot["nvme_size_bytes"],
            "verified": True,
        }
        return self.proofs[disk]


def disk_of(slot: Document) -> str:
    return f"eui.{slot['nvme_eui']}"


def slice_lease(host: Host, params: Document) -> Document:
    key, slots, state = params["allocation_id"], params["slots"], params["state"]
    _ledger.check_each({**slot, "power_fence": params.get("power_fence")} for slot in slots)
    if state in ("held", "kept"):
        if params["boot_id"] != host.boot_id:
            raise refuse("boot_changed", f"boot {host.boot_id}")
        guest = {"domain": {"state": "running" if key in host.running else "shut off"}}
        for slot in slots:
            entry = _ledger.check(slot["slot_id"], slot["fence"])
            others = {disk for k, disks in host.running.items() if k != key for disk in disks}
            if disk_of(slot) in others:
                # As the driver does: a blocked plan is reported together with the observed state.
                return guest | {"failed": True, "error": refuse("device_in_use").document()}
            others_lease = entry.allocation_id != key
            ended = state == "kept" and (others_lease or entry.fence != slot["fence"])
            if ended or (others_lease and entry.dirty):
                raise refuse("lease_missing" if ended else "disk_dirty")
        host.plans.add(key)
        for slot in slots:
            args = {"fence": slot["fence"], "allocation_id": key, "disk_identity": disk_of(slot)}
            _ledger.hold(slot["slot_id"], **args)
        boot = slots[0]
        bundle = {"ip": boot["private_ip"], "mac": boot["management_mac"], "cpus": [], "gpus": []}
        more = {"numa_node": 0, "fabric_vfs": [], "disks": [slot["nvme_device"] for slot in slots]}
        return guest | {"bundle": bundle | more | {"cells": [], "layout": {}}}
    for slot in slots:
        _ledger.check(slot["slot_id"], slot["fence"])
    if state == "fenced":
        if {_ledger.load(slot["slot_id"]).allocation_id for slot in slots} - {"", key}:
            raise refuse("slot_leased")
        for slot in slots:
            _ledger.end_power(slot["slot_id"], fence=slot["fence"])
        return {}
    mine = [s for s in slots if _ledger.load(s["slot_id"]).allocation_id == key]
    if (mine or key in host.plans) and key in host.running:
        raise refuse("domain_present")
    for slot in mine:
        _ledger.release(slot["slot_id"], fence=slot["fence"])
    host.plans.discard(key)
    return {}


def image_cache(host: Host, params: Document) -> Document:
    host.images.add(params["digest"])
    return {"path": f"/cache/{params['name']}"}


def image_clone(host: Host, params: Document) -> Document:
    slot, key = params["slot"], params["allocation_id"]
    entry = _ledger.check(slot["slot_id"], slot["fence"])
    disk, done = disk_of(slot), (params["digest"], slot["fence"])
    if not (entry.dirty and host.clones.get(slot["slot_id"]) == done):
        if params["digest"] not in host.images:
            raise refuse("image_not_cached")
        if any(disk in disks for disks in host.running.values()):
            raise refuse("disk_in_use")
        if entry.allocation_id != key:
            raise refuse("lease_not_held")
        if disk not in host.proofs and not (entry.dirty and entry.fence == slot["fence"]):
            raise refuse("not_clean")
        _ledger.mark_dirty(slot["slot_id"], fence=slot["fence"], disk_identity=disk)
        host.proofs.pop(disk, None)
        host.disks[disk] = key
        host.clones[slot["slot_id"]] = done
    return {"digest": params["digest"], "bytes": params["size_bytes"], "seconds": 1.0}


def reservation(host: Host, params: Document) -> Document:
    key, ip = params["allocation_id"], params["ip"]
    if params["state"] == "present":
        _ledger.check_each(params.get("slots", ()))
    if params["state"] == "absent":
        host.reservations.pop(key, None)
    elif any(other == ip for holder, other in host.reservations.items() if holder != key):
        raise refuse("ip_in_use")
    else:
        host.reservations[key] = ip
    return {}


def fabric_functions(host: Host, params: Document) -> Document:
    key = params["allocation_id"]
    if params["state"] == "present":
        _ledger.check_each(params["slots"])
        host.vlans[key] = params["vlan"]
    else:
        host.vlans.pop(key, None)
    return {"functions": [{"vlan": host.vlans.get(key)}]}


def seed(host: Host, params: Document) -> Document:
    key = params["allocation_id"]
    if params["state"] == "present":
        _ledger.check_each(params.get("slots", ()))
    if params["state"] == "absent":
        host.seeds.discard(key)
        return {}
    if params["state"] == "detached":
        host.seeds.discard(key)
        return {"seed": {"destroyed": True, "in_definition": False, "in_guest": False}}
    host.seeds.add(key)
    return {"seed": {"path": f"/seeds/{key}", "present": True}}


def fence_power(host: Host, params: Document) -> Document:
    if params.get("boot_id") not in (None, "", host.boot_id):
        raise refuse("boot_changed", f"boot {host.boot_id}")
    _ledger.check_each(params["slots"])
    for slot in params["slots"]:
        numbers = {"fence": slot["fence"], "power_fence": slot["power_fence"]}
        _ledger.raise_power_fence(slot["slot_id"], **numbers)
    return {}


def domain(host: Host, params: Document) -> Document:
    key, slots = params["allocation_id"], params["slots"]
    _ledger.check_each(slots)
    if params["state"] in ("absent", "stopped"):
        open_ = key in host.running and key in (*host.forwards.values(), *host.ways)
        if params["state"] == "absent" and open_:
            raise refuse("way_in_open", "clients of a guest that is about to stop")
        gone = host.running.pop(key, None)
        power = {"stop_domain": {"shutdown": "graceful"}} if gone else {}
        if params["state"] == "absent":
            host.off.discard(key)
            return {"domain": {}, "evidence": power}
        host.off |= {key} if gone else set()
        state = "shut off" if key in host.off else "absent"
        # A guest that obeys a stop does not differ from one that powers off by itself.
        return {"domain": {"state": state, "off_by_guest": bool(gone)}, "evidence": power}
    disks = tuple(disk_of(slot) for slot in slots)
    held = {e.disk_identity for e in _ledger.entries() if e.allocation_id == key}
    if not held.issuperset(disks):
        raise refuse("lease_missing")
    if params["state"] == "prepared":
        return {"domain": {"state": "running" if key in host.running else "shut off"}}
    if key not in host.running:
        for slot in slots:
            if not _ledger.mark_gpu_used(slot["slot_id"], fence=slot["fence"]).dirty:
                _ledger.mark_dirty(
                    slot["slot_id"], fence=slot["fence"], disk_identity=disk_of(slot)
                )
                host.proofs.pop(disk_of(slot), None)
            host.disks[disk_of(slot)] = key
        host.running[key] = disks
        host.off.discard(key)
    return {"domain": {"state": "running"}}


def host_idle(host: Host, params: Document) -> Document:
    leased = {entry.allocation_id for entry in _ledger.entries()} - {""}
    if {*host.running, *leased} - {*params["allocations"]}:
        raise refuse("host_in_use")
    if params.get("boot_id") not in (None, "", host.boot_id):
        raise refuse("boot_changed", f"boot {host.boot_id}")
    return {"identity": {"boot_id": host.boot_id, "machine_id": "", "host_key": ""}}


def reboot(host: Host, _params: Document) -> Document:
    host.boot_id = str(uuid.UUID(int=uuid.UUID(host.boot_id).int + 1))
    host.off |= {*host.running}
    host.running.clear()
    host.vlans.clear()
    return {"rebooted": True}


def slice_ready(host: Host, params: Document) -> Document:
    if params["allocation_id"] not in host.running:
        raise refuse("not_ready")
    if host.reservations.get(params["allocation_id"]) != params["ip"]:
        raise refuse("not_ready", "no lease")
    ready = {"mac": params["mac"], "expected_ip": params["ip"], "actual_ip": params["ip"]}
    return {"readiness": ready | {"lease_state": "bound", "ssh_ready": True}}


def nvme_wipe(host: Host, params: Document) -> Document:
    proofs = {}
    for slot in params["slots"]:
        disk = disk_of(slot)
        entry = _ledger.check(slot["slot_id"], slot["fence"])
        if entry.dirty or disk not in host.proofs:
            if any(disk in disks for disks in host.running.values()) or disk in host.mounts:
                raise refuse("disk_in_use")
            _ledger.mark_dirty(slot["slot_id"], fence=slot["fence"], disk_identity=disk)
            proof = host.wiped(slot)
            _ledger.mark_clean(
                slot["slot_id"], fence=slot["fence"], disk_identity=disk, proof=proof
            )
        proofs[slot["slot_id"]] = {**host.proofs[disk], "slot_id": slot["slot_id"]}
    return {"proofs": proofs}


def gpu_reset(host: Host, params: Document) -> Document:
    proofs = {}
    for slot in params["slots"]:
        name, fence, address = slot["slot_id"], slot["fence"], slot["gpu_pci_address"]
        _ledger.check(name, fence)
        evidence = _ledger.standing_gpu(name, address)
        if evidence is None or evidence["fence"] < fence:
            if any(disk_of(slot) in disks for disks in host.running.values()):
                raise refuse("device_in_use")
            _ledger.mark_gpu_used(name, fence=fence)
            evidence = {**wipes.gpu(address), "fence": fence, "finished_at": host.tree.now()}
            _ledger.mark_gpu_reset(name, fence=fence, evidence=evidence)
        proofs[name] = {"gpu": evidence}
    return {"proofs": proofs}


def slice_absence(host: Host, params: Document) -> Document:
    key = params["allocation_id"]
    held = {disk for disks in host.running.values() for disk in disks}
    left = {
        "domain": key in host.running or key in host.off,
        "reservation": key in host.reservations,
        "seed": key in host.seeds,
        "fabric_isolation": key in host.vlans,
        "ingress": key in host.forwards.values(),
        "ingress_file": key in host.forwards.values(),
        "relay": key in host.ways,
        "disk_holders": any(disk_of(slot) in held for slot in params["slots"]),
    }
    checks = {name: {"absent": not present, "known": True} for name, present in left.items()}
    if params.get("require_absent") and any(left.values()):
        raise refuse("not_absent", ", ".join(name for name, present in left.items() if present))
    dirty = any(_ledger.load(slot["slot_id"]).dirty for slot in params["slots"])
    return {"absent": not any(left.values()), "checks": checks, "disk_dirty": dirty}


def slice_relay(host: Host, params: Document) -> Document:
    key = params["allocation_id"]
    if params["state"] == "present":
        _ledger.check_each(params["slots"])
        host.ways.add(key)
    else:
        host.ways.discard(key)
    return {"relay": {"open": key in host.ways}}


def slice_ingress(host: Host, params: Document) -> Document:
    key, rule = params["allocation_id"], params.get("rule")
    if params["state"] == "present":
        _ledger.check_each(params["slots"])
        if key not in host.running:
            raise refuse("guard_missing")
        host.forwards[rule["id"]] = key
    else:
        gone = [id for id, owner in host.forwards.items() if owner == key]
        for id in gone if rule is None else {rule["id"]} & set(gone):
            del host.forwards[id]
    return {"ingress": {"rules": [id for id, owner in host.forwards.items() if owner == key]}}


def slice_upkeep(host: Host, params: Document) -> Document:
    nothing = {"known": True, "detail": "", "found": []}
    return {"baseline": dict(nothing), "repairs": dict(nothing)}


def slice_holdings(host: Host, params: Document) -> Document:
    by_disk = {disk_of(slot): slot for slot in params["slots"]}
    by_ip = {slot["private_ip"]: slot for slot in params["slots"]}
    machines = {key: [by_disk[disk] for disk in disks] for key, disks in host.running.items()}
    held = {
        "domains": [
            {
                "name": f"gpuaas-slice-{key.replace('-', '')}",
                "allocation_id": key,
                "state": "running",
                "active": True,
                "devices": [
                    slot[name]
                    for slot in slots
                    for name in ("gpu_pci_address", "fabric_vf_pci_address")
                ],
                "disks": [slot["nvme_device"] for slot in slots],
            }
            for key, slots in machines.items()
        ]
        + [
            {
                "name": f"gpuaas-slice-{key.replace('-', '')}",
                "allocation_id": key,
                "state": "shut off",
                "active": False,
                "off_by_guest": True,
                "devices": [],
                "disks": [],
            }
            for key in sorted(host.off)
        ],
        "processes": [{"pid": 7, "allocation_id": key} for key in machines],
        "leases": [
            {
                "slot_id": entry.slot_id,
                "allocation_id": entry.allocation_id,
                "fence": entry.fence,
                "disk": entry.disk_identity,
                "dirty": entry.dirty,
            }
            for entry in _ledger.entries()
        ],
        "reservations": [
            {"allocation_id": key, "mac": by_ip[ip]["management_mac"], "ip": ip}
            for key, ip in host.reservations.items()
        ],
        "addresses": [
            {"mac": by_ip[ip]["management_mac"], "ip": ip}
            for key, ip in host.reservations.items()
            if key in machines
        ],
        "ports": [
            {"port": _object_names.port_name(key), "owner": key.replace("-", "")[:12]}
            for key in machines
        ],
        "guards": [
            {"cookie": _object_names.cookie(key), "owner": key.replace("-", "")[:16]}
            for key in machines
        ],
        "files": [{"allocation_id": key, "path": f"/seeds/{key}"} for key in sorted(host.seeds)],
        "limits": [],
        "ingress": [
            {"allocation_id": key, "rule_id": id} for id, key in sorted(host.forwards.items())
        ],
        "devices": [],
    }
    parts = {
        name: {"known": True, "detail": "", "found": present} for name, present in held.items()
    }
    identity = {"boot_id": host.boot_id, "machine_id": "", "host_key": ""}
    refused = {"known": True, "detail": "", "found": []}
    now = datetime.now(UTC).isoformat()
    return {"holdings": parts, "refused": refused, "identity": identity, "collected_at": now}


def baremetal_lease(host: Host, params: Document) -> Document:
    key, fence = params["allocation_id"], params["fence"]
    disks = {disk["slot_id"]: disk_of(disk) for disk in params["disks"]}
    names = (*disks, MACHINE)
    before = {name: _ledger.load(name) for name in names}
    late: Document = {}
    try:
        for name in names:
            _ledger.check(name, fence)
    except Refusal as stale:
        # As the driver does: a blocked plan is reported together with the observed state.
        late = {"failed": True, "msg": str(stale), "error": stale.document()}
    else:
        _MACHINE_STATES[params["state"]](host, params, disks, before)
    # An ending that is only looked at (check mode) says how things were.
    ending = params["state"] == "ending"
    records = before if ending else {name: _ledger.load(name) for name in names}
    return late | {
        "given": records[MACHINE].allocation_id == key and records[MACHINE].dirty,
        "dirty": [name for name in disks if records[name].dirty],
        "slots": [{**disk, "fence": fence} for disk in params["disks"]],
    }


Entries = dict[str, _ledger.Entry]


def _held(host: Host, params: Document, disks: dict[str, str], entries: Entries) -> None:
    key = params["allocation_id"]
    if not (entries[MACHINE].allocation_id == key and entries[MACHINE].dirty):
        if params["boot_id"] != host.boot_id:
            raise refuse("boot_changed", f"boot {host.boot_id}")
        for entry in _ledger.entries():
            if entry.allocation_id not in ("", key):
                raise refuse("slot_leased")
            if entry.dirty and entry.allocation_id != key and entry.disk_identity in disks.values():
                raise refuse("disk_dirty")
    for name in entries:
        disk = disks.get(name, "")
        _ledger.hold(name, fence=params["fence"], allocation_id=key, disk_identity=disk)


def _given(host: Host, params: Document, disks: dict[str, str], entries: Entries) -> None:
    if entries[MACHINE].allocation_id != params["allocation_id"]:
        raise refuse("machine_not_held")
    for name, entry in entries.items():
        if not entry.dirty:
            _dirty(host, name, params["fence"], disks.get(name, ""))


def _ending(host: Host, params: Document, disks: dict[str, str], entries: Entries) -> None:
    for name, entry in entries.items():
        if name != MACHINE and not entry.dirty:
            _dirty(host, name, params["fence"], disks[name])
        else:
            _ledger.raise_fence(name, fence=params["fence"])


def _released(_host: Host, params: Document, disks: dict[str, str], entries: Entries) -> None:
    if any(entries[name].dirty for name in disks):
        raise refuse("disk_dirty")
    holders = ("", params["allocation_id"])
    for name, entry in entries.items():
        if entry.allocation_id in holders and (entry.allocation_id or entry.dirty):
            if name == MACHINE:
                _ledger.mark_clean(MACHINE, fence=params["fence"], disk_identity="", proof={})
            _ledger.release(name, fence=params["fence"])


_MACHINE_STATES = {"held": _held, "given": _given, "ending": _ending, "released": _released}


def _dirty(host: Host, name: str, fence: int, disk: str) -> None:
    _ledger.mark_dirty(name, fence=fence, disk_identity=disk)
    host.proofs.pop(disk, None)


def baremetal_tenant(host: Host, params: Document) -> Document:
    name = params["username"]
    _ledger.check(MACHINE, params["fence"])
    state = params.get("state", "present")
    if state == "present":
        if host.accounts - {name}:
            raise refuse("account_taken")
        host.accounts.add(name)
        # A tenant with an account uses the disks.
        holder = _ledger.load(MACHINE).allocation_id
        for entry in _ledger.entries():
            if entry.disk_identity and entry.dirty and entry.allocation_id == holder:
                host.disks[entry.disk_identity] = holder
                host.mounts.add(entry.disk_identity)
        return {"account": {"username": name, "uid": 59000}}
    if state == "absent":
        host.accounts.discard(name)
    absent = name not in host.accounts
    return {"absence": {"absent": absent, "checks": {"account": {"absent": absent}}}}


def tenant_disks(host: Host, params: Document) -> Document:
    _ledger.check(MACHINE, params["fence"])
    for disk in params["disks"]:
        host.mounts.discard(disk_of(disk))
    return {"used": {}}


def host_baseline(host: Host, params: Document) -> Document:
    _ledger.check(MACHINE, params["fence"])
    if params.get("state", "recorded") == "recorded":
        host.baselines.add(params["allocation_id"])
        return {"baseline": {"accounts": {"root": "1"}}}
    host.baselines.discard(params["allocation_id"])
    return {"drift": [], "compared": bool(params["baseline"])}


MODULES: dict[str, Callable[[Host, Document], Document]] = {
    "slice_lease": slice_lease,
    "image_cache": image_cache,
    "image_clone": image_clone,
    # Parts of slice_vm and slice_handover.
    "write_seed": seed,
    "remove_seed": seed,
    "destroy_seed": seed,
    "reserve_address": reservation,
    "release_address": reservation,
    "give_functions": fabric_functions,
    "take_functions": fabric_functions,
    "fence_power": fence_power,
    "prepare_domain": domain,
    "start_domain": domain,
    "stop_domain": domain,
    "host_idle": host_idle,
    "reboot": reboot,
    "remove_domain": domain,
    "open_way": slice_relay,
    "slice_ready": slice_ready,
    "nvme_wipe": nvme_wipe,
    "gpu_reset": gpu_reset,
    "slice_absence": slice_absence,
    "slice_ingress": slice_ingress,
    "slice_upkeep": slice_upkeep,
    "slice_relay": slice_relay,
    "slice_holdings": slice_holdings,
    "baremetal_lease": baremetal_lease,
    "baremetal_tenant": baremetal_tenant,
    "tenant_disks": tenant_disks,
    "host_baseline": host_baseline,
}
