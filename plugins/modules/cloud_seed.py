#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""The cloud-init seed of one allocation's guest."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cloud_seed
short_description: The cloud-init seed of one allocation's guest
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Writes a NoCloud ISO (label C(cidata)) with user-data, meta-data and network-config.
  - The documents are data and rendered here, never by a template, so no text of a tenant can add
    a key.
  - The file is readable by root only; libvirt gives it to the guest's QEMU while that runs.
  - Refuses with C(spec_invalid), C(stale_fence).
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  state:
    description: Whether the seed exists.
    type: str
    choices: [present, absent]
    default: present
  user_data:
    description:
      - The cloud-config document as JSON. Required with O(state=present).
      - Never shown, neither in results nor in logs.
    type: json
  meta_data:
    description: The meta-data document, with C(instance-id) and C(local-hostname).
    type: dict
    default: {}
  network_config:
    description: The network-config document, version 2. Interfaces are matched by MAC.
    type: dict
    default: {}
  slots:
    description: >-
      The allocation's slots with C(slot_id) and C(fence); nothing is made under a fence older than
      the highest that the host has seen. Without slots no fence is checked.
    type: list
    elements: dict
    default: []
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Write the seed
  gpuaas.slice.cloud_seed:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    user_data: "{{ {'users': [{'name': 'ada', 'ssh_authorized_keys': keys}]} | to_json }}"
    meta_data: {instance-id: 23bd713b-6073-4ef7-8a51-2897e902365d, local-hostname: trainer}
    network_config:
      version: 2
      ethernets: {management: {match: {macaddress: "52:54:00:64:00:0a"}, dhcp4: true}}

- name: Remove it
  gpuaas.slice.cloud_seed:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    state: absent
"""

RETURN = r"""
path:
  description: Path of the seed, also when it does not exist.
  returned: always
  type: str
  sample: /var/lib/gpuaas/seeds/gpuaas-slice-23bd713b60734ef78a512897e902365d.iso
present:
  description: Whether the seed exists.
  returned: always
  type: bool
"""

import json
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _cloud_seed


def observe(params: _change.Params) -> str | None:
    """Digest of the existing seed; None without a seed."""
    _not_late(params)
    return _cloud_seed.present(_object_names.seed_path(params["allocation_id"]))


def plan(params: _change.Params, state: str | None) -> _change.Plan:
    path = _object_names.seed_path(params["allocation_id"])
    if params["state"] == "absent":
        steps = [_change.Step("remove_seed", path, state, None)] if state is not None else []
        return _change.Plan(tuple(steps))
    digest = _cloud_seed.digest(_content(params))
    if state == digest:
        return _change.Plan()
    return _change.Plan((_change.Step("write_seed", path, state, digest),))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    _not_late(params)
    if step.name == "write_seed":
        _cloud_seed.make(step.subject, _content(params))
    else:
        _host.remove(step.subject)
    return None


def _not_late(params: _change.Params) -> None:
    # A seed that a late run leaves behind belongs to no allocation, so it would never be removed.
    if params["state"] == "present":
        _ledger.check_each(params.get("slots") or ())


def facts(params: _change.Params, state: str | None) -> dict[str, Any]:
    path = _object_names.seed_path(params["allocation_id"])
    return {"path": path, "present": state is not None}


def _content(params: _change.Params) -> dict[str, str]:
    try:
        user_data = json.loads(params["user_data"])
    except ValueError as error:
        # The text itself is secret, so the error names only the position.
        raise _object_names.invalid("user_data", "a JSON object", str(error)) from error
    if not isinstance(user_data, Mapping):
        raise _object_names.invalid("user_data", "a JSON object", type(user_data).__name__)
    return _cloud_seed.files(user_data, params["meta_data"], params["network_config"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "user_data": {"type": "json", "no_log": True},
            "meta_data": {"type": "dict", "default": {}},
            "network_config": {"type": "dict", "default": {}},
            "slots": {"type": "list", "elements": "dict", "default": []},
        },
        required_if=[("state", "present", ("user_data",))],
        supports_check_mode=True,
    )
    # Ansible hides every single value of a dictionary, also where it is a part of the path that the
    # next task needs. Nothing here shows the content, so hiding the whole text is enough.
    module.no_log_values = {text} if (text := module.params["user_data"]) else set()
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
