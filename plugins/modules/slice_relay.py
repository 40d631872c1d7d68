#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""The gateway's way to the SSH port of a slice, closed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_relay
short_description: Close the SSH gateway's way to a slice
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - M(gpuaas.slice.slice_handover) opens the way by one line in the file of principals of the
    account C(gpuaas-relay).
  - O(state=absent) removes the line. The account stays.
  - O(state=removed) removes the account and its settings from a host that sells no slices any more.
  - Refuses with C(relay_account_foreign) and C(relay_in_use).
options:
  allocation_id:
    description: The allocation, a UUID with dashes. Required with O(state=absent).
    type: str
  state:
    description: Whether only the line of the allocation goes, or the account.
    type: str
    choices: [absent, removed]
    required: true
seealso:
  - module: gpuaas.slice.slice_handover
  - module: gpuaas.slice.managed_key
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Close the way before the slice is stopped
  gpuaas.slice.slice_relay:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    state: absent

- name: Take the gateway's account from a host without slices
  gpuaas.slice.slice_relay:
    state: removed
"""

RETURN = r"""
relay:
  description: Whether the gateway reaches the guest.
  returned: always
  type: dict
  sample: {open: true}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _relay


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str"},
            "state": {"type": "str", "choices": ["absent", "removed"], "required": True},
        },
        required_if=[("state", "absent", ("allocation_id",))],
        supports_check_mode=True,
    )
    _change.run(module, _relay.SUBJECT)


if __name__ == "__main__":
    main()
