"""Upkeep of a slice host between two runs of drift detection: the body of a boot service.

Restores DHCP, starts guardians that were stopped, and quiesces the GPU services, by the code of
bootstrap. It asks neither Open vSwitch nor libvirt, so that one that hangs does not stop it. The
guardian of the network starts this service in turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _gpu_services
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _host,
    _repairs,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files, _dhcp

# A lost part is back within a minute, also while another one takes its time.
PERIOD_S = 20.0

Params = Mapping[str, Any]


def boot(settings_path: str, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Body of the boot service. The boot waits for none of its repairs."""
    _boot_service.notify("READY=1")
    # The GPU services last, because to stop one may take longer than the watchdog waits.
    parts = (_keep_dhcp, _boot_service.start_guardians, _keep_quiet)
    trouble = "cannot restore the baseline"
    return _boot_service.watch(
        settings_path, parts, trouble=trouble, period_s=PERIOD_S, sleep=sleep
    )


def _keep_dhcp(_settings: Params, _turn: int) -> list[str]:
    network = json.loads(_host.read(_baseline_files.SETTINGS) or "{}")
    return _drive(_dhcp.SUBJECT, network) if network and _boot_service.slice_mode() else []


def _keep_quiet(settings: Params, _turn: int) -> list[str]:
    services = {"services": settings["gpu_services"], "state": "quiesced"}
    return _drive(_gpu_services.SUBJECT, services) if _boot_service.slice_mode() else []


def _drive(subject: _change.Subject, params: Params) -> list[str]:
    outcome = _change.drive(subject, params, check_mode=False)
    steps = [f"{step.name} {step.subject}" for step in outcome.steps_done]
    if outcome.failure is not None:
        _repairs.note(steps)
        raise outcome.failure
    return steps
