#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""A signed repository for apt, under a key that is trusted for it alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_source
short_description: A signed repository for apt, under a key that is trusted for it alone
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Writes a source with C(Signed-By) and a keyring that holds one key.
  - The key is fetched and compared with O(fingerprint) before it is trusted.
  - Refuses while anything on the host lets apt take packages without a signature, such as
    C([trusted=yes]) on any other source. The file of O(name) itself is rewritten.
  - Refuses with C(fingerprint_invalid), C(source_invalid), C(key_fingerprint_mismatch),
    C(key_not_valid), C(key_unreachable), C(unauthenticated_source), C(source_defined_elsewhere).
  - Does not update apt's lists.
options:
  name:
    description: Name of the source file and of the keyring.
    type: str
    required: true
  uri:
    description: The repository.
    type: str
    required: true
  suite:
    description: The repository's suite.
    type: str
    required: true
  components:
    description: The repository's components.
    type: list
    elements: str
    default: [main]
  architectures:
    description: Architectures for which the repository is used.
    type: list
    elements: str
    default: [amd64]
  key_url:
    description: Where the publisher's key is fetched from, as http, https or file.
    type: str
    required: true
  fingerprint:
    description: The key's whole fingerprint, known from elsewhere than O(key_url).
    type: str
    required: true
seealso:
  - module: gpuaas.slice.host_packages
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Take RACADM from its publisher's repository
  gpuaas.slice.apt_source:
    name: dell-openmanage
    uri: "{{ repository }}"
    suite: jammy
    key_url: "{{ repository_key }}"
    fingerprint: "{{ repository_key_fingerprint }}"
"""

RETURN = r"""
source:
  description: Path of the source file.
  returned: always
  type: str
  sample: /etc/apt/sources.list.d/dell-openmanage.sources
keyring:
  description: Path of the keyring.
  returned: always
  type: str
  sample: /usr/share/keyrings/dell-openmanage.asc
trusted_keys:
  description: Fingerprints in the keyring.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _apt_source
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "uri": {"type": "str", "required": True},
            "suite": {"type": "str", "required": True},
            "components": {"type": "list", "elements": "str", "default": ["main"]},
            "architectures": {"type": "list", "elements": "str", "default": ["amd64"]},
            "key_url": {"type": "str", "required": True, "no_log": False},
            "fingerprint": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    _change.run(
        module,
        _change.Subject(
            _apt_source.observe, _apt_source.plan, _apt_source.apply, _apt_source.facts
        ),
    )


if __name__ == "__main__":
    main()
