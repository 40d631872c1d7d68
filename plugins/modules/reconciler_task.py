#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Work that the reconciler does, with its fence and audit row, followed to its end."""

from __future__ import annotations

DOCUMENTATION = r"""
module: reconciler_task
short_description: Have the reconciler work on a node or an allocation
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Starts an action of the reconciler through its API and waits for its end. The reconciler runs
    the playbook, so that the work has a fence and a row in the audit log.
  - Runs on the machine that calls Ansible, for example as C(hosts=localhost).
  - Fails with the reconciler's own refusal, with the error of the task, or with C(not_proven) when
    the task left something open.
options:
  action:
    description:
      - The action. V(drain), V(maintain) and V(resume) change the state of a node and end at once.
      - V(approve) approves the complete candidates of the discovery O(discovery) as slots.
      - V(recover) opens the recovery of an allocation, or follows the open one.
      - V(netbox_diff) and V(maas_diff) compare; V(netbox_sync) writes the differences; V(maas_sync)
        uploads the scripts that MAAS runs and adds tagged machines as nodes.
    type: str
    required: true
    choices:
      - bootstrap
      - discover
      - approve
      - bind
      - parity
      - drift
      - convert
      - drain
      - maintain
      - resume
      - recover
      - netbox_diff
      - netbox_sync
      - maas_diff
      - maas_sync
  subject:
    description: Id of the node; with V(recover) of O(action), of the allocation.
    type: str
    default: ""
  reason:
    description: Kept in the audit log; ten characters or more.
    type: str
    required: true
  to:
    description: The mode to convert to.
    type: str
    choices: [slice, baremetal]
  allow_reboot:
    description: Whether V(bootstrap) and V(convert) of O(action) may restart the host.
    type: bool
    default: false
  discovery:
    description:
      - Number of the discovery that a person has seen. V(approve) of O(action) is refused with
        C(discovery_changed) when the host was discovered again since.
    type: int
  key:
    description:
      - Idempotency key. The same key starts the work once, however often the module runs. Unset, a
        new key.
    type: str
  url:
    description: Address of the reconciler. Unset, the variable C(GPUAAS_API).
    type: str
  token_file:
    description: File with a token of the role platform-admin. Unset, C(GPUAAS_TOKEN_FILE).
    type: path
  ca_file:
    description: PEM file of the only CA that is accepted. Unset, C(GPUAAS_CA_FILE).
    type: path
  wait_timeout:
    description: Seconds to wait for the end. The work goes on by itself after that.
    type: int
    default: 14400
attributes:
  check_mode:
    description: Asks the reconciler nothing and reports a change.
    support: full
  diff_mode:
    description: The reconciler decides what changes.
    support: none
requirements:
  - Python 3.11 on the machine that asks
seealso:
  - plugin: gpuaas.slice.reconciler
    plugin_type: inventory
"""

EXAMPLES = r"""
- name: Prove a host again
  gpuaas.slice.reconciler_task:
    action: parity
    subject: node-1
    reason: nightly check

- name: Bring back the slots of a failed allocation
  gpuaas.slice.reconciler_task:
    action: recover
    subject: 23bd713b-6073-4ef7-8a51-2897e902365d
    reason: the tenant has left, ticket 4711
"""

RETURN = r"""
answer:
  description: The ended task, the node, the recovery case or the comparison.
  returned: when the reconciler answered
  type: dict
discovery:
  description: Number of the node's latest discovery, after V(discover).
  returned: when the action is C(discover)
  type: int
candidates:
  description: Candidates of that discovery, with slot index, devices and codes of blockers.
  returned: when the action is C(discover)
  type: list
  elements: dict
"""

import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule, env_fallback
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._service import (
    Service,
    credential,
    refuse,
)

Record = dict[str, Any]

# Seconds for one request, and between two looks at a task.
_REQUEST_S = 30
_PAUSE_S = 2.0
_POSTS = 3
_ENDED = ("succeeded", "failed", "canceled", "lost")
_NODE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_ALLOCATION = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DISCOVERY = "slice-topology/discovery"
# Paths of a node's actions.
_PATHS = {
    "bootstrap": "bootstrap",
    "discover": _DISCOVERY,
    "bind": "bind-topology",
    "parity": "parity",
    "drift": "drift",
    "convert": "conversion",
    "drain": "drain",
    "maintain": "maintain",
    "resume": "resume",
}
_NOT_YET = ("reconciler_silent", "netbox_reading_not_found", "maas_reading_not_found")
# What a task that has succeeded may have left open.
_OPEN = ("failures", "closed", "differences", "unknown")


class Reconciler:
    """The API. Requests that change something carry an idempotency key, and are repeated."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        self._service = Service(
            "reconciler", params["url"] or "", params["ca_file"] or "", _REQUEST_S, "token_file"
        )

    def get(self, path: str) -> Record:
        return self._ask("GET", path, {}, None)

    def post(self, path: str, body: Record) -> Record:
        headers = {"Idempotency-Key": self._params["key"] or str(uuid.uuid4())}
        for left in reversed(range(_POSTS)):
            try:
                return self._ask("POST", path, headers, body)
            except Refusal as refusal:
                if refusal.code != "reconciler_silent" or not left:
                    raise
            time.sleep(_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def until(self, path: str, done: Callable[[Record], bool]) -> Record:
        """The document once it is done. A reconciler that restarts is asked again."""
        ends = time.monotonic() + self._params["wait_timeout"]
        document: Record = {}
        while time.monotonic() < ends:
            try:
                document = self.get(path)
                if done(document):
                    return document
            except Refusal as refusal:
                if refusal.code not in _NOT_YET:
                    raise
            time.sleep(_PAUSE_S)
        state = str(document.get("state") or "no answer")
        remedy = "the work goes on by itself; look at it with gpuaas"
        raise refuse("task_timeout", f"an end of {path} in time", state, remedy)

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: Record | None
    ) -> Record:
        token = credential(self._params["token_file"], "reconciler")
        headers = {**headers, "Authorization": f"Bearer {token}"}
        answer = self._service.converse(lambda ask: ask(method, f"/api/v1{path}", headers, body))
        if not isinstance(answer, dict):
            raise refuse("reconciler_invalid", f"a document from {path}", answer, "check url")
        return answer


def act(params: Mapping[str, Any]) -> Record:
    """Carry out the action; returns the module's values."""
    try:
        return _act(params)
    except (AttributeError, KeyError, TypeError, ValueError) as broken:
        text = f"{type(broken).__name__}: {broken}"
        remedy = "check url, and compare the versions of collection and reconciler"
        expected = "answers in the form of the reconciler's API"
        raise refuse("reconciler_invalid", expected, text, remedy) from broken


def _act(params: Mapping[str, Any]) -> Record:
    action, subject, reason = params["action"], params["subject"], params["reason"].strip()
    if len(reason) < 10:
        raise refuse("reason_missing", "a reason of ten characters or more", reason, "say why")
    pattern = _ALLOCATION if action == "recover" else _NODE
    service, _separator, verb = action.partition("_")
    if not verb and not pattern.fullmatch(subject):
        expected = f"an id of {'an allocation' if action == 'recover' else 'a node'} as subject"
        raise refuse("subject_invalid", expected, subject, "copy the id from gpuaas")
    reconciler = Reconciler(params)
    if verb:
        return {"answer": _compare(reconciler, f"/admin/{service}", verb, reason)}
    if action == "recover":
        return {"answer": _recover(reconciler, f"/admin/allocations/{subject}", reason)}
    path = f"/admin/nodes/{subject}"
    if action == "approve":
        return {"answer": _approve(reconciler, path, params["discovery"], reason)}
    body: Record = {"reason": reason}
    if action in ("bootstrap", "convert"):
        body["allow_reboot"] = params["allow_reboot"]
    if action == "convert":
        body["to"] = params["to"]
    answer = reconciler.post(f"{path}/{_PATHS[action]}", body)
    if action in ("drain", "maintain", "resume"):
        return {"answer": answer}
    task = _follow(reconciler, answer["id"])
    if action == "discover":
        latest = reconciler.get(f"{path}/{_DISCOVERY}")
        return {"answer": task, "discovery": latest["id"], "candidates": _shown(latest)}
    return {"answer": task}


def _follow(reconciler: Reconciler, task_id: str) -> Record:
    """The last task of the chain that begins with this one."""
    following: str | None = task_id
    task: Record = {}
    chain: list[str] = []
    while following:
        if following in chain:
            raise ValueError(f"task {following} follows on itself")
        chain.append(following)
        path = f"/admin/tasks/{following}"
        task = reconciler.until(path, lambda document: document.get("state") in _ENDED)
        if task["state"] != "succeeded":
            error = task.get("error") or {}
            raise refuse(
                str(error.get("code") or f"task_{task['state']}"),
                str(error.get("expected") or "a task that succeeds"),
                str(error.get("found") or f"task {following} {task['state']}"),
                str(error.get("remedy") or f"gpuaas tasks show {following}"),
            )
        following = task["result"].get("next_task_id")
    left = {name: task["result"][name] for name in _OPEN if task["result"].get(name)}
    if left:
        remedy = f"gpuaas tasks show {task['id']}"
        raise refuse("not_proven", "a task that leaves nothing open", left, remedy)
    return task


def _recover(reconciler: Reconciler, path: str, reason: str) -> Record:
    reconciler.post(f"{path}/recover", {"reason": reason})

    def done(case: Record) -> bool:
        waits = case.get("waits_for") or {}
        return case.get("state") in ("recovered", "failed") or bool(waits.get("remedy"))

    case = reconciler.until(f"{path}/recovery", done)
    if case["state"] == "recovered":
        return case
    if case["state"] == "failed":
        raise Refusal(**{part: str(case["failure"][part]) for part in Refusal.PARTS})
    waits = case["waits_for"]
    expected = "a recovery that goes on"
    raise refuse(str(waits["code"]), expected, str(waits["detail"]), str(waits["remedy"]))


def _approve(reconciler: Reconciler, path: str, discovery: int | None, reason: str) -> Record:
    latest = reconciler.get(f"{path}/{_DISCOVERY}")
    if discovery is None or latest.get("id") != discovery:
        expected = f"discovery {discovery} to be the latest"
        remedy = "look at the newest candidates and approve those"
        raise refuse("discovery_changed", expected, str(latest.get("id")), remedy)
    bundles = [row["bundle"] for row in latest["document"]["candidates"] if not row["blockers"]]
    if not bundles:
        remedy = "gpuaas nodes discover shows the blockers"
        raise refuse("candidate_not_found", "a candidate without blockers", "none", remedy)
    return reconciler.post(f"{path}/resource-slots", {"slots": bundles, "reason": reason})


def _compare(reconciler: Reconciler, path: str, verb: str, reason: str) -> Record:
    number = reconciler.post(f"{path}/{verb}", {"reason": reason})["request_number"]
    reading = reconciler.until(path, lambda document: document.get("request_number", 0) >= number)
    if reading["error"]:
        raise Refusal(**{part: str(reading["error"][part]) for part in Refusal.PARTS})
    return reading


def _shown(latest: Record) -> list[Record]:
    return [
        {
            "slot_index": row["slot_index"],
            "gpu": row["bundle"].get("gpu_pci_address"),
            "disk": row["bundle"].get("nvme_device"),
            "blockers": [blocker["code"] for blocker in row["blockers"]],
        }
        for row in latest["document"]["candidates"]
    ]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "action": {
                "type": "str",
                "required": True,
                "choices": [
                    *("bootstrap", "discover", "approve", "bind", "parity", "drift", "convert"),
                    *("drain", "maintain", "resume", "recover", "netbox_diff", "netbox_sync"),
                    *("maas_diff", "maas_sync"),
                ],
            },
            "subject": {"type": "str", "default": ""},
            "reason": {"type": "str", "required": True},
            "to": {"type": "str", "choices": ["slice", "baremetal"]},
            "allow_reboot": {"type": "bool", "default": False},
            "discovery": {"type": "int"},
            "key": {"type": "str", "no_log": False},
            "url": {"type": "str", "fallback": (env_fallback, ["GPUAAS_API"])},
            "token_file": {"type": "path", "fallback": (env_fallback, ["GPUAAS_TOKEN_FILE"])},
            "ca_file": {"type": "path", "fallback": (env_fallback, ["GPUAAS_CA_FILE"])},
            "wait_timeout": {"type": "int", "default": 14400},
        },
        required_if=[("action", "convert", ["to"]), ("action", "approve", ["discovery"])],
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=True)
    try:
        module.exit_json(changed=True, **act(module.params))
    except Refusal as refusal:
        module.fail_json(msg=str(refusal), error=refusal.document())


if __name__ == "__main__":
    main()
