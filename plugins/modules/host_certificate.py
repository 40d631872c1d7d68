#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""SSH host certificate of this host, and its renewal."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_certificate
short_description: The certificate that vouches for this host's SSH key
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Puts a new certificate for the SSH key of an enrolled host in the place of the old one, and
    makes sshd load it. Open connections continue.
  - The key stays. Refuses a certificate of a user, one without an end and what is no certificate
    (C(certificate_unreadable)), one for another key (C(certificate_of_another_key)) or another node
    (C(certificate_of_another_node)), and a host whose sshd does not offer the file
    (C(certificate_not_served)).
  - Refuses a certificate that ends before the present one (C(certificate_older)), and one that
    another CA signed (C(certificate_of_another_authority)); only an enrolment changes the CA.
  - When sshd does not load it, the old certificate is put back and the module fails with
    C(certificate_not_taken).
options:
  node_id:
    description: The id under which clients reach the host; the certificate must contain it.
    type: str
    required: true
  certificate:
    description: The certificate, one line as in C(ssh_host_ed25519_key-cert.pub).
    type: str
    required: true
seealso:
  - module: gpuaas.slice.api_names
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Renew the host's certificate for 90 days
  gpuaas.slice.host_certificate:
    node_id: node-7
    certificate: "{{ slice_certificate }}"
"""

RETURN = r"""
certificate:
  description: Content of the certificate on the host; empty without a certificate that ends.
  returned: always
  type: dict
  sample: {serial: "42", principals: [node-7], valid_until: "2026-08-29T10:00:00Z"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _host_certificate
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node_id": {"type": "str", "required": True},
            "certificate": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    _change.run(module, _host_certificate.SUBJECT)


if __name__ == "__main__":
    main()
