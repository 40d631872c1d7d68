"""Packages of a slice host: a single query to dpkg, and apt only for missing packages.

Optional packages are installed if apt offers them, and reported if not. An optional package that
apt offers but cannot install is a warning and stops nothing.
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

# Commands that the collection's modules call on a slice host, and the runtime of a slice VM.
REQUIRED = (
    "conntrack",
    "dnsmasq",
    "dnsmasq-utils",
    "genisoimage",
    "gpg",
    "iproute2",
    "iptables",
    "nftables",
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
    """offered: optional packages that apt could install and that are not installed."""

    installed: frozenset[str]
    offered: frozenset[str] = frozenset()


def observe(params: Params) -> State:
    names = [*params["packages"], *_optional(params)]
    if not names or _unsafe(names):
        return State(frozenset())
    installed = _installed(names)
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
    # If apt's lists are refreshed anyway, they may offer more packages than the current lists.
    sought = [
        name
        for name in optional
        if name not in state.installed and (missing or name in state.offered)
    ]
    if sought:
        # apt may offer a package that it cannot install, because it is held or its dependencies are
        # broken.
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
            # Record only packages that were installed. Otherwise a restore would treat another
            # package's service as this collection's. Some packages may be installed before apt
            # fails.
            _remember(sorted(_installed(names)))
    return {"installed": names, "unavailable": [n for n in step.after if n not in offered]}


def install(names: Sequence[str], *, settings: Sequence[str] = ()) -> None:
    """Record and install packages; the caller has refreshed apt's lists. settings: apt's own."""
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
    """Record installed packages. A restore reads the record, because a service that came with such
    a package did not exist before.
    """
    new = dict.fromkeys(names, "installed")
    if not new:
        return
    for remember in _host_snapshot.remember_steps(RECORD, _host_snapshot.recall(RECORD), new):
        _host_snapshot.apply(remember)


def _installed(names: Sequence[str]) -> frozenset[str]:
    form = "--showformat=${db:Status-Status} ${Package}\\n"
    # Exit code 1: dpkg does not know some of the packages, which is a valid answer.
    out = _command.run(["dpkg-query", "--show", form, "--", *names], ok=(0, 1)).out
    rows = (row.partition(" ") for row in out.splitlines())
    return frozenset(name for status, _blank, name in rows if status == "installed")


def _optional(params: Params) -> list[str]:
    return [name for name in params.get("optional") or () if name not in params["packages"]]


def _unsafe(names: list[str]) -> list[str]:
    return [name for name in names if not _NAME.fullmatch(name)]
