#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""BIOS settings of a machine through its BMC's Redfish."""

from __future__ import annotations

DOCUMENTATION = r"""
module: redfish_bios
short_description: BIOS settings of a machine through its BMC's Redfish
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Compares BIOS settings, current and pending, with the requested values. By default it does no
    more.
  - With O(state=present) asks for everything that differs in one request, with C(OnReset) as its
    apply time, and checks that it waits with a job. O(power_cycle=true) also resets the machine and
    follows the job to its end.
  - A setting counts when its current value is right and no BIOS job is open; a pending value proves
    nothing. The plan is that of M(gpuaas.slice.racadm_bios).
  - Names and values are checked against the attribute registry of this BIOS before anything is
    asked for.
  - Logs in with a session and always ends it. A busy BMC (503) is asked again after the time that
    it names; an expired session is replaced once.
  - The BMC's certificate is always verified, with O(ca_file), with O(fingerprint), or with the CA
    store of the machine this runs on.
  - Returns the settings asked for and no other.
  - Run it where the BMC can be reached, for example with C(delegate_to).
  - Refuses with C(trust_invalid), C(tls_untrusted), C(bmc_address_invalid), C(bmc_unreachable),
    C(bmc_busy), C(bmc_login_refused), C(bmc_session_refused), C(bmc_privilege_missing),
    C(bmc_answer_missing), C(bmc_answer_malformed), C(bmc_request_refused), C(bmc_feature_missing),
    C(system_ambiguous), C(attribute_unknown), C(attribute_read_only), C(value_not_allowed),
    C(job_in_queue), C(foreign_pending_values), C(bios_job_missing), C(bios_job_failed),
    C(bios_job_timeout).
options:
  host:
    description: Name or address of the BMC, with C(:port) where it is not 443.
    type: str
    required: true
  user:
    description: User of the BMC.
    type: str
    required: true
  password:
    description: Password of O(user).
    type: str
    required: true
  ca_file:
    description: PEM file of the only CAs that may have signed the BMC's certificate.
    type: path
    default: ""
  fingerprint:
    description:
      - SHA-256 of the BMC's own certificate in hexadecimal, instead of a CA. Take it from the BMC's
        console, not from the network.
    type: str
    default: ""
  system:
    description: Id of the system, where the BMC has several.
    type: str
    default: ""
  power_cycle:
    description:
      - Whether the machine is reset for its changes. Without it they wait for the next reset.
      - The reset ends all that runs on the machine. A BMC cannot see that, so this module does not
        refuse it. Run M(gpuaas.slice.host_idle) on the machine first.
    type: bool
    default: false
  wait:
    description: With O(power_cycle=true), whether the job is followed to its end.
    type: bool
    default: true
  timeout:
    description: Seconds for one check or one change, including all its requests and waits.
    type: float
    default: 180
seealso:
  - module: gpuaas.slice.racadm_bios
  - module: gpuaas.slice.firmware_preflight
extends_documentation_fragment: [gpuaas.slice.change, gpuaas.slice.bios, gpuaas.slice.bios.values]
"""

EXAMPLES = r"""
- name: Show the differences
  gpuaas.slice.redfish_bios:
    host: "{{ bmc_address }}"
    user: "{{ bmc_user }}"
    password: "{{ bmc_password }}"
    ca_file: /etc/gpuaas/bmc-ca.pem
  delegate_to: localhost
  register: bios

- name: Let the changes wait for the next reset
  gpuaas.slice.redfish_bios:
    host: "{{ bmc_address }}"
    user: "{{ bmc_user }}"
    password: "{{ bmc_password }}"
    fingerprint: "{{ bmc_fingerprint }}"
    state: present
  delegate_to: localhost

- name: Change one setting, reset the machine and follow the job
  gpuaas.slice.redfish_bios:
    host: "{{ bmc_address }}"
    user: "{{ bmc_user }}"
    password: "{{ bmc_password }}"
    ca_file: /etc/gpuaas/bmc-ca.pem
    attributes:
      SriovGlobalEnable: Enabled
    state: present
    power_cycle: true
  delegate_to: localhost
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
    - name: ProcVirtualization
      wanted: Enabled
      current: Disabled
      pending: Enabled
      status: pending
jobs:
  description: BIOS and reboot jobs in the BMC's queue.
  returned: always
  type: list
  elements: dict
  sample:
    - id: JID_763788807801
      name: "Configure: BIOS.Setup.1-1"
      status: Scheduled
      message: "JCP001: Task successfully scheduled."
      percent: "0"
differences:
  description: The steps that O(state=present) would take, also when this call takes none.
  returned: always
  type: list
  elements: dict
refusals:
  description: Refusals that O(state=present) would meet.
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _bios,
    _redfish_bios,
    _redfish_session,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_connection import Trust


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "user": {"type": "str", "required": True},
            "password": {"type": "str", "required": True, "no_log": True},
            "ca_file": {"type": "path", "default": ""},
            "fingerprint": {"type": "str", "default": ""},
            "system": {"type": "str", "default": ""},
            **_bios.ARGUMENTS,
            "power_cycle": {"type": "bool", "default": False},
            "wait": {"type": "bool", "default": True},
            "timeout": {"type": "float", "default": 180},
        },
        supports_check_mode=True,
    )
    params = module.params
    trust = Trust(params["ca_file"], params["fingerprint"])
    account = _redfish_session.Account(params["user"], params["password"])
    # The end of the module is a SystemExit, which passes through here and logs out.
    with _redfish_session.Client(
        params["host"], account, trust, timeout=params["timeout"]
    ) as client:
        _change.run(module, _redfish_bios.subject(client))


if __name__ == "__main__":
    main()
