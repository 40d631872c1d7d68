#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Handover of a ready slice VM to its tenant: the gateway's way opens, the seed is destroyed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_handover
short_description: Hand a slice VM that is ready to its tenant
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Keeps the account C(gpuaas-relay), which has neither shell nor password nor key of its own, and
    the settings by which sshd lets it forward connections and nothing else. Adds one line to the
    account's file of principals. With a certificate of O(authority) for C(slice:<allocation>) the
    gateway then reaches port 22 of that guest, and no other address. sshd accepts that authority
    for this account only, and no other authority for it.
  - Then removes the cloud-init seed, which holds what the tenant gave, from the definition of the
    domain, overwrites and deletes it, and unplugs it from the running guest. A guest that does not
    take part in the unplugging is a warning and keeps a disk of zeros until it is powered off.
  - A failure names its part in RV(part).
  - When sshd refuses the settings, they are taken away again, and the module fails with
    C(relay_not_taken).
  - Refuses with C(spec_invalid), C(stale_fence), C(lease_missing) and C(relay_account_foreign).
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  ip:
    description: Address of the guest.
    type: str
    required: true
  authority:
    description: Public key of the authority that certifies the gateway, type and base64.
    type: str
    required: true
  slots:
    description: >-
      The allocation's slots with C(slot_id) and C(fence). A way is opened only under the fence and
      the hold that the host has recorded.
    type: list
    elements: dict
    required: true
seealso:
  - module: gpuaas.slice.slice_ready
  - module: gpuaas.slice.slice_relay
  - module: gpuaas.slice.slice_vm
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Hand the slice to its tenant
  gpuaas.slice.slice_handover:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    ip: 10.100.0.10
    authority: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKlD7mHAmvLJF1Eb8RvzpO3kcJHk1bkNQMeIKMxZk0V3
    slots:
      - {slot_id: slot-1, fence: 7}
"""

RETURN = r"""
relay:
  description: Whether the gateway reaches the guest.
  returned: unless the parameters are refused
  type: dict
  sample: {open: true}
seed:
  description: Whether the file is gone, and whether the definition and the running guest still have
    the disk.
  returned: when its part was reached
  type: dict
  sample: {destroyed: true, in_definition: false, in_guest: false}
part:
  description: The part that failed, C(open_way) or C(destroy_seed).
  returned: failure
  type: str
  sample: open_way
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _cloud_seed, _relay


def parts(_params: _change.Params) -> tuple[_change.Part, ...]:
    """No restart needs the seed, so it goes when the guest is ready."""
    return (
        _change.Part(
            "open_way", _relay.SUBJECT, lambda given, _facts: {**given, "state": "present"}
        ),
        _change.Part(
            "destroy_seed",
            _cloud_seed.SUBJECT,
            lambda given, _facts: {**given, "state": "detached"},
        ),
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "ip": {"type": "str", "required": True},
            "authority": {"type": "str", "required": True},
            "slots": {"type": "list", "elements": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    _change.run_parts(module, parts(module.params))


if __name__ == "__main__":
    main()
