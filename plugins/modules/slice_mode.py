#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Slice mode of a host: the mark, without which no device is bound."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_mode
short_description: Mark a host as a slice host, or remove the mark
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Keeps C(/etc/gpuaas/slice-mode.json). Without it no device is bound to vfio-pci, now or at a
    boot, and with it no tenant of the whole machine is let in.
  - Putting a host into slice mode first ends the proofs of all its disks, because nothing records
    how they were used on an ordinary machine. Each disk must then be taken over again before it is
    given to a tenant. A host in slice mode keeps its proofs.
  - Refuses with C(machine_leased) while such a tenant has the machine, and with C(file_unreadable),
    C(ledger_unreadable), C(proof_unreadable) and C(erase_record_unreadable).
    O(state=absent) removes the mark even then, because a tenant cannot be released while it exists.
options:
  profile:
    description: Name of the hardware profile. Required with O(state=present).
    type: str
  state:
    description: Whether the host is for slices.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gpuaas.slice.slice_remnants
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Mark a slice host
  gpuaas.slice.slice_mode:
    profile: xe9680l-h200

- name: Remove the mark
  gpuaas.slice.slice_mode:
    state: absent
"""

RETURN = r"""
done:
  description: Names of the steps that were carried out.
  returned: always
  type: list
  elements: str
  sample: [write_file]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _slice_mode
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "str"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ["profile"])],
        supports_check_mode=True,
    )
    _change.run(module, _slice_mode.SUBJECT)


if __name__ == "__main__":
    main()
