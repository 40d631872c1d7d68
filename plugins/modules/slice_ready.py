#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Readiness of a slice VM: DHCP lease, address, SSH, and the probes that run in the guest."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_ready
short_description: Wait until a slice VM is ready for its tenant
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Watches the DHCP leases of dnsmasq, the neighbour table and the SSH port of the guest.
  - The guest is reachable when the expected address is leased to the expected MAC and an SSH
    server there shows its host key, which is recorded.
  - The probes of O(guest_runtime) are asked over the virtio-serial channel of the domain, which is
    no network. They run in the guest, and count when it is reachable. Each has a deadline of its
    own, from the start of this module. Of the answers, only known names with numbers in range are
    accepted.
  - Fails with C(readiness_failed), which names the probe, after O(deadline) or that of a probe, or
    at once when QEMU has gone; RV(readiness) is returned all the same. If no code of the tenant has
    run, a failed probe in a reachable guest is a fault of the site, and the module fails with
    C(probe_failed).
  - In check mode it looks once, does not wait, and asks no probe.
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  mac:
    description: MAC of the management interface.
    type: str
    required: true
  ip:
    description: The address that the guest must get.
    type: str
    required: true
  bridge:
    description: The interface that the guest is reached through.
    type: str
    default: ovsbr0
  port:
    description: TCP port of the guest's SSH server.
    type: int
    default: 22
  deadline:
    description: Seconds to wait.
    type: int
    default: 600
  guest_runtime:
    description:
      - The C(vm.guest_runtime) of the hardware profile. C(probes) has the seconds of each probe in
        the guest, which is V(egress), V(gpu_compute) or V(rdma). C(driver) says how a GPU
        computes (V(edu) for the lab's stand-in, otherwise CUDA), C(egress_target) is an
        C(address:port) outside.
    type: dict
    default: {}
  gpus:
    description: GPUs that must compute.
    type: int
    default: 1
  functions:
    description: Fabric functions, each of which must have an active port in V(rdma).
    type: int
    default: 0
  judged:
    description: >-
      Whether a failed probe in the guest fails the module. Otherwise the module waits two minutes
      at most for the probes and only reports failures. Use this for a guest whose tenant may have
      removed the probes.
    type: bool
    default: true
  tenant_code:
    description: Whether code of the tenant runs at the first boot, such as a cloud-config.
    type: bool
    default: false
attributes:
  check_mode:
    description: Looks once.
    support: full
  diff_mode:
    description: Only reads.
    support: none
requirements:
  - Debian 12, Ubuntu 24.04 or newer with Python 3.11 on the host
  - root on the host
seealso:
  - module: gpuaas.slice.slice_vm
  - module: gpuaas.slice.slice_handover
"""

EXAMPLES = r"""
- name: Wait for the VM
  gpuaas.slice.slice_ready:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    mac: "52:54:00:64:00:0a"
    ip: 10.100.0.10
    deadline: 900
    guest_runtime: {driver: 570-server, probes: {gpu_compute: 600}}
    gpus: 1
"""

RETURN = r"""
readiness:
  description:
    - The last observation. C(lease_state) is C(none), C(offered) (the MAC answers at the address
      but has no DHCP lease), C(bound) or C(mismatch) (the MAC has another address).
    - C(probes) has each probe in order with C(name), C(ok), C(detail), C(values), C(seconds) and
      C(deadline_s); C(host_keys) are the public host keys of the guest.
    - When the gate failed, C(console_tail) has the last lines of the guest's console and
      C(domain_state) is libvirt's state of the domain (C(paused) after a disk error).
  returned: unless the parameters are refused
  type: dict
  sample:
    mac: "52:54:00:64:00:0a"
    expected_ip: 10.100.0.10
    actual_ip: 10.100.0.10
    lease_state: bound
    ssh_ready: true
    domain_active: true
    seconds: 104.2
    host_keys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX]
    probes:
      - {name: ssh, ok: true, detail: "", values: {}, seconds: 104.2, deadline_s: 900}
"""

import contextlib
import math
import re
import socket
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _libvirt,
    _readiness,
)

# Between two looks. With its address a guest has SSH within seconds.
_PAUSE_SECONDS = 1.0
_CLOSE_SECONDS = 0.2
_CONNECT_SECONDS = 3.0
_SCAN_SECONDS = 150.0
# Of the console's end, which is the guest's to write: more would not fit into a result.
_CONSOLE_LINES = 40
_CONSOLE_CHARACTERS = 300
_KEY = re.compile(r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp\d{3}) [A-Za-z0-9+/]{40,1400}={0,2}")
# After a guest with probes that are only reported is reachable.
_REPORT_SECONDS = 120
# Probes that the host makes itself. They share the deadline of the module.
_OUTSIDE = ("address", "lease", "ssh")


def look(params: _change.Params) -> dict[str, Any]:
    """Current observation of the guest."""
    leased = [lease.ip for lease in _dnsmasq.leases() if lease.mac == params["mac"]]
    neighbour = _dnsmasq.neighbour(params["bridge"], params["ip"])
    if params["ip"] in leased:
        state, actual = "bound", params["ip"]
    elif leased:
        state, actual = "mismatch", leased[0]
    elif neighbour == params["mac"]:
        state, actual = "offered", params["ip"]
    else:
        state, actual = "none", ""
    name = _object_names.domain_name(params["allocation_id"])
    return {
        "mac": params["mac"],
        "expected_ip": params["ip"],
        "actual_ip": actual,
        "lease_state": state,
        "ssh_ready": state == "bound" and speaks_ssh(params["ip"], params["port"]),
        "domain_active": _libvirt.qemu_pid(name) is not None,
    }


def speaks_ssh(ip: str, port: int) -> bool:
    """Whether an SSH server names itself. An open port alone may be a socket without a server."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((ip, port), timeout=_CONNECT_SECONDS) as connection,
    ):
        return connection.recv(64).startswith(b"SSH-2.0-")
    return False


def host_keys(ip: str, port: int) -> list[str]:
    """The keys with which the guest's SSH server proves itself, as type and base64.

    Without any the guest is not ready, whatever its server did to ssh-keyscan: it may send bytes
    without end.
    """
    # A guest that has just booted may answer slowly.
    scan = ["ssh-keyscan", "-T", "60", "-p", str(port), "-t", "ed25519,ecdsa", ip]
    try:
        # A server without a key of either type makes ssh-keyscan exit with 1.
        shown = _command.run(scan, ok=(0, 1), timeout=_SCAN_SECONDS).out.splitlines()
    except Refusal as refusal:
        if refusal.code not in ("command_timeout", "command_failed"):
            raise
        return []
    keys = {" ".join(line.split()[1:3]) for line in shown if not line.startswith("#")}
    return sorted(key for key in keys if _KEY.fullmatch(key))


def wait(
    params: _change.Params, *, once: bool, inquiry: _readiness.Inquiry | None = None
) -> dict[str, Any]:
    """Look until the guest is ready, its QEMU is gone, or the deadline has passed.

    inquiry: probes that the guest is asked meanwhile, from its address on.
    """
    _object_names.check_mac(params["mac"])
    start = time.monotonic()
    while True:
        readiness = look(params)
        readiness["host_keys"], spoke = [], readiness["ssh_ready"]
        if spoke:
            readiness["host_keys"] = host_keys(params["ip"], params["port"])
            readiness["ssh_ready"] = bool(readiness["host_keys"])
        readiness["seconds"] = round(time.monotonic() - start, 1)
        over = readiness["seconds"] >= params["deadline"] or not readiness["domain_active"]
        if readiness["ssh_ready"] or over or once:
            return readiness
        bound = readiness["lease_state"] == "bound"
        # sshd refuses an address that connects often without a login.
        pause = _CLOSE_SECONDS if bound and not spoke else _PAUSE_SECONDS
        if inquiry and bound:
            began = time.monotonic()
            inquiry.listen(pause)
            # A guest that answers does not shorten the pause.
            pause -= time.monotonic() - began
        if pause > 0:
            time.sleep(pause)


def inquire(
    params: _change.Params, start: float, longest: float
) -> contextlib.AbstractContextManager[_readiness.Inquiry | None]:
    """The probes in the guest; None without any. longest: deadline of each, in seconds."""
    runtime = params["guest_runtime"]
    deadlines = runtime.get("probes") or {}
    if not deadlines:
        return contextlib.nullcontext()
    settings = {
        "egress": {"target": runtime.get("egress_target", "")},
        "gpu_compute": {"driver": runtime.get("driver", ""), "gpus": params["gpus"]},
        "rdma": {"functions": params["functions"]},
    }
    inquiry = _readiness.Inquiry(
        params["allocation_id"],
        {probe: settings[probe] for probe in sorted(deadlines)},
        {probe: min(seconds, longest) for probe, seconds in deadlines.items()},
        start=start,
    )
    return contextlib.closing(inquiry)


def probes(
    params: _change.Params, readiness: dict[str, Any], inquiry: _readiness.Inquiry | None
) -> list[dict[str, Any]]:
    """Every probe with its result. Those in the guest count when it is reachable."""
    passed = {
        "address": readiness["actual_ip"] == readiness["expected_ip"],
        "lease": readiness["lease_state"] == "bound",
        "ssh": readiness["ssh_ready"],
    }
    shared = {"detail": "", "values": {}, "deadline_s": params["deadline"]}
    rows = [
        {"name": name, "ok": passed[name], "seconds": readiness["seconds"], **shared}
        for name in _OUTSIDE
    ]
    if inquiry is None or not readiness["ssh_ready"]:
        return rows
    name = _object_names.domain_name(params["allocation_id"])
    results = inquiry.results(lambda: _libvirt.qemu_pid(name) is not None)
    return [*rows, *({"name": probe, **result} for probe, result in results.items())]


def verdict(params: _change.Params, readiness: dict[str, Any]) -> Refusal | None:
    """Why the guest does not count as ready."""
    failed = [
        row
        for row in readiness["probes"]
        if not row["ok"] and (params["judged"] or row["name"] in _OUTSIDE)
    ]
    if not failed:
        return None
    if readiness["ssh_ready"]:
        return Refusal(
            "readiness_failed" if params["tenant_code"] else "probe_failed",
            expected=", ".join(f"{row['name']} within {row['deadline_s']} s" for row in failed),
            found="; ".join(f"{row['name']}: {row['detail']}" for row in failed),
            remedy="; ".join(_readiness.REMEDIES[row["name"]] for row in failed),
        )
    keys = ("lease_state", "actual_ip", "ssh_ready", "domain_active")
    shown = ", ".join(f"{key}={readiness[key]}" for key in keys)
    return Refusal(
        "readiness_failed",
        expected=f"{params['mac']} bound to {params['ip']} and SSH within {params['deadline']} s",
        found=f"after {readiness['seconds']} s {shown}",
        remedy="read the end of the guest's console; clean the slot up before it is used again",
    )


def console_tail(allocation_id: str) -> list[str]:
    text = _host.read(_object_names.console_path(allocation_id)) or ""
    lines = ("".join(c for c in line if c.isprintable()) for line in text.splitlines())
    return [line[:_CONSOLE_CHARACTERS] for line in lines if line][-_CONSOLE_LINES:]


def domain_state(allocation_id: str) -> str:
    """State from libvirt. A libvirt that does not answer must not hide other evidence."""
    try:
        state = _libvirt.state(_object_names.domain_name(allocation_id))
    except Refusal:
        return "unknown"
    return state.name if state else "absent"


def watch(params: _change.Params, once: bool) -> tuple[dict[str, Any], Refusal | None]:
    """Last observation, and the reason why the guest is not ready."""
    start = time.monotonic()
    _check_probes(params["guest_runtime"])
    parameters = {**params, "guest_runtime": {}} if once else params
    if params["judged"]:
        with inquire(parameters, start, params["deadline"]) as inquiry:
            readiness = wait(params, once=once, inquiry=inquiry)
            readiness["probes"] = probes(params, readiness, inquiry)
    else:
        readiness = wait(params, once=once)
        # Whole seconds, as the contract of runs has them.
        longest = min(params["deadline"], math.ceil(readiness["seconds"]) + _REPORT_SECONDS)
        with inquire(parameters, start, longest) as inquiry:
            readiness["probes"] = probes(params, readiness, inquiry)
    refusal = verdict(params, readiness)
    if refusal is not None:
        readiness["console_tail"] = console_tail(params["allocation_id"])
        readiness["domain_state"] = domain_state(params["allocation_id"])
    return {"readiness": readiness}, refusal


def _check_probes(runtime: dict[str, Any]) -> None:
    for name, seconds in (runtime.get("probes") or {}).items():
        if name not in _readiness.PROBES:
            expected = f"a probe of {', '.join(_readiness.PROBES)}"
            raise _object_names.invalid("guest_runtime.probes", expected, str(name))
        if not isinstance(seconds, int) or seconds < 1:
            expected = "seconds, at least 1"
            raise _object_names.invalid(f"guest_runtime.probes.{name}", expected, str(seconds))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "mac": {"type": "str", "required": True},
            "ip": {"type": "str", "required": True},
            "bridge": {"type": "str", "default": "ovsbr0"},
            "port": {"type": "int", "default": 22},
            "deadline": {"type": "int", "default": 600},
            "guest_runtime": {"type": "dict", "default": {}},
            "gpus": {"type": "int", "default": 1},
            "functions": {"type": "int", "default": 0},
            "judged": {"type": "bool", "default": True},
            "tenant_code": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    _change.attend(module, watch)


if __name__ == "__main__":
    main()
