"""Telemetry of a slice host: its boot service, and the account that prints the snapshot over SSH.

The account has no rights, no password and no shell of its own: a certificate with its principal
runs the only command of its principals file, and sshd's `restrict` denies everything else.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _boot_service,
    _boot_units,
    _change,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _telemetry

# Also the principal of the reconciler's certificate for this account.
ACCOUNT = _accounts.TELEMETRY
PRINCIPALS = _accounts.principals(ACCOUNT)
# The host measures the age, by the clock that wrote the file, so that the snapshot of a stopped
# service is not printed. To `-mmin` a time in the future, from before a change of the clock, is
# recent. The folder belongs to root, so nobody else can put a link there.
_RECENT = "-maxdepth 0 -type f -mmin -2 ! -newermt now"
COMMAND = f"exec find {_telemetry.SNAPSHOT} {_RECENT} -exec cat {{}} +"
LINE = f'restrict,command="{COMMAND}" {ACCOUNT}\n'

_UNIT = _boot_units.TELEMETRY


@dataclass(frozen=True)
class State:
    """account: whether it exists. principals: text of the file, "" without it."""

    installed: _boot_service.Installed
    account: bool
    principals: str


def observe(_params: _change.Params) -> State:
    return State(
        installed=_boot_service.observe(_UNIT),
        account=_accounts.named(ACCOUNT) is not None,
        principals=_host.kept(PRINCIPALS) or "",
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params.get("state") == "absent":
        return _change.Plan(tuple(_back(state)))
    steps = []
    if not state.account:
        steps.append(_change.Step("add_account", ACCOUNT, None, "without rights"))
    if state.principals != LINE.strip():
        steps.append(_change.Step("write_file", PRINCIPALS, state.principals, LINE.strip()))
    return _change.Plan((*steps, *_boot_service.plan(_UNIT, state.installed)))


def _back(state: State) -> list[_change.Step]:
    steps = _boot_service.plan_removal(_UNIT, state.installed)
    if state.principals:
        steps.append(_change.Step("remove_file", PRINCIPALS, state.principals, ""))
    if state.account:
        steps.append(_change.Step("remove_account", ACCOUNT, "present", None))
    return steps


def apply(_params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "add_account":
        _accounts.add_login(ACCOUNT, "/bin/sh")
    elif step.name == "write_file":
        _accounts.write_principals(ACCOUNT, LINE)
    elif step.name == "remove_file":
        _host.remove(PRINCIPALS)
    elif step.name == "remove_account":
        _accounts.remove_login(ACCOUNT)
    else:
        _boot_service.apply(_UNIT, step)
        if step.name == "remove_service":
            shutil.rmtree(_host.path(_telemetry.FOLDER), ignore_errors=True)
    return None


SUBJECT = _change.Subject(observe, plan, apply)
