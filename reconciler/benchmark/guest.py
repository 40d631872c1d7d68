"""SSH access to a slice VM through its host, with the host key from the guest's console.

A guest creates its SSH host key at its first boot, and cloud-init writes the key to the serial
console, which QEMU keeps in a file of the host. The host has a certificate, so the key in that file
can be trusted without trust on first use.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reconciler.benchmark.target import Target, remote
from reconciler.model.errors import Problem
from reconciler.model.states import AllocationState, CapacityShape
from reconciler.runs.ssh import SshAccess

Record = Mapping[str, Any]

# Path of the console log in the domain's definition (plugins/module_utils/slice/_object_names.py).
_CONSOLE = "/var/log/libvirt/qemu/{}-console.log"
# The first boot is at the beginning. The tenant can write the rest, without a limit.
_CONSOLE_BYTES = 1 << 20
_LIMIT_S = 120

_BLOCK = re.compile(r"-----BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS-----", re.S)
_KEY = re.compile(r"((?:ssh|ecdsa)-[a-z0-9-]{3,30} [A-Za-z0-9+/]{40,2000}={0,2})(?: .*)?")


def place(allocation: Record) -> tuple[str, str]:
    """Node id and private address of a running slice VM; Problem `no_slice_vm`."""
    shape, state = allocation["capacity_shape"], allocation["state"]
    if (shape, state) != (CapacityShape.GPU_SLICE, AllocationState.ACTIVE):
        raise Problem(
            "no_slice_vm",
            409,
            expected="an active allocation of GPU slices",
            found=f"a {shape} allocation, {state}",
            remedy="choose another allocation with `gpuaas allocations`, or use --host",
        )
    # The machine has a single managed interface, which belongs to its first slot.
    first = min(allocation["claims"], key=lambda claim: claim["position"])
    return first["node_id"], first["private_ip"]


def target(
    allocation: Record, node: Record, caller: Target, *, access: SshAccess, folder: Path
) -> Target:
    """The slice VM of an allocation. caller: the caller's user, key, configuration and known_hosts.

    Without known_hosts the guest's key is read on its host and written to the folder. Problem
    `no_slice_vm`, `console_unreadable`, `guest_key_unknown`.
    """
    _node_id, address = place(allocation)
    via = Target(
        host=node["address"],
        port=node["port"],
        user=node["ssh_user"],
        access=access,
        alias=node["id"],
    )
    user = caller.user or allocation["username"]
    routed = dataclasses.replace(caller, host=address, user=user, via=via)
    if caller.known_hosts:
        return routed
    # The domain's name is unique to the allocation. The address had other tenants before.
    domain = f"gpuaas-slice-{allocation['id'].replace('-', '')}"
    keys = host_keys(_console(via, domain))
    if not keys:
        raise Problem(
            "guest_key_unknown",
            409,
            expected=f"SSH host keys of the guest on its console, {_CONSOLE.format(domain)}",
            found="no key",
            remedy="enable keys-to-console in the image's cloud-init, or pass the guest's key with"
            " --known-hosts",
        )
    file = folder / "known_hosts"
    file.write_text("".join(f"{domain} {key}\n" for key in keys))
    return dataclasses.replace(routed, alias=domain, known_hosts=file)


def host_keys(console: str) -> list[str]:
    """Host keys of the first boot. Later output is ignored, because the tenant can write it."""
    block = _BLOCK.search(console)
    lines = [line.strip() for line in block[1].splitlines()] if block else []
    return [match[1] for line in lines if (match := _KEY.fullmatch(line))]


def _console(via: Target, domain: str) -> str:
    front = [] if via.user == "root" else ["sudo", "-n"]
    read = [*front, "head", "-c", str(_CONSOLE_BYTES), "--", _CONSOLE.format(domain)]
    try:
        done = subprocess.run(
            remote(via, read),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise _unreadable(via, f"no answer in {_LIMIT_S} s") from late
    if done.returncode:
        raise _unreadable(via, f"exit {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _unreadable(via: Target, found: str) -> Problem:
    return Problem(
        "console_unreadable",
        502,
        expected=f"to read the guest's console on its host {via.alias}",
        found=found,
        remedy="check the host with `gpuaas nodes show`, or pass the guest's key with"
        " --known-hosts",
    )
