#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Packages of a slice host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_packages
short_description: Install packages that a slice host lacks
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Asks dpkg once. When nothing is missing, apt is not called and no mirror is needed.
  - Other processes may hold apt's locks, as a machine's own upgrade does at its first boot. The
    module waits for them, ten minutes at most.
  - Refuses with C(package_invalid) and C(apt_locked); a failing apt is C(command_failed) with its
    output.
options:
  packages:
    description: Names of packages that the host must have.
    type: list
    elements: str
    required: true
  optional:
    description:
      - Names of packages that are installed where the host's apt has them. The host works without
        them; missing ones are named in RV(unavailable).
      - A package that apt has and cannot install, such as a held one, is a warning and no failure.
      - Availability is read from the package lists of the host, which are updated when anything
        is installed. Check mode does not update them.
    type: list
    elements: str
    default: []
seealso:
  - module: gpuaas.slice.apt_source
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Install the packages that slice VMs need
  gpuaas.slice.host_packages:
    packages: [libvirt-daemon-system, openvswitch-switch, ovmf]
    optional: [rshim]
"""

RETURN = r"""
installed:
  description: Those of the named packages that are installed.
  returned: always
  type: list
  elements: str
  sample: [ovmf]
unavailable:
  description: Optional packages that are not installed and that the host's apt does not have.
  returned: always
  type: list
  elements: str
  sample: [rshim]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _host_packages
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "required": True},
            "optional": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    _change.run(module, _host_packages.SUBJECT)


if __name__ == "__main__":
    main()
