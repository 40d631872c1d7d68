#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Parity check of a host: every target condition, in one pass."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_parity
short_description: Check every target condition of a slice host in one pass
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Runs every parity check in one call and returns one outcome each, with its remedy.
  - Checks behave as a guest would where they can. C(guest_egress) makes a network namespace on the
    slice bridge, reaches the profile's C(network.egress_probe) through NAT, and removes it again.
    C(guest_tcp) lets it exchange TCP with a service behind NAT that the module makes and removes.
  - Files that bootstrap and the binding write whole are compared with their expected content, and
    the code of the boot services with its recorded digests, so that an edit is found before the
    next boot. A boot menu that lacks an argument is a failure; a menu that only the next
    C(update-grub) would spoil is a warning.
  - A check that cannot be made has failed. A check passes as C(not_applicable) only when the
    profile names it.
  - The module succeeds also when checks fail; the caller judges C(parity.failures).
options:
  profile:
    description: The hardware profile, with the checks that do not apply in C(not_applicable).
    type: dict
    required: true
  slots:
    description: The approved slot bundles of the node; none before approval.
    type: list
    elements: dict
    default: []
  intent:
    description: Purpose of the host. V(baremetal) proves that slice services are absent.
    type: str
    choices: [slice, baremetal]
    default: slice
  api_topology:
    description:
      - The reconciler's record of this node's latest discovery, as C(completed), C(blockers) and
        C(boot_id). The record of another boot proves nothing.
      - Without it C(api_topology) is a warning.
    type: dict
  maas_tags:
    description: The machine's tags in MAAS. Without them C(maas_intent) is a warning.
    type: list
    elements: str
attributes:
  check_mode:
    description: Nothing persistent is changed; C(guest_egress) makes its namespaces here too.
    support: full
  diff_mode:
    description: Nothing changes, so there is no difference to show.
    support: none
requirements:
  - Debian 12, Ubuntu 24.04 or newer with Python 3.11 on the host
  - root on the host
seealso:
  - module: gpuaas.slice.slice_discovery
  - module: gpuaas.slice.slice_upkeep
"""

EXAMPLES = r"""
- name: Check a slice host with its approved slots
  gpuaas.slice.slice_parity:
    profile: "{{ slice_profile }}"
    slots: "{{ slice_slots }}"
  register: parity
  failed_when: parity.parity.failures > 0

- name: Prove that a bare-metal host has no slice services
  gpuaas.slice.slice_parity:
    profile: "{{ slice_profile }}"
    intent: baremetal
"""

RETURN = r"""
parity:
  description: The report; its schema is C(contracts/parity.schema.json).
  returned: always
  type: dict
  sample:
    schema: 1
    intent: slice
    failures: 1
    warnings: 0
    checks:
      - check: nat
        status: FAIL
        detail: no rule of POSTROUTING translates 10.100.0.0/24
        remediation: >-
          run playbook gpuaas.slice.bootstrap (role slice_network); rules and services that it names
          are the site's
        playbook: gpuaas.slice.bootstrap
        role: slice_network
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _check,
    _host_facts,
    _slice_parity,
)


def look(params: Mapping[str, Any]) -> dict[str, Any]:
    request = _host_facts.Request(
        profile=params["profile"],
        slots=params["slots"],
        intent=params["intent"],
        api_topology=params["api_topology"],
        maas_tags=params["maas_tags"],
    )
    facts = _host_facts.Facts(request)
    outcomes = _check.evaluate(
        _slice_parity.CHECKS,
        facts,
        intent=request.intent,
        not_applicable=request.profile.get("not_applicable", []),
    )
    header = {"schema": 1, "intent": request.intent, "profile": str(request.profile["name"])}
    when = {"collected_at": _host.now(), "identity": _host.identity()}
    report = {**_check.report(outcomes), "dead_gpus": facts.dead_gpus}
    report |= {"missing_devices": facts.missing_devices, "reset_gpus": facts.reset_gpus}
    if facts.networks:
        report["networks"] = facts.networks
    return {"parity": {**header, **when, **report}}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "dict", "required": True},
            "slots": {"type": "list", "elements": "dict", "default": []},
            "intent": {"type": "str", "choices": ["slice", "baremetal"], "default": "slice"},
            "api_topology": {"type": "dict"},
            "maas_tags": {"type": "list", "elements": "str"},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
