"""Workers of a pool for inference jobs on a tenant's whole machine: their unit, token and models.

The installation must have the program. The token opens jobs of the pool and nothing else, because
the tenant is root. The reconciler writes the same paths into guests of slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

PROGRAM = "/opt/gpuaas/bin/gpuaas"
UNIT = "/etc/systemd/system/gpuaas-worker@.service"
TOKEN = "/etc/gpuaas/worker.token"  # noqa: S105
MODELS = "/var/lib/gpuaas/models"
_WANTS = "/etc/systemd/system/multi-user.target.wants"
# systemd's group of all instances of the unit.
_SLICE = r"system-gpuaas\x2dworker.slice"
_GROUP = f"/sys/fs/cgroup/system.slice/{_SLICE}"
_KILL_S = 15


def missing_program() -> list[Refusal]:
    """Reason why no worker can run here."""
    if _host.path(PROGRAM).is_file():
        return []
    return [
        Refusal(
            "worker_kit_missing",
            expected=f"{PROGRAM} in the installation of the machine",
            found="no such file",
            remedy="deploy a system image with the program (docs/pools.md), or launch without"
            " worker_pool",
        )
    ]


def instances(replicas: int) -> list[str]:
    """The unit's instances."""
    return [f"gpuaas-worker@{number}.service" for number in range(1, replicas + 1)]


def enabled() -> list[str]:
    """Instances that systemd starts at boot."""
    return _host.matching(_WANTS, "gpuaas-worker@*.service")


def alive() -> bool:
    """Whether an instance runs (control groups v2)."""
    return _host.path(_GROUP).is_dir()


def traces() -> tuple[str, ...]:
    """What is left of workers, as text for people."""
    files = [place for place in (UNIT, TOKEN) if _host.is_there(place)]
    return (*files, *enabled(), *(["running workers"] if alive() else []))


def start(units: Sequence[str]) -> None:
    """Start the instances, now and at each boot."""
    _command.run(["install", "-d", "-m", "0755", "--", MODELS])
    _command.run(["systemctl", "daemon-reload"])
    _command.run(["systemctl", "enable", *units])
    # Restarted, because a running instance keeps the token with which it was started.
    _command.run(["systemctl", "restart", "--no-block", *units])


def end(grace: float) -> None:
    """Stop all instances, by SIGKILL after `grace` seconds, and remove their unit and token.

    The tenant may have changed the unit's own time limit.
    """
    if alive():
        # 5: systemd does not know the slice any more.
        _command.run(["systemctl", "stop", "--no-block", _SLICE], ok=(0, 5))
        _host.wait_gone(_GROUP, grace)
    if alive():
        _command.run(["systemctl", "kill", "--signal=SIGKILL", _SLICE], ok=(0, 1, 5))
        _host.wait_gone(_GROUP, _KILL_S)
    # A tenant may have made folders of these files.
    _command.remove_trees(*(f"{_WANTS}/{name}" for name in enabled()), UNIT, TOKEN)
    _command.run(["systemctl", "daemon-reload"])


def has_models() -> bool:
    """Whether a folder of models is there."""
    return _host.is_there(MODELS)
