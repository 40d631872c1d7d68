#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Services that hold a host's GPUs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_services
short_description: Quiesce the services that hold a host's GPUs, or restore them
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Stops, disables and masks each service. A service that is only disabled is still started by udev
    rules and other units, as C(nvidia-persistenced.service) is by Ubuntu's driver.
  - A service that does not exist, or is masked and does not run, is quiet already. A service whose
    unit file the site has in C(/etc/systemd/system), where a mask would be, is stopped and barred
    by the drop-in C(90-gpuaas-slice.conf), whose condition is never true.
  - The first run, also where all are quiet, records the state of each service in
    C(/var/lib/gpuaas/before/gpu-services.json). O(state=restored) restores exactly that state and
    removes the record. A service that was quiet or masked before stays so.
  - Refuses with C(machine_leased) while a tenant has the whole machine; with
    C(service_not_restored), C(before_unreadable).
options:
  services:
    description:
      - Names of units, instances of templates among them; C(.service) may be left out. With
        O(state=restored) the record names them.
    type: list
    elements: str
    default: []
  state:
    description: Whether the GPUs are for slices or for the host's own services.
    type: str
    choices: [quiesced, restored]
    default: quiesced
seealso:
  - module: gpuaas.slice.vfio_bind
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Take the GPUs from the host's own services
  gpuaas.slice.gpu_services:
    services: [nvidia-persistenced.service, nvidia-fabricmanager.service]

- name: Give them back as they were
  gpuaas.slice.gpu_services:
    state: restored
"""

RETURN = r"""
services:
  description: Activity of each service; empty when it is quiet.
  returned: always
  type: dict
  sample: {nvidia-persistenced.service: ""}
before:
  description: Recorded state of each service.
  returned: always
  type: dict
  sample: {nvidia-persistenced.service: {active: true, file: enabled}}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _gpu_services
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "services": {"type": "list", "elements": "str", "default": []},
            "state": {
                "type": "str",
                "choices": ["quiesced", "restored"],
                "default": "quiesced",
            },
        },
        supports_check_mode=True,
    )
    _change.run(module, _gpu_services.SUBJECT)


if __name__ == "__main__":
    main()
