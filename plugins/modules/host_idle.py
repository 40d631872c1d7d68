#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Whether this host may be restarted: no virtual machine runs on it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_idle
short_description: Refuse to go on while virtual machines run on a host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Refuses with C(host_in_use) while a machine runs under QEMU, also one that libvirt
    has lost or that is nobody's slice. To be asked right before a restart.
options: {}
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
"""

RETURN = r"""
idle:
  description: Always true; otherwise the module fails.
  returned: success
  type: bool
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils import _change, _libvirt
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

# Not qemu-img or qemu-nbd, which have no guest.
_MACHINES = ("qemu-system", "qemu-kvm")


def look(_params: _change.Params) -> dict[str, Any]:
    running = {
        pid: program
        for pid, program in _libvirt.processes("").items()
        if program.startswith(_MACHINES)
    }
    if running:
        raise Refusal(
            "host_in_use",
            expected="a host on which no virtual machine runs",
            found=", ".join(f"{program} {pid}" for pid, program in sorted(running.items())),
            remedy="drain the node and release what is on it, then ask again",
        )
    return {"idle": True}


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    _change.inform(module, look)


if __name__ == "__main__":
    main()
