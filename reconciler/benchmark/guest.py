"""The way into a slice VM: through its host, and by the key that the guest's own console showed.

A guest makes its SSH key at its first boot, and cloud-init writes it on the serial console, which
QEMU keeps in a file of the host. The host's key is certified, so the host vouches for the guest's:
nobody is asked over the network who he is, and nobody is believed at first sight.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reconciler.benchmark.target import Target, remote
from reconciler.domain.errors import Problem
from reconciler.domain.states import AllocationState, CapacityShape
from reconciler.runs.ssh import SshAccess

Record = Mapping[str, Any]

# Where the domain's definition puts it (plugins/module_utils/slice/_object_names.py).
_CONSOLE = "/var/log/libvirt/qemu/{}-console.log"
# The first boot stands at its beginning; a tenant can write the rest, without end.
_CONSOLE_BYTES = 1 << 20
_LIMIT_S = 120

_BLOCK = re.compile(r"-----BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS-----", re.S)
_KEY = re.compile(r"((?:ssh|ecdsa)-[a-z0-9-]{3,30} [A-Za-z0-9+/]{40,2000}={0,2})(?: .*)?")


def place(allocation: Record) -> tuple[str, str]:
    """Node and address of a tenant's running machine; Problem `no_slice_vm`."""
    shape, state = allocation["capacity_shape"], allocation["state"]
    if (shape, state) != (CapacityShape.GPU_SLICE, AllocationState.ACTIVE):
        raise Problem(
            "no_slice_vm",
            409,
            expected="an active allocation of GPU slices",
            found=f"a {shape} allocation, {state}",
            remedy="choose another with `gpuaas allocations`, or name the machine with --host",
        )
    # The machine's one managed interface is that of its first slot.
    first = min(allocation["claims"], key=lambda claim: claim["position"])
    return first["node_id"], first["private_ip"]


def target(
    allocation: Record, node: Record, own: Target, *, access: SshAccess, folder: Path
) -> Target:
    """The allocation's machine. own: the caller's user, key, configuration and known_hosts.

    Without known_hosts the guest's key is read on its host, and kept in the folder. Problem
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
    found = dataclasses.replace(own, host=address, user=own.user or allocation["username"], via=via)
    if own.known_hosts:
        return found
    # Addresses go from one tenant to the next; the domain's name is the allocation's own.
    domain = f"gpuaas-slice-{allocation['id'].replace('-', '')}"
    keys = host_keys(_console(via, domain))
    if not keys:
        raise Problem(
            "guest_key_unknown",
            409,
            expected=f"SSH host keys of the guest on its console, {_CONSOLE.format(domain)}",
            found="none",
            remedy="let the image's cloud-init run keys-to-console, or give the guest's key with"
            " --known-hosts",
        )
    file = folder / "known_hosts"
    file.write_text("".join(f"{domain} {key}\n" for key in keys))
    return dataclasses.replace(found, alias=domain, known_hosts=file)


def host_keys(console: str) -> list[str]:
    """What the first boot showed; whatever a tenant has written since then does not count."""
    block = _BLOCK.search(console)
    lines = [line.strip() for line in block[1].splitlines()] if block else []
    return [found[1] for line in lines if (found := _KEY.fullmatch(line))]


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
        remedy="look at the host with `gpuaas nodes show`, or give the guest's key with"
        " --known-hosts",
    )
