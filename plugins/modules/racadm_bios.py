#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""BIOS settings of a Dell machine through its local RACADM."""

from __future__ import annotations

DOCUMENTATION = r"""
module: racadm_bios
short_description: BIOS settings of a Dell machine through its local RACADM
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Compares BIOS settings, current and pending, with the requested values. By default it does no
    more.
  - With O(state=present) stages the differing settings, makes one job with a power cycle and
    follows the C(JID_…) and C(RID_…) of both to their end.
  - A setting counts when its current value is right and no BIOS job is open; a pending value proves
    nothing.
  - Run on the machine itself, the power cycle ends the call. Call again when the machine is back;
    the open job is found in the controller's queue and followed. O(wait=false) returns before the
    power cycle comes.
  - A failed job is not tried again by itself; the controller's queue remembers it over reboots and
    reinstalls. Name it in O(acknowledged_jobs) after looking at it.
  - Uses no credentials; the local RACADM needs none.
  - Refuses with C(racadm_garbled), C(command_timeout), C(attribute_invalid),
    C(attribute_unknown), C(attribute_read_only), C(power_cycle_not_allowed), C(job_in_queue),
    C(foreign_pending_values), C(plan_changed), C(staging_failed), C(bios_job_failed),
    C(bios_job_timeout).
  - Refuses a power cycle with C(host_in_use) while a virtual machine runs on the host, or a slot or
    the whole machine is leased; with C(ledger_unreadable) when the ledger cannot be read.
options:
  power_cycle:
    description: Whether the machine may be power-cycled. Without it nothing is staged either.
    type: bool
    default: false
  approved:
    description: RV(digest) of the plan that a person has approved; another plan is refused.
    type: str
    default: ""
  wait:
    description: Whether an open BIOS job is followed to its end.
    type: bool
    default: true
  timeout:
    description: Seconds for one answer of RACADM.
    type: float
    default: 120
  program:
    description: Name or path of RACADM; V(racadm) is also looked for where Dell's packages put it.
    type: str
    default: racadm
requirements:
  - RACADM
seealso:
  - module: gpuaas.slice.redfish_bios
  - module: gpuaas.slice.firmware_preflight
extends_documentation_fragment: [gpuaas.slice.change, gpuaas.slice.bios, gpuaas.slice.bios.values]
"""

EXAMPLES = r"""
- name: Show the differences
  gpuaas.slice.racadm_bios:
  register: bios

- name: Change them and power-cycle the machine
  gpuaas.slice.racadm_bios:
    state: present
    power_cycle: true
    wait: false

- name: Follow the job when the machine is back
  gpuaas.slice.racadm_bios:
    state: present
    power_cycle: true
    deadline: 1800
"""

RETURN = r"""
settled:
  description: Whether every requested value is current and no BIOS job is open.
  returned: always
  type: bool
attributes:
  description: Each requested setting with its state.
  returned: always
  type: list
  elements: dict
  sample:
    - name: ProcSettings.ProcVirtualization
      wanted: Enabled
      current: Disabled
      pending: Enabled
      status: pending
jobs:
  description: BIOS and reboot jobs in the controller's queue.
  returned: always
  type: list
  elements: dict
  sample:
    - id: JID_763788807801
      name: "Configure: BIOS.Setup.1-1"
      status: Completed
      message: "PR19: Job completed successfully."
      percent: "100"
differences:
  description: The steps that O(state=present) would take, also when this call takes none.
  returned: always
  type: list
  elements: dict
digest:
  description: Digest of RV(differences), by which O(approved) names them.
  returned: always
  type: str
refusals:
  description: Refusals that O(state=present) would meet.
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _bios, _racadm_bios


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **_bios.ARGUMENTS,
            "power_cycle": {"type": "bool", "default": False},
            "approved": {"type": "str", "default": ""},
            "wait": {"type": "bool", "default": True},
            "timeout": {"type": "float", "default": 120},
            "program": {"type": "str", "default": "racadm"},
        },
        supports_check_mode=True,
    )
    _change.run(
        module,
        _change.Subject(
            _racadm_bios.observe, _racadm_bios.plan, _racadm_bios.apply, _racadm_bios.facts
        ),
    )


if __name__ == "__main__":
    main()
