"""Packages of a slice host: one query to dpkg, and apt only for what is missing.

Those that a host can do without are installed where its apt has them, and named where it has not.
One that apt has and cannot install is a doubt, and stops nothing either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _apt
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

RECORD = _host_snapshot.PACKAGES

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

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """offered: optional ones that are not installed, and that apt could install."""

    installed: frozenset[str]
    offered: frozenset[str] = frozenset()


def observe(params: Params) -> State:
    wanted = [*params["packages"], *_optional(params)]
    if not wanted or _unsafe(wanted):
        return State(frozenset())
    installed = _installed(wanted)
    return State(installed, _apt.offered([n for n in _optional(params) if n not in installed]))


def plan(params: Params, state: State) -> _change.Plan:
    optional = _optional(params)
    bad = _unsafe([*params["packages"], *optional])
    if bad:
        refusal = Refusal(
            "package_invalid",
            expected="names of packages",
            found=", ".join(map(repr, bad)),
            remedy="correct the list of packages",
        )
        return _change.Plan(blockers=(refusal,))
    steps = []
    missing = [name for name in params["packages"] if name not in state.installed]
    if missing:
        steps.append(_change.Step("install_packages", "packages", [], missing))
    # Where apt's lists are read anew anyway they may offer more than those of now.
    sought = [
        name
        for name in optional
        if name not in state.installed and (missing or name in state.offered)
    ]
    if sought:
        # apt may have one and be unable to install it: it is held, or what it needs is broken.
        steps.append(_change.Step("install_optional", "optional packages", [], sought, soft=True))
    return _change.Plan(tuple(steps))


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    _apt.run("update")
    if step.name == "install_packages":
        install(step.after)
        return {"installed": step.after}
    offered = _apt.offered(step.after)
    names = [name for name in step.after if name in offered]
    if names:
        try:
            _get(names)
        finally:
            # Only what came: the way back would take the service of any other for one of ours. Some
            # may have come before apt failed.
            _remember(sorted(_installed(names)))
    return {"installed": names, "unavailable": [n for n in step.after if n not in offered]}


def install(names: Sequence[str], *, settings: Sequence[str] = ()) -> None:
    """Have apt install them, by lists that were read anew. settings: apt's own."""
    _remember(names)
    _get(names, settings)


def facts(params: Params, state: State) -> dict[str, Any]:
    there = state.installed | state.offered
    return {
        "installed": sorted(state.installed),
        "unavailable": sorted(name for name in _optional(params) if name not in there),
    }


SUBJECT = _change.Subject(observe, plan, apply, facts)


def _get(names: Sequence[str], settings: Sequence[str] = ()) -> None:
    words = ["install", "--yes", "--no-install-recommends", "--", *names]
    _apt.run(*words, settings=settings)


def _remember(names: Iterable[str]) -> None:
    """A service that came with a package of ours was not there before; the way back asks."""
    new = dict.fromkeys(names, "installed")
    if not new:
        return
    for remember in _host_snapshot.remember_steps(RECORD, _host_snapshot.recall(RECORD), new):
        _host_snapshot.apply(remember)


def _installed(names: Sequence[str]) -> frozenset[str]:
    form = "--showformat=${db:Status-Status} ${Package}\\n"
    # 1 says that some are unknown to dpkg, which is an answer.
    out = _command.run(["dpkg-query", "--show", form, "--", *names], ok=(0, 1)).out
    rows = (row.partition(" ") for row in out.splitlines())
    return frozenset(name for status, _blank, name in rows if status == "installed")


def _optional(params: Params) -> list[str]:
    return [name for name in params.get("optional") or () if name not in params["packages"]]


def _unsafe(names: list[str]) -> list[str]:
    return [name for name in names if not _NAME.fullmatch(name)]
