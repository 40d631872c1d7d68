#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Firmware check: whether a machine can become a slice host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: firmware_preflight
short_description: Check whether a machine's firmware allows it to become a slice host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads the BIOS settings that slices need, and their effect in the running kernel.
  - Lists GPUs, fabric cards with the virtual functions that they offer, and every NVMe disk with
    its stable name, partitions, mount points, filesystems and signatures.
  - Prints the same lines as the MAAS commissioning script
    C(50-gpuaas-slice-firmware-preflight.sh), which is generated from the same code.
  - The module succeeds also when checks fail; the caller judges C(preflight.failures).
options:
  profile:
    description:
      - The hardware profile. Checks named in its C(not_applicable) pass without being examined.
        Without C(bios_settings) no RACADM is needed.
    type: dict
    required: true
  program:
    description: Name or path of RACADM.
    type: str
    default: racadm
  timeout:
    description: Seconds for one answer of RACADM.
    type: float
    default: 120
  refused:
    description:
      - Error document of a step that had to come before, such as the installation of RACADM. With
        it, the BIOS settings are not read and the check C(bios_settings) fails with this error.
    type: dict
    default: {}
seealso:
  - module: gpuaas.slice.racadm_bios
  - module: gpuaas.slice.redfish_bios
extends_documentation_fragment: [gpuaas.slice.bios.values, gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: Look at firmware and hardware
  gpuaas.slice.firmware_preflight:
    profile: "{{ slice_profile }}"
  register: looked
  failed_when: looked.preflight.failures > 0
"""

RETURN = r"""
preflight:
  description: The report.
  returned: always
  type: dict
  sample:
    failures: 1
    warnings: 0
    summary: GPUAAS_SLICE_FIRMWARE_SUMMARY status=FAIL checks=8 failures=1 warnings=0
    checks:
      - check: bios_settings
        status: FAIL
        detail: ProcSettings.LogicalProc is Disabled, not Enabled
        remediation: run playbook gpuaas.slice.firmware, approve its plan, power-cycle
    lines:
      - GPUAAS_SLICE_GPU address=0000:1b:00.0 id=10de:2335 numa_node=0 iommu_group=- driver=-
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _bios,
    _firmware_preflight,
)


def look(params: Mapping[str, Any]) -> dict[str, Any]:
    profile = params["profile"]
    request = _firmware_preflight.Request(
        bios={
            "attributes": params["attributes"],
            "state": "planned",
            "power_cycle": False,
            "wait": True,
            "acknowledged_jobs": [],
            "program": params["program"],
            "timeout": params["timeout"],
        },
        gpu_ids=profile["gpu"]["ids"],
        fabric_ids=profile["fabric"]["pf_ids"],
        fabric_link=profile["fabric"].get("link") or "",
        expected_gpus=int(profile["gpu"].get("expected") or 0),
        exclude_models=profile["nvme"].get("exclude_models", []),
        not_applicable=profile.get("not_applicable", []),
        refused=_refused(params["refused"]),
    )
    return {"preflight": _firmware_preflight.report(request)}


def _refused(error: Mapping[str, Any]) -> Refusal | None:
    if not error:
        return None
    texts = {key: str(error.get(key, "")) for key in ("expected", "found", "remedy")}
    return Refusal(str(error.get("code") or "task_failed"), **texts)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "dict", "required": True},
            **_bios.LOOKING,
            "program": {"type": "str", "default": "racadm"},
            "timeout": {"type": "float", "default": 120},
            "refused": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
