#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Whether this host may be restarted, or made a slice host: nobody would be cut off."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_idle
short_description: Refuse to go on while somebody has a host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. To be asked right before what would cut somebody off.
  - Before a restart refuses with C(host_in_use) while a machine runs under QEMU, also one that
    libvirt has lost or that is nobody's slice, and while the host's ledger has a lease of a slot
    or of the whole machine.
  - Before a bootstrap, which repairs a slice host under its machines, refuses with
    C(machine_leased) while a tenant has the whole machine.
  - A ledger that cannot be read (C(ledger_unreadable)) says nothing of nobody.
options:
  before:
    description: What is about to be done.
    type: str
    choices: [restart, bootstrap]
    default: restart
attributes:
  check_mode:
    description: Only reads.
    support: full
  diff_mode:
    description: Only reads.
    support: none
"""

EXAMPLES = r"""
- name: Go on only when nobody would be cut off
  gpuaas.slice.host_idle:

- name: Leave a machine alone that a tenant has as a whole
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
