#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Compiled code of Ansible's modules on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: module_cache
short_description: Keep the compiled code of modules on a host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Ansible sends each module as sources, which the host compiles in each task. A host with this
    cache, and with Python 3.10 or newer, compiles each source once.
  - Writes C(/usr/local/lib/gpuaas-modules/sitecustomize.py), which modules use whose environment
    has this folder in C(PYTHONPATH), as in the playbooks of this collection, and the folder
    C(/var/cache/gpuaas-modules), which only root reads. Code is found by the digest of its source.
    Modules that find none, or damaged code, compile as without the cache. Programs that a module
    starts do not use it. A C(sitecustomize) of the distribution is not loaded by these modules.
  - A cache that cannot be installed is reported as a doubt, and is no failure.
    O(state=absent) removes all of it.
options:
  state:
    description: Whether the host keeps compiled code.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gpuaas.slice.slice_mode
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Keep compiled modules
  gpuaas.slice.module_cache:

- name: Use it in a playbook of the site
  hosts: slice_hosts
  environment: { PYTHONPATH: /usr/local/lib/gpuaas-modules }
"""

RETURN = r"""
done:
  description: Names of the steps that were carried out.
  returned: always
  type: list
  elements: str
  sample: [write_program, make_folder]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _module_cache
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    _change.run(module, _module_cache.SUBJECT)


if __name__ == "__main__":
    main()
