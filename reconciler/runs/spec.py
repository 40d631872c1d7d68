"""Specification of a run: a playbook, a node and complete variables; and the errors of runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.model.errors import Refusal

# These values reach the inventory, where Ansible expands templates, and SSH's command line.
# So none of them may contain a brace or a space, or begin with a dash.
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PLAYBOOK = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:%-]{0,252}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_HOST_KEY = re.compile(r"[a-z0-9@.-]{1,64} [A-Za-z0-9+/=]{1,8000}")
PYTHON = "/usr/bin/python3"
# The node of a run by hand on a host without a record; modules know it too.
BY_HAND = "by-hand"
# Longer than the longest useful run, which overwrites eight disks in turn. A run that
# exceeds it is ended.
LONGEST_S = 2 * 86_400
_CORRELATION = re.compile(r"[A-Za-z0-9._:-]{0,128}")


class RunError(Refusal):
    """An operation on a run that cannot be carried out."""


class SpecError(RunError):
    """A run specification that is invalid, or that differs from the first under its id."""


class LauncherAway(RunError):
    """The launcher did not answer and nothing was started: try again later."""


@dataclass(frozen=True)
class NodeAccess:
    """Where a node's machine answers. `address` is the transport address, never a display name.

    revoked: host keys that the node may no longer use, whatever certificate they have.
    """

    node_id: str
    address: str
    port: int = 22
    user: str = "root"
    revoked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _match("node_id", _IDENTIFIER, self.node_id)
        _match("address", _ADDRESS, self.address)
        _match("user", _USER, self.user)
        for key in self.revoked:
            _match("revoked", _HOST_KEY, key)
        if not 1 <= self.port <= 65535:
            raise _refuse("port", "1 to 65535", self.port)


@dataclass(frozen=True)
class RunSpec:
    """A run with all its values. A run_id always means the same run."""

    run_id: str
    playbook: str
    node: NodeAccess
    variables: Mapping[str, Any]
    deadline_s: int
    correlation_id: str

    def __post_init__(self) -> None:
        _match("run_id", _RUN_ID, self.run_id)
        _match("playbook", _PLAYBOOK, self.playbook)
        _match("correlation_id", _CORRELATION, self.correlation_id)
        if not 1 <= self.deadline_s <= LONGEST_S:
            raise _refuse("deadline_s", f"1 to {LONGEST_S} seconds", self.deadline_s)
        identity = self.variables.get("slice_run")
        if isinstance(identity, Mapping):
            expected = {
                "id": self.run_id,
                "node_id": self.node.node_id,
                "correlation_id": self.correlation_id,
            }
            for key, value in expected.items():
                if identity.get(key) != value:
                    raise _refuse(f"variables.slice_run.{key}", value, identity.get(key))

    @property
    def log_tag(self) -> str:
        """The tag of each module's line in the host's syslog."""
        return f"run={self.run_id} correlation_id={self.correlation_id}"

    def fingerprint(self) -> str:
        """Equal for two specifications of the same work on the same node."""
        meaning = [self.playbook, self.node.node_id, dict(self.variables)]
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


def _match(field: str, pattern: re.Pattern[str], value: str) -> None:
    if not pattern.fullmatch(value):
        raise _refuse(field, f"text like {pattern.pattern}", value)


def _refuse(field: str, expected: str, found: object) -> SpecError:
    return SpecError(
        "spec_invalid",
        expected=f"{field}: {expected}",
        found=repr(found)[:200],
        remedy="correct the record that this value comes from; nothing was started",
    )
