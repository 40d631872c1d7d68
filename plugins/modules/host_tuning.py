#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Tuned profiles of a slice host, off by default."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_tuning
short_description: Tuned profiles of a slice host, off by default
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Writes the settings of the named profiles into C(60-gpuaas-slice-tuning.conf) in
    C(/etc/sysctl.d), C(gpuaas-slice-tuning.conf) in C(/etc/modprobe.d) and
    C(60-gpuaas-slice-tuning.conf) in C(/etc/security/limits.d), each with one owner marker, and
    sets the sysctl values now.
  - Takes the profiles that an operator opted in to on this host as well. They are recorded in
    C(/etc/gpuaas/tuning.json) by C(gpuaas_slice_host_deploy_bootstrap.sh), which also removes them
    (C(GPUAAS_SLICE_TUNING=none)).
  - A profile that is neither named nor recorded is reverted. The value of each setting before the
    first change is kept in C(/var/lib/gpuaas/before/tuning.json).
  - V(network-buffers) is socket buffers, backlog, queues of C(ib_ipoib), and locked memory.
  - V(hugepages-1g) has no files here. Its pages are kernel arguments, which
    M(gpuaas.slice.kernel_arguments) takes care of.
  - Whether a profile is in force is read by M(gpuaas.slice.slice_parity), and reported as a
    capability of the host by M(gpuaas.slice.slice_discovery).
  - Refuses with C(file_not_ours), C(tuning_unknown) for a recorded name that this release does not
    know, and C(tuning_record_unreadable).
options:
  profiles:
    description: Names of the requested profiles, in addition to those recorded on the host.
    type: list
    elements: str
    choices: [hugepages-1g, network-buffers]
    default: []
  state:
    description: V(absent) removes all files and the record on the host, and ignores
      O(profiles).
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gpuaas.slice.kernel_arguments
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Large buffers for a fast fabric
  gpuaas.slice.host_tuning:
    profiles: [network-buffers]

- name: Apply only the profiles that were opted in to on the host
  gpuaas.slice.host_tuning:

- name: Restore the host's own values
  gpuaas.slice.host_tuning:
    state: absent
"""

RETURN = r"""
profiles:
  description: Names of all profiles that the host has now, named and recorded ones.
  returned: always
  type: list
  elements: str
  sample: ["network-buffers"]
pending:
  description: Settings that take effect only after a module is loaded again or after a reboot, as
    sentences.
  returned: always
  type: list
  elements: str
  sample: ["ib_ipoib send_queue_size is 128, not 4096, until it is loaded again"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _host_tuning,
    _tuning_profiles,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profiles": {
                "type": "list",
                "elements": "str",
                "choices": list(_tuning_profiles.PROFILES),
                "default": [],
            },
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    _change.run(module, _host_tuning.SUBJECT)


if __name__ == "__main__":
    main()
