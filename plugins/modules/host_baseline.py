#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""State of a machine before its tenant came, and differences since."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_baseline
short_description: State of a machine before its tenant came, and differences since
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Looks at accounts, groups, SSH keys, files that are read at login, at boot and at set times,
    programs outside of packages, listening sockets, mounts, homes, packages and kernel modules.
    Files are compared by digest, so the result holds no secret.
  - V(recorded) keeps the first look for an allocation on the host and returns it again, so that a
    repeated provision never takes the tenant's own changes for the state before.
  - V(compared) compares with O(baseline), which the caller kept. A tenant with root could change
    the record on the host, so it is only removed then. A damaged record is reported as drift.
  - Refuses with C(stale_fence), C(ledger_unreadable), C(baseline_unreadable),
    C(allocation_id_invalid).
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  fence:
    description: >-
      The fence of the node's claim. A late run would leave a record behind that is never removed.
    type: int
    required: true
  state:
    description: Whether to record or to compare.
    type: str
    choices: [recorded, compared]
    default: recorded
  baseline:
    description: >-
      What V(recorded) returned. With V(compared) and no baseline there is nothing to compare, and
      RV(compared) is false.
    type: dict
seealso:
  - module: gpuaas.slice.baremetal_lease
  - module: gpuaas.slice.baremetal_tenant
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Record the state of the machine
  gpuaas.slice.host_baseline:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    fence: 3
  register: before

- name: List the differences
  gpuaas.slice.host_baseline:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    fence: 4
    state: compared
    baseline: "{{ before.baseline }}"
"""

RETURN = r"""
baseline:
  description: The first look for the allocation.
  returned: with O(state=recorded)
  type: dict
  sample: {accounts: {root: 0f343b0931126a20}, listening: {tcp 22 00000000: listening}}
drift:
  description: >-
    Differences. C(access) is true for those that can admit a user or run a program later.
  returned: with O(state=compared)
  type: list
  elements: dict
  sample: [{section: keys, name: /root/.ssh/authorized_keys, change: changed, access: true}]
compared:
  description: Whether there was something to compare with.
  returned: with O(state=compared)
  type: bool
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _host_baseline

Sections = dict[str, dict[str, str]]

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class State:
    """kept: the first look, as the host remembers it. now, there, broken: with O(state=compared).

    there: whether anything is at the path of the host's record. broken: it is not a record.
    problems: reasons why this run may not act.
    """

    kept: Sections | None = None
    now: Sections = field(default_factory=dict)
    there: bool = False
    broken: bool = False
    problems: tuple[Refusal, ...] = ()


def observe(params: _change.Params) -> State:
    file = _file(params["allocation_id"])
    problems = tuple(_ledger.load(_ledger.MACHINE).stale(params["fence"]))
    if params["state"] == "recorded":
        # A late run does not judge a record that belongs to a newer claim.
        return State(kept=None if problems else _kept(file), problems=problems)
    # The tenant may have changed the record, so nothing is compared with it.
    try:
        _kept(file)
        broken = False
    except (Refusal, RecursionError):
        broken = True
    there = _host.is_there(file)
    now = _host_baseline.take()
    return State(now=now, there=there, broken=there and broken, problems=problems)


def _kept(file: str) -> Sections | None:
    return _host.document(
        file,
        code="baseline_unreadable",
        remedy="a new baseline would record the tenant's changes as the earlier state: keep the "
        "file as evidence, inspect the host by hand, and remove it before the machine's release",
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    file = _file(params["allocation_id"])
    steps = []
    if params["state"] == "recorded" and state.kept is None:
        steps.append(_change.Step("record_baseline", file))
    if params["state"] == "compared" and state.there:
        steps.append(_change.Step("forget_baseline", file))
    return _change.Plan(tuple(steps), state.problems)


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    recorded = step.name == "record_baseline"
    text = json.dumps(_host_baseline.take(), sort_keys=True) + "\n" if recorded else ""
    # Taking the baseline is slow. The fence is raised under this lock, so an older run has written
    # its record before that, and the release that follows removes it.
    with _ledger.locked():
        _ledger.check(_ledger.MACHINE, params["fence"])
        if recorded:
            _host.write(step.subject, text, mode=0o600)
        else:
            _forget(step.subject)
    return None


def _forget(file: str) -> None:
    there = _host.path(file)
    if there.is_dir() and not there.is_symlink():
        shutil.rmtree(there)
    _host.remove(file)


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    if params["state"] == "recorded":
        return {"baseline": state.kept or {}}
    before = params["baseline"] or {}
    drift = _host_baseline.differences(before, state.now) if before else []
    return {"drift": drift, "compared": bool(before)}


def subject() -> _change.Subject:
    """Subject of a run. A damaged record is reported also after its removal."""
    broken: list[str] = []

    def look(params: _change.Params) -> State:
        state = observe(params)
        if state.broken:
            broken.append(_file(params["allocation_id"]))
        return state

    def drift_facts(params: _change.Params, state: State) -> dict[str, Any]:
        comparison = facts(params, state)
        rows = [
            {"section": "baseline", "name": file, "change": "changed", "access": False}
            for file in broken
        ]
        return {**comparison, "drift": [*rows, *comparison["drift"]]} if rows else comparison

    return _change.Subject(look, plan, apply, drift_facts)


def _file(allocation_id: str) -> str:
    if not _UUID.fullmatch(allocation_id):
        raise Refusal(
            "allocation_id_invalid",
            expected="a UUID in lower case, with dashes",
            found=repr(allocation_id),
            remedy="pass the id that the reconciler shows",
        )
    return f"{_host.STATE_DIRECTORY}/baseline/{allocation_id}.json"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "fence": {"type": "int", "required": True},
            "state": {"type": "str", "choices": ["recorded", "compared"], "default": "recorded"},
            "baseline": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    _change.run(module, subject())


if __name__ == "__main__":
    main()
