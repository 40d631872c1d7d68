"""Names of the control plane on a host: a managed block of /etc/hosts, and a check of each address.

For a site whose DNS does not resolve them. Enrolment and all later API calls need these names.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _managed_block,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

HOSTS = "/etc/hosts"
# If cloud-init manages /etc/hosts, it rewrites the file from this template at every boot.
TEMPLATE = "/etc/cloud/templates/hosts.debian.tmpl"
# A control plane that takes longer to answer is not usable in practice.
PATIENCE_S = 3.0

_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """files: content of the files that must contain the block."""

    files: Mapping[str, str]


def observe(_params: Params) -> State:
    hosts = _text(HOSTS)
    managed = "manage_etc_hosts" in hosts and _host.path(TEMPLATE).is_file()
    return State({HOSTS: hosts} | ({TEMPLATE: _text(TEMPLATE)} if managed else {}))


def plan(params: Params, state: State) -> _change.Plan:
    names: Mapping[str, str] = params["names"]
    blockers = (*_unsafe(names), *_taken(names, state))
    steps = [
        _change.Step("write_block", path, _shown(_managed_block.block_of(text)), _block(names))
        for path, text in state.files.items()
        if _managed_block.block_of(text) != _block(names)
    ]
    return _change.Plan(tuple(steps), blockers)


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    _host.write(step.subject, _managed_block.with_block(_text(step.subject), step.after))
    return None


def facts(params: Params, _state: State) -> dict[str, Any]:
    return {"resolved": {name: addresses(name) for name in params["names"]}}


SUBJECT = _change.Subject(observe, plan, apply, facts)


def addresses(name: str) -> list[str]:
    """Addresses of the name from this host's resolver; [] when it does not resolve."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def unreachable(address: str, port: int) -> str:
    """Reason why the address does not answer, or "". A refused connection is an answer: the address
    is right.
    """
    try:
        with socket.create_connection((address, port), timeout=PATIENCE_S):
            return ""
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return f"no answer from {address} port {port} within {PATIENCE_S:g} s"
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return f"no route to host {address}"
        return f"{address} port {port}: {error.strerror or error}"


def _block(names: Mapping[str, str]) -> str:
    if not names:
        return ""
    rows = [f"{address}\t{name}" for name, address in sorted(names.items())]
    return _managed_block.render(rows)


def _unsafe(names: Mapping[str, str]) -> list[Refusal]:
    problems = [f"name {name!r}" for name in names if not _NAME.fullmatch(name)]
    for address in names.values():
        try:
            ipaddress.ip_address(address)
        except ValueError:
            problems.append(f"address {address!r}")
    return [
        Refusal(
            "api_name_invalid",
            expected="host names in lower case, each with one IP address",
            found=problem,
            remedy="correct slice_api_names",
        )
        for problem in problems
    ]


def _taken(names: Mapping[str, str], state: State) -> list[Refusal]:
    """Names that occur outside the managed block. The first line with a name wins, so the other
    entry would stay in force.
    """
    blockers = []
    for path, text in state.files.items():
        for row in _managed_block.without_block(text).splitlines():
            words = row.partition("#")[0].split()
            blockers += [
                Refusal(
                    "api_name_taken",
                    expected=f"{name} in {path} for {names[name]} or not at all",
                    found=_shown(row.strip()),
                    remedy="remove that line, or leave the name out of slice_api_names",
                )
                for name in words[1:]
                if name in names and words[0] != names[name]
            ]
    return blockers


def _text(absolute: str) -> str:
    # Unmodified text, so that the site's lines are preserved. An unreadable file is not
    # overwritten.
    if _host.kept(absolute) is None:
        return ""
    return _host.path(absolute).read_bytes().decode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    """Text with undecodable bytes escaped, because a result must not contain them."""
    return text.encode(errors="replace").decode()
