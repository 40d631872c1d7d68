#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Remnants of slice mode on a host, compared item by item."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_remnants
short_description: Compare a host with one that was never a slice host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Compares the host with one that was never a slice host and returns every comparison, also those
    that match. An item that cannot be read does not match.
  - M(gpuaas.slice.slice_parity) with the intent V(baremetal) judges by the same list.
  - Items that stay on purpose (the ledger with its fences, entries of fstab that the storage
    transition disabled, cached images, installed packages, the source of RACADM) are returned as
    RV(kept).
  - A mark for a wipe that no allocation holds and whose disk is not on the host is no remnant
    either, once all namespaces have an identity. The disk is named in RV(kept), and counts as a
    remnant if it returns.
options:
  profile:
    description: The hardware profile, which defines GPUs, fabric cards and the slice network.
    type: dict
    required: true
  scope:
    description:
      - V(slices) covers the traces of slices themselves (machines, holds, disks that wait for a
        wipe, reservations), V(host) these and everything of slice mode.
    type: str
    choices: [slices, host]
    default: host
  require:
    description:
      - Refuse with C(slices_present) (scope V(slices)) or C(remnants_found) when anything is left.
    type: bool
    default: false
seealso:
  - module: gpuaas.slice.slice_absence
  - module: gpuaas.slice.slice_mode
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: Refuse a host with slices on it
  gpuaas.slice.slice_remnants:
    profile: "{{ slice_profile }}"
    scope: slices
    require: true

- name: Prove that nothing of slice mode is left
  gpuaas.slice.slice_remnants:
    profile: "{{ slice_profile }}"
    require: true
  register: left
"""

RETURN = r"""
remnants:
  description: Number of comparisons that do not match.
  returned: always
  type: int
compared:
  description: Every comparison.
  returned: always
  type: list
  elements: dict
  sample:
    - check: nat
      name: rules for 10.100.0.0/24
      expected: none
      found: none
      ok: true
kept:
  description: Items that stay on purpose.
  returned: always
  type: dict
  sample:
    ledger: [slot-0]
    disks_gone: []
    fstab_disabled: []
    images: []
    packages: [dnsmasq]
    apt_sources: []
identity:
  description: Boot id, machine id and public host key.
  returned: always
  type: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _host_facts,
    _slice_remnants,
)


def look(params: _change.Params) -> dict[str, Any]:
    request = _host_facts.Request(profile=params["profile"], intent="baremetal")
    facts = _host_facts.Facts(request)
    items = _slice_remnants.compare(facts, scope=params["scope"])
    return {
        "remnants": sum(not item.ok for item in items),
        "compared": [item.document() for item in items],
        "kept": _slice_remnants.kept(facts),
        "identity": _host.identity(),
    }


def judged(params: _change.Params) -> tuple[dict[str, Any], Refusal | None]:
    """Comparison and refusal. The comparison is returned also when the module fails."""
    document = look(params)
    refused = document["remnants"] and params["require"]
    return document, refusal(params["scope"], document["compared"]) if refused else None


def refusal(scope: str, compared: Sequence[Mapping[str, Any]]) -> Refusal:
    left = [item for item in compared if not item["ok"]]
    text = "; ".join(f"{item['name']}: {item['found']}" for item in left)
    if scope == "slices":
        return Refusal(
            "slices_present",
            expected="a host without slices and without disks that wait for a wipe",
            found=text,
            remedy="release or recover the slices of this host first",
        )
    return Refusal(
        "remnants_found",
        expected="nothing of slice mode on this host",
        found=text,
        remedy="run restore_baremetal again; inspect the remaining items by hand",
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "dict", "required": True},
            "scope": {"type": "str", "choices": ["slices", "host"], "default": "host"},
            "require": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    _change.attend(module, lambda params, _once: judged(params))


if __name__ == "__main__":
    main()
