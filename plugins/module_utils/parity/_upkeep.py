"""Upkeep of a slice host: its baseline is compared, repaired where it differs, compared again.

It compares by parity's checks, which send traffic where they can, and repairs by bootstrap's
modules. It starts dead guardians, restores the network, the guards of fabric functions and lost
rate limits, and quiesces the GPU services. It frees, starts and ends nothing of a tenant. If the
profile's network is not the one that bootstrap recorded, that is named and not applied, because
that change is an operator's. Until the next bootstrap, the host is compared and repaired by the
rules of that record. Another bridge or other addresses are not repaired.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _gpu_services
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_service,
    _boot_units,
    _change,
    _file_edits,
    _free_space,
    _host_mode,
    _object_names,
    _repairs,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _virtual_functions
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _guards,
    _ovs_nat,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _check,
    _checks_network,
    _host_facts,
    _slice_parity,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt, _qos, _relay

# Checks of parity that hold at any time, also beside running tenants and tasks.
CHECKS = (
    *("gpu_services_quiesced", "ovs_bridge", "dnsmasq", "dnsmasq_config", "nat", "ip_forwarding"),
    *("guest_egress", "guest_tcp", "network_service", "fabric_isolation", "libvirt_directory"),
    "image_cache",
)

Params = Mapping[str, Any]
Rows = list[dict[str, str]]


def keep(params: Params, *, check_mode: bool) -> tuple[list[str], Rows]:
    """Repair what differs. Returns the steps, and what is left: code, expected, found, remedy."""
    if not _host_mode.is_slice():
        raise _host_mode.not_slice()
    network, recorded = params["profile"]["network"], _guards.recorded()
    in_force = _in_force(network, recorded)
    present = {**params, "profile": {**params["profile"], "network": in_force}}
    unlike = _unlike(network, recorded)
    rows = look(present)
    roles = {row["role"] for row in rows} - {""}
    if _unlike(in_force, recorded):
        roles.discard("slice_network")
    done, refusals = ([], _stopped()) if check_mode else _mend(present, roles)
    # Traffic of tenants may have delayed an answer, so a failure counts when it is seen twice.
    rows = look(present) if rows and not check_mode else rows
    return done, [
        *(_problem(row) for row in rows),
        *map(_refusal, [*refusals, *unlike, *_free_space.full()]),
    ]


def _in_force(network: Params, recorded: Params) -> Params:
    """The network that the host must have until its next bootstrap: that of the last bootstrap, if
    its file is as bootstrap wrote it. Launches already use the profile's own bridge and addresses.
    """
    path = _baseline_files.SETTINGS
    given = _boot_files.recorded().get(_boot_units.NETWORK.name, {}).get(path)
    if given is None or given != _file_edits.digest_of(path):
        return network
    return {**network, **recorded, **{key: network[key] for key in _baseline_files.PLACE}}


def look(params: Params) -> list[dict[str, str]]:
    """The checks that fail."""
    facts = _host_facts.Facts(_host_facts.Request(params["profile"], params["slots"]))
    outcomes = _check.evaluate(
        [check for check in _slice_parity.CHECKS if check.name in CHECKS],
        facts,
        intent="slice",
        not_applicable=params["profile"].get("not_applicable", []),
    )
    failed = [row for row in outcomes if row["status"] == _check.FAIL]
    return [_target_silent(row) if _is_of_target(row, facts) else row for row in failed]


def _is_of_target(row: Mapping[str, str], facts: _host_facts.Facts) -> bool:
    # A probe that could not be created shows nothing of the target.
    with contextlib.suppress(Refusal):
        return row["check"] == "guest_egress" and _checks_network.target_silent(facts)
    return False


def _target_silent(row: Mapping[str, str]) -> dict[str, str]:
    """The failure under a name of its own, and without a repair. An outage of the target, or its
    owner, must not take all hosts of a site off sale.
    """
    remedy = "look at the target of network.egress_probe, or at the site's way to it"
    return {**row, "check": "egress_target_silent", "remediation": remedy, "role": ""}


def _mend(params: Params, roles: set[str]) -> tuple[list[str], list[Refusal]]:
    """Repair the parts of these roles, and start dead guardians: the steps, and the refusals."""
    profile = params["profile"]
    repairs: list[Callable[[list[str]], None]] = []
    if "slice_network" in roles:
        network = _baseline_files.settings(profile["network"])
        repairs.append(lambda done: _drive(_ovs_nat.SUBJECT, network, done))
    if "fabric_functions" in roles:
        # Only guards: new functions and identities would take a tenant's functions away.
        repairs.append(_restore_guards)
    if "boot_configuration" in roles:
        services = {"services": profile.get("gpu_services", []), "state": "quiesced"}
        repairs.append(lambda done: _drive(_gpu_services.SUBJECT, services, done))
    if params.get("gateway_authority"):
        relay = {"state": "kept", "authority": params["gateway_authority"]}
        repairs.append(lambda done: _drive(_relay.SUBJECT, relay, done))
    if limit := profile["vm"].get("mgmt_qos"):
        repairs.append(lambda done: _restore_limits(limit, done))
    # Last, because a guardian would restore the network before its differences are recorded.
    repairs += [functools.partial(_start_guardian, unit) for unit in _guardians()]
    done: list[str] = []
    refusals = []
    for repair in repairs:
        steps: list[str] = []
        try:
            repair(steps)
        except Refusal as refusal:
            refusals.append(refusal)
        except (OSError, ValueError) as broken:
            refusals.append(_unforeseen(broken))
        # Not after all of them, because the run may end before.
        _repairs.note(steps)
        done += steps
    return done, refusals


def _restore_guards(done: list[str]) -> None:
    for step in _virtual_functions.restore_guards(_virtual_functions.recorded()):
        done.append(step)


def _restore_limits(options: Params, done: list[str]) -> None:
    """Limit the ports of running slices that have no limit, or none in a direction.

    Another limit is left, because a change of the rate holds from the next start.
    """
    limit = _qos.limit(options)
    for name, life in _libvirt.states().items():
        allocation = _object_names.owner(name)
        if not (allocation and life.runs and _qos.observe(allocation).lost):
            continue
        try:
            _qos.install(allocation, limit)
        except Refusal:
            # A machine that ended meanwhile has no port.
            ended = _libvirt.state(name)
            if ended and ended.runs:
                raise
        else:
            done.append(f"limit_port {_object_names.port_name(allocation)}")


def _guardians() -> list[_boot_service.Unit]:
    """The guardians, and the telemetry, that bootstrap has installed."""
    return _boot_service.present(_boot_units.NETWORK, _boot_units.FABRIC, _boot_units.TELEMETRY)


def _start_guardian(unit: _boot_service.Unit, done: list[str]) -> None:
    """Start a guardian, or the telemetry, that was stopped; systemd itself restarts one that fails
    or hangs.
    """
    if _is_stopped(unit):
        step = _change.Step("start_service", unit.service, "inactive", "active")
        _boot_service.apply(unit, step)
        done.append(f"{step.name} {step.subject}")


def _is_stopped(unit: _boot_service.Unit) -> bool:
    """Whether it was stopped. Lost settings are refused: without them a guardian restores nothing,
    even if it runs.
    """
    if not unit.borrowed:
        _boot_service.settings(unit.settings_path)
    return not _boot_service.services([unit.service])[unit.service].active


def _stopped() -> Iterator[Refusal]:
    """In check mode, what keeps a guardian from its work."""
    for unit in _guardians():
        try:
            if _is_stopped(unit):
                yield Refusal(
                    "guardian_stopped",
                    expected=f"{unit.service} to run",
                    found="it is stopped",
                    remedy="run without check mode, which starts it",
                )
        except Refusal as refusal:
            yield refusal


def _unlike(network: Params, recorded: Params) -> list[Refusal]:
    """Refusal of a profile's network that is not the one that bootstrap recorded."""
    settings = _baseline_files.settings(network)
    # The record of an earlier release lacks the name servers.
    record = {_baseline_files.NAME_SERVERS: [], **recorded} if recorded else {}
    if settings == record:
        return []
    differing = sorted(key for key in settings if settings[key] != record.get(key))
    return [
        Refusal(
            "network_settings_differ",
            expected=f"the network of the profile as bootstrap recorded it in "
            f"{_baseline_files.SETTINGS}",
            found=f"other values of {', '.join(differing)}" if recorded else "no record",
            remedy="run the bootstrap playbook, which establishes the profile's network",
        )
    ]


def _drive(subject: _change.Subject, params: Params, done: list[str]) -> None:
    outcome = _change.drive(subject, params, check_mode=False)
    done += [f"{step.name} {step.subject}" for step in outcome.steps_done]
    if outcome.failure is not None:
        raise outcome.failure


def _problem(row: Mapping[str, str]) -> dict[str, str]:
    return {
        "code": row["check"],
        "expected": "the check of parity to pass",
        "found": row["detail"],
        "remedy": row["remediation"],
    }


def _refusal(refusal: Refusal) -> dict[str, str]:
    return {key: str(value)[:2000] for key, value in refusal.document().items()}


def _unforeseen(broken: Exception) -> Refusal:
    return Refusal(
        "system_error",
        expected="the host's baseline to be restored",
        found=f"{type(broken).__name__}: {broken}",
        remedy="repair the cause that the system names; drift detection tries again",
    )
