#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Entries of /etc/fstab that the storage transition disabled."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fstab_entries
short_description: Re-enable the fstab entries that the storage transition disabled
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Uncomments the lines that carry the marker C(gpuaas-slice-storage-disabled), after a backup of
    the file. Mounts nothing.
  - Refuses with C(fstab_device_missing) while a line names a file system that is not there. The
    transition has wiped the disks, and a boot that waits for such a file system stops in emergency
    mode, so make the file systems first, with their old labels or UUIDs.
options: {}
seealso:
  - module: gpuaas.slice.nvme_transition
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Mount the shares again at the next boot
  gpuaas.slice.fstab_entries:
"""

RETURN = r"""
disabled:
  description: Lines that are still disabled.
  returned: always
  type: list
  elements: str
  sample: ["LABEL=share1 /share1 xfs defaults 0 2"]
"""

import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _fstab_entries


def observe(_params: _change.Params) -> list[str]:
    return _fstab_entries.disabled()


def plan(_params: _change.Params, state: list[str]) -> _change.Plan:
    blockers = [_missing(line) for line in state if not _fstab_entries.device_there(line)]
    if not state:
        return _change.Plan()
    step = _change.Step("enable_entries", _fstab_entries.FILE, [], list(state))
    return _change.Plan((step,), tuple(blockers))


def apply(_params: _change.Params, step: _change.Step) -> dict[str, Any]:
    backup = f"{_fstab_entries.BACKUP}{re.sub('[^0-9]', '', _host.now())[:14]}"
    _host.write(backup, _fstab_entries.text())
    _fstab_entries.enable(step.after)
    return {"backup": backup}


def facts(_params: _change.Params, state: list[str]) -> dict[str, Any]:
    return {"disabled": state}


def _missing(line: str) -> Refusal:
    return Refusal(
        "fstab_device_missing",
        expected="the file system of every entry that is enabled again",
        found=f"nothing there for: {line}",
        remedy="make the file system first, or remove the line",
    )


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
