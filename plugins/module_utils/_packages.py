"""Packages of a slice host: one question to dpkg, and apt only for what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import _before, _change, _command
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

RECORD = "packages"

# What the modules of the collection call on a slice host, and what a slice VM runs on.
REQUIRED = (
    "conntrack",
    "dnsmasq",
    "dnsmasq-utils",
    "genisoimage",
    "gpg",
    "iproute2",
    "iptables",
    "libvirt-clients",
    "libvirt-daemon-system",
    "nvme-cli",
    "openvswitch-switch",
    "ovmf",
    "qemu-system-x86",
    "qemu-utils",
    "rdma-core",
    "zstd",
)

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
# Some hundred megabytes from a slow mirror; much longer means that the mirror is gone.
_INSTALL_S = 1800
# At first boot the machine's own upgrade holds the lock for minutes.
_LOCK_S = 600

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    installed: frozenset[str]


def observe(params: Params) -> State:
    wanted = list(params["packages"])
    if not wanted or _unsafe(wanted):
        return State(frozenset())
    form = "--showformat=${db:Status-Status} ${Package}\\n"
    # 1 says that some are unknown to dpkg, which is an answer.
    out = _command.run(["dpkg-query", "--show", form, "--", *wanted], ok=(0, 1)).out
    rows = (row.partition(" ") for row in out.splitlines())
    return State(frozenset(name for status, _blank, name in rows if status == "installed"))


def plan(params: Params, state: State) -> _change.Plan:
    wanted = list(params["packages"])
    bad = _unsafe(wanted)
    if bad:
        refusal = Refusal(
            "package_invalid",
            expected="names of packages",
            found=", ".join(map(repr, bad)),
            remedy="correct the list of packages",
        )
        return _change.Plan(blockers=(refusal,))
    missing = [name for name in wanted if name not in state.installed]
    if not missing:
        return _change.Plan()
    return _change.Plan((_change.Step("install_packages", "packages", [], missing),))


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    # A service that came with a package of ours was not there before: the way back asks for this.
    names = dict.fromkeys(step.after, "installed")
    for remember in _before.remembering(RECORD, _before.recalled(RECORD), names):
        _before.apply(remember)
    _apt("update")
    _apt("install", "--yes", "--no-install-recommends", "--", *step.after)
    return {"installed": step.after}


def facts(_params: Params, state: State) -> dict[str, Any]:
    return {"installed": sorted(state.installed)}


SUBJECT = _change.Subject(observe, plan, apply, facts)


def _apt(*words: str) -> None:
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet"]
    lock = ["-o", f"DPkg::Lock::Timeout={_LOCK_S}"]
    _command.run([*quiet, *lock, *words], timeout=_INSTALL_S)


def _unsafe(names: list[str]) -> list[str]:
    return [name for name in names if not _NAME.fullmatch(name)]
