#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Plan of the bootstrap of a slice host, and its comparison with a plan that a person confirmed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bootstrap_plan
short_description: Plan of the bootstrap of a slice host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Shows what the playbook bootstrap would change on this host, part by part; reads only.
  - Refuses with C(plan_changed) when O(expected) is the digest of another plan than the present
    one.
options:
  profile:
    description: The hardware profile.
    type: dict
    required: true
  api_names:
    description: Address by name of the control plane's API.
    type: dict
    default: {}
  expected:
    description: Digest of the confirmed plan; empty for any plan.
    type: str
    default: ""
seealso:
  - module: gpuaas.slice.host_idle
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: Show what bootstrap will change
  gpuaas.slice.bootstrap_plan:
    profile: "{{ lookup('ansible.builtin.file', 'profiles/lab.yml') | from_yaml }}"
  register: plan
"""

RETURN = r"""
plan:
  description: Parts in order, each with its steps, and the code of the reason why it cannot be
    planned yet.
  returned: success
  type: list
  elements: dict
  sample: [{part: packages, steps: "install_package(zstd)", open: ""}]
digest:
  description: Digest of all steps with their contents, and of the reasons for a restart.
  returned: success
  type: str
boot:
  description: Identity of the host, arguments of the running kernel and of the next, and reasons
    for a restart.
  returned: success
  type: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _deploy_bootstrap
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


def look(params: _change.Params) -> dict[str, Any]:
    profile = {**params["profile"], "api_names": params["api_names"]}
    document = _deploy_bootstrap.forecast(profile)
    if params["expected"] not in ("", document["digest"]):
        raise Refusal(
            "plan_changed",
            expected=f"the host as in the plan {params['expected']}",
            found=f"a host that would be changed by the plan {document['digest']}",
            remedy="nothing was done; look at the new plan: `gpuaas nodes onboard`",
        )
    return document


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "dict", "required": True},
            "api_names": {"type": "dict", "default": {}},
            "expected": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
