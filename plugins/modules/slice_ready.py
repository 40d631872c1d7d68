#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Wait until a slice VM has its address and answers SSH."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_ready
short_description: Wait until a slice VM has its address and answers SSH
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Watches the lease file of dnsmasq, the neighbour table and the SSH port of the guest, without
    starting programs.
  - Ends with success when the expected address is leased to the expected MAC and an SSH server
    names itself there.
  - Fails with C(readiness_failed) after O(deadline), or at once when QEMU has gone; RV(readiness)
    is returned all the same.
  - In check mode it looks once and does not wait.
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
attributes:
  check_mode:
    description: Looks once.
    support: full
  diff_mode:
    description: Only reads.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the VM
  gpuaas.slice.slice_ready:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    mac: "52:54:00:64:00:0a"
    ip: 10.100.0.10
    deadline: 900
"""

RETURN = r"""
readiness:
  description:
    - The last observation. C(lease_state) is C(none), C(offered) (the MAC answers at the address
      but has no lease), C(bound) or C(mismatch) (the MAC has another address).
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
"""

import contextlib
import socket
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq, _libvirt

_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 3.0
_CONSOLE_LINES = 40


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


def wait(params: _change.Params, *, once: bool) -> dict[str, Any]:
    """Look until the guest is ready, its QEMU is gone, or the deadline has passed."""
    _object_names.check_mac(params["mac"])
    start = time.monotonic()
    while True:
        readiness = look(params)
        readiness["seconds"] = round(time.monotonic() - start, 1)
        over = readiness["seconds"] >= params["deadline"] or not readiness["domain_active"]
        if readiness["ssh_ready"] or over or once:
            return readiness
        time.sleep(_PAUSE_SECONDS)


def verdict(params: _change.Params, readiness: dict[str, Any]) -> Refusal | None:
    """Why the guest does not count as ready."""
    if readiness["ssh_ready"]:
        return None
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
    return [line for line in lines if line][-_CONSOLE_LINES:]


def domain_state(allocation_id: str) -> str:
    """State from libvirt. A libvirt that does not answer must not hide other evidence."""
    try:
        return _libvirt.domains().get(_object_names.domain_name(allocation_id), "absent")
    except Refusal:
        return "unknown"


def watch(params: _change.Params, once: bool) -> tuple[dict[str, Any], Refusal | None]:
    """Last observation, and the reason why the guest is not ready."""
    readiness = wait(params, once=once)
    refusal = verdict(params, readiness)
    if refusal is not None:
        readiness["console_tail"] = console_tail(params["allocation_id"])
        readiness["domain_state"] = domain_state(params["allocation_id"])
    return {"readiness": readiness}, refusal


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "mac": {"type": "str", "required": True},
            "ip": {"type": "str", "required": True},
            "bridge": {"type": "str", "default": "ovsbr0"},
            "port": {"type": "int", "default": 22},
            "deadline": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    _change.attend(module, watch)


if __name__ == "__main__":
    main()
