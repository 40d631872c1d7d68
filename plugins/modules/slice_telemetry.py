#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Telemetry of the slices of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_telemetry
short_description: Measure the slices of a host and hand the numbers out over SSH
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Installs C(gpuaas-slice-telemetry.service), which asks libvirt, Open vSwitch, the guards and
    dnsmasq about each slice, and reads what each guest reports over its virtio-serial channel. Of
    a guest, only known names with numbers within limits are kept.
  - The snapshot names what differs of the host's baseline and only M(gpuaas.slice.slice_upkeep)
    repairs or names, so that the reconciler compares the host at once.
  - Adds the account C(gpuaas-telemetry) and its principals file, by which a certificate with this
    principal prints the newest snapshot and can do nothing else. No port is opened.
  - The network of the slices must have been established, because the service reads its settings.
  - O(state=absent) removes the service, the account and its file.
options:
  state:
    description: Whether the host measures its slices.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gpuaas.slice.slice_vm
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Measure the slices of this host
  gpuaas.slice.slice_telemetry:

- name: Stop, and remove the account
  gpuaas.slice.slice_telemetry:
    state: absent
"""

RETURN = r"""
done:
  description: Names of the steps that were carried out.
  returned: always
  type: list
  elements: str
  sample: [add_account, write_file, install_service, start_service]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _telemetry_service
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    _change.run(module, _telemetry_service.SUBJECT)


if __name__ == "__main__":
    main()
