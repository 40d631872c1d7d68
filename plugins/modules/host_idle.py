#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Guard before a restart or a bootstrap: it refuses a host with tenants."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_idle
short_description: Refuse to continue while a host has tenants
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Call it directly before a step that would disconnect a tenant.
  - Before a restart refuses with C(host_in_use) while a machine runs under QEMU, also one that
    libvirt has lost or that is no slice, and while the host's ledger has a hold of a slot
    or of the whole machine. The machines and holds of O(allocations) do not count.
  - Refuses with C(boot_changed) under another boot than O(boot_id).
  - Before a bootstrap, which repairs a slice host under its machines, refuses with
    C(machine_leased) while a tenant has the whole machine.
  - A ledger that cannot be read is refused with C(ledger_unreadable), never taken for an idle host.
options:
  before:
    description: The step that follows.
    type: str
    choices: [restart, bootstrap]
    default: restart
  allocations:
    description: Allocations whose slices may be on the host; their tenants know of the restart.
    type: list
    elements: str
    default: []
  boot_id:
    description: The boot that the step may end; empty for any.
    type: str
    default: ""
seealso:
  - module: gpuaas.slice.slice_lease_info
  - module: gpuaas.slice.slice_vm_info
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: Continue only when no tenant would be disconnected
  gpuaas.slice.host_idle:

- name: Continue when the host has only slices of this allocation
  gpuaas.slice.host_idle:
    allocations: [23bd713b-6073-4ef7-8a51-2897e902365d]
    boot_id: fe5676c1-fa13-48aa-a541-526b58dcb3ec

- name: Refuse a machine that a tenant holds as a whole
  gpuaas.slice.host_idle:
    before: bootstrap
"""

RETURN = r"""
idle:
  description: Always true; otherwise the module fails.
  returned: success
  type: bool
identity:
  description: Boot, machine id and host key of the host.
  returned: success
  type: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _host_idle
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy


def look(params: _change.Params) -> dict[str, Any]:
    identity = _host.identity()
    if params["before"] == "restart":
        refusals = _host_idle.refusals(params["allocations"])
    else:
        refusals = _tenancy.refusals()
    for refusal in (*_host_idle.other_boot(params["boot_id"], identity["boot_id"]), *refusals):
        raise refusal
    return {"idle": True, "identity": identity}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "before": {"type": "str", "choices": ["restart", "bootstrap"], "default": "restart"},
            "allocations": {"type": "list", "elements": "str", "default": []},
            "boot_id": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
