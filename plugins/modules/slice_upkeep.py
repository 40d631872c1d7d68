#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Baseline of a slice host: repaired where it differs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_upkeep
short_description: Repair the baseline of a slice host where it differs
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Runs the checks of M(gpuaas.slice.slice_parity) that hold at any time, also beside tenants,
    among them a guest that asks for an address, a name and a way out. If a check fails, it
    restores what the failed check names, and checks again.
  - Restores the network (M(gpuaas.slice.ovs_nat)) and the guards of fabric functions with the
    values of the last bootstrap, quiesces the GPU services (M(gpuaas.slice.gpu_services)) and
    starts guardians, and the service of telemetry, that were stopped. Limits the port of a running
    slice again that has lost its rate limit. Has sshd accept
    O(gateway_authority) for the gateway's account, where the host has that account. If it replaces
    another authority, it also ends that account's connections, because the former authority may be
    stolen. Nothing else of a tenant is freed, started or ended.
  - A difference that remains is returned in RV(baseline) and does not fail the module. The same
    applies to a full or read-only file system, and to a network of the profile that bootstrap has
    not established. Rules of such a network hold from the next bootstrap, and the host is compared
    with those of the last one, and repaired by them. On a host that is not in slice mode the
    baseline is unknown, with C(known) false.
options:
  profile:
    description: The hardware profile of the host.
    type: dict
    required: true
  slots:
    description: The bundles of all approved slots of the host.
    type: list
    elements: dict
    default: []
  gateway_authority:
    description: >-
      Public key of the authority that certifies the SSH gateway, type and base64. Without it the
      settings of the gateway's account stay as they are.
    type: str
    default: ""
attributes:
  check_mode:
    description: Checks once, names stopped guardians, and repairs nothing.
    support: full
  diff_mode:
    description: RV(repairs) names the steps instead.
    support: none
  idempotent:
    description: A second run repairs nothing.
    support: full
requirements:
  - Debian 12, Ubuntu 24.04 or newer with Python 3.11 on the host
  - root on the host
seealso:
  - module: gpuaas.slice.slice_parity
  - module: gpuaas.slice.ovs_nat
"""

EXAMPLES = r"""
- name: Repair the host's baseline
  gpuaas.slice.slice_upkeep:
    profile: "{{ slice_profile }}"
    slots: "{{ slice_slots }}"
  register: upkeep
"""

RETURN = r"""
baseline:
  description: >-
    Differences that are left, each with C(code), which is the name of the check, and C(expected),
    C(found) and C(remedy).
  returned: success
  type: dict
  sample:
    known: true
    detail: ""
    found:
      - code: guest_egress
        expected: the check of parity to pass
        found: 9.9.9.9 does not answer a guest, whatever the services say
        remedy: run playbook gpuaas.slice.bootstrap (role slice_network)
repairs:
  description: >-
    Steps that this module and the host's guardians have repaired since the boot, at most 50, the
    latest last. Times are UTC, by the clock of the host.
  returned: success
  type: dict
  sample:
    known: true
    detail: ""
    found:
      - step: add_nat nat rule
        times: 2
        first_at: "2026-11-23T04:00:00.000000+00:00"
        last_at: "2026-11-23T04:10:00.000000+00:00"
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _repairs
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _upkeep


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "dict", "required": True},
            "slots": {"type": "list", "elements": "dict", "default": []},
            "gateway_authority": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        answered_by = _change.refuse_wrong_node()
    except Refusal as refusal:
        module.fail_json(msg=str(refusal), error=refusal.document(), changed=False)
        return
    os.umask(_change.UMASK)
    done: list[str] = []
    baseline: dict[str, Any] = {"known": True, "detail": "", "found": []}
    try:
        done, baseline["found"] = _upkeep.keep(module.params, check_mode=module.check_mode)
    except (Refusal, OSError, ValueError) as why:
        baseline |= {"known": False, "detail": f"unknown: {why}"[:2000]}
    repairs = {"known": True, "detail": "", "found": _repairs.read()}
    module.exit_json(changed=bool(done), baseline=baseline, repairs=repairs, **answered_by)


if __name__ == "__main__":
    main()
