#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Whether this host has no tenants, so that it may be restarted or made a slice host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_idle
short_description: Refuse to continue while a host has tenants
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Call it directly before a step that would disconnect a tenant.
  - Before a restart refuses with C(host_in_use) while a machine runs under QEMU, also one that
    libvirt has lost or that is no slice, and while the host's ledger has a lease of a slot
    or of the whole machine.
  - Before a bootstrap, which repairs a slice host under its machines, refuses with
    C(machine_leased) while a tenant has the whole machine.
  - A ledger that cannot be read is refused with C(ledger_unreadable), never taken for an idle host.
options:
  before:
    description: The step that follows.
    type: str
    choices: [restart, bootstrap]
    default: restart
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: Continue only when no tenant would be disconnected
  gpuaas.slice.host_idle:

- name: Refuse a machine that a tenant holds as a whole
  gpuaas.slice.host_idle:
    before: bootstrap
"""

RETURN = r"""
idle:
  description: Always true; otherwise the module fails.
  returned: success
  type: bool
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _host_idle
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

_LOOKS = {"restart": _host_idle.refusals, "bootstrap": _tenancy.refusals}


def look(params: _change.Params) -> dict[str, Any]:
    for refusal in _LOOKS[params["before"]]():
        raise refusal
    return {"idle": True}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "before": {"type": "str", "choices": [*_LOOKS], "default": "restart"},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
