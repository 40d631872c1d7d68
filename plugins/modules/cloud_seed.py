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
    description:
      - Whether the seed exists.
      - With V(detached) it is removed from the definition of the allocation's domain, overwritten,
        deleted, and unplugged from the running guest. A guest that does not take part in the
        unplugging is a warning and keeps a disk of zeros until it is powered off.
    type: str
    choices: [present, detached, absent]
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

- name: Destroy it once the guest has read it
  gpuaas.slice.cloud_seed:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    state: detached

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
seed:
  description: Whether the file is gone, and whether a restart or the running guest has the disk.
  returned: with O(state=detached)
  type: dict
  sample: {destroyed: true, in_definition: false, in_guest: false}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _cloud_seed,
    _domain,
    _libvirt,
)


@dataclass(frozen=True)
class State:
    """digest: of the existing seed, None without a seed. defined, plugged: whether the domain's
    definition and the running guest have it; read for `detached` only.
    """

    digest: str | None
    defined: bool = False
    plugged: bool = False


def observe(params: _change.Params) -> State:
    _not_late(params)
    path = _object_names.seed_path(params["allocation_id"])
    digest = _cloud_seed.present(path)
    name = _object_names.domain_name(params["allocation_id"])
    life = _libvirt.states().get(name) if params["state"] == "detached" else None
    if life is None:
        return State(digest)
    live = life.active and path in _domain.parse(_libvirt.definition(name, live=True))["seed"]
    return State(digest, path in _domain.parse(_libvirt.definition(name))["seed"], live)


def plan(params: _change.Params, state: State) -> _change.Plan:
    path = _object_names.seed_path(params["allocation_id"])
    if params["state"] == "present":
        digest = _cloud_seed.digest(_content(params))
        steps = [_change.Step("write_seed", path, state.digest, digest)]
        return _change.Plan(tuple(steps) if state.digest != digest else ())
    name = _object_names.domain_name(params["allocation_id"])
    steps = []
    if state.defined:
        steps.append(_change.Step("forget_seed", f"{name} definition", path, ""))
    if state.digest is not None:
        remove = "remove_seed" if params["state"] == "absent" else "destroy_seed"
        steps.append(_change.Step(remove, path, state.digest, None))
    if state.plugged:
        steps.append(_change.Step("unplug_seed", f"{name} disks", path, "", soft=True))
    return _change.Plan(tuple(steps))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    _not_late(params)
    name = _object_names.domain_name(params["allocation_id"])
    if step.name == "write_seed":
        _cloud_seed.make(step.subject, _content(params))
    elif step.name == "forget_seed":
        _libvirt.forget_disk(name, step.before)
    elif step.name == "unplug_seed":
        _libvirt.unplug_disk(name, step.before)
    elif step.name == "destroy_seed":
        _cloud_seed.destroy(step.subject)
    else:
        _host.remove(step.subject)
    return None


def _not_late(params: _change.Params) -> None:
    # A seed that a late run leaves behind belongs to no allocation, so it would never be removed.
    if params["state"] != "absent":
        _ledger.check_each(params.get("slots") or ())


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    gone = state.digest is None
    evidence = {"destroyed": gone, "in_definition": state.defined, "in_guest": state.plugged}
    return {
        "path": _object_names.seed_path(params["allocation_id"]),
        "present": not gone,
        **({"seed": evidence} if params["state"] == "detached" else {}),
    }


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
            "state": {
                "type": "str",
                "choices": ["present", "detached", "absent"],
                "default": "present",
            },
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
