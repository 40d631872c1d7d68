#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Names of the control plane that this host must resolve."""

from __future__ import annotations

DOCUMENTATION = r"""
module: api_names
short_description: Names of the control plane that a host must resolve
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Keeps a block of C(/etc/hosts) with the names of the control plane's API and their addresses,
    for a site whose DNS does not have them. Where cloud-init manages C(/etc/hosts), its template
    gets the block too, because the next boot would otherwise remove it.
  - Lines outside the block are never changed. Refuses with C(api_name_invalid), with
    C(api_name_taken) when such a line gives a name another address, and with C(file_unreadable).
  - The parity check C(name_resolution) tests whether the names lead to a host that answers.
options:
  names:
    description: Address by name. An empty value removes the block.
    type: dict
    default: {}
seealso:
  - module: gpuaas.slice.host_certificate
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Make the API's name resolvable
  gpuaas.slice.api_names:
    names:
      api.gpuaas.example: 192.0.2.20
"""

RETURN = r"""
resolved:
  description: Addresses to which this host resolves each name now.
  returned: always
  type: dict
  sample: {api.gpuaas.example: [192.0.2.20]}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _api_names


def main() -> None:
    module = AnsibleModule(
        argument_spec={"names": {"type": "dict", "default": {}}},
        supports_check_mode=True,
    )
    _change.run(module, _api_names.SUBJECT)


if __name__ == "__main__":
    main()
