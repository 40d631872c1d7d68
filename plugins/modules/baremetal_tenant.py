#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Account of a bare-metal tenant and workers of its pool: present, ended, or removed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: baremetal_tenant
short_description: The account of a bare-metal tenant on this host, and the workers of its pool
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - V(present) makes the account with its home, its SSH keys and sudo. It has no password.
  - V(ended) takes sudo away, locks the account, stops its sessions and ends every process of its
    uid, and of that uid only. What sudo started counts by its login uid, which the kernel keeps.
  - V(absent) does the same, and removes crontabs, queued jobs, lingering, the account, its group,
    its home and every file of its uid in folders that all may write to.
  - With O(workers), V(present) also starts workers of a pool for inference jobs; V(ended) ends them
    with their unit and token, and V(absent) removes their models.
  - A tenant has had root. Traces that a tenant left as root are not searched here but reported by
    M(gpuaas.slice.host_baseline).
  - Refuses with C(node_in_slice_mode), C(stale_fence), C(account_taken), C(username_invalid),
    C(key_invalid), C(processes_left), C(home_has_mounts), C(worker_kit_missing).
options:
  username:
    description: The account's name.
    type: str
    required: true
  uid:
    description: >-
      The account's number, the same for every tenant: a machine has one tenant at a time.
    type: int
    default: 59000
  fence:
    description: The fence of the node's claim.
    type: int
    required: true
  ssh_keys:
    description: Public keys. Required with O(state=present).
    type: list
    elements: str
  workers:
    description: Workers of a pool that this machine runs, if any. Its installation has the program.
    type: dict
    suboptions:
      token:
        description: What the workers log in with.
        type: str
        required: true
      unit:
        description: The template unit C(gpuaas-worker@.service).
        type: str
        required: true
      replicas:
        description: Number of workers.
        type: int
        required: true
  state:
    description: Requested state of the account.
    type: str
    choices: [present, ended, absent]
    default: present
  grace:
    description: Seconds that processes get to end by themselves.
    type: int
    default: 10
seealso:
  - module: gpuaas.slice.baremetal_lease
  - module: gpuaas.slice.tenant_disks
  - module: gpuaas.slice.managed_key
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Let the tenant in
  gpuaas.slice.baremetal_tenant:
    username: alice
    fence: 3
    ssh_keys: ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG alice"]

- name: Remove the tenant
  gpuaas.slice.baremetal_tenant:
    username: alice
    fence: 4
    state: absent
"""

RETURN = r"""
account:
  description: The account after the run.
  returned: always
  type: dict
  sample: {username: alice, uid: 59000, home: /home/alice}
absence:
  description: Whether nothing of the account is left, with one check for each trace.
  returned: always
  type: dict
  sample: {absent: true, checks: {account: {absent: true, known: true, detail: nothing found}}}
"""

from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _change,
    _command,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import (
    _pool_workers,
    _tenant_account,
)

_REMOVALS = {"remove_account": "userdel", "remove_group": "groupdel"}
_FOLDERS = {
    "remove_schedules": _tenant_account.SCHEDULES,
    "remove_files": _tenant_account.SHARED,
}


@dataclass(frozen=True)
class State:
    user: _accounts.User | None
    keys: str | None
    sudoers: str | None
    token: str | None
    unit: str | None
    enabled: tuple[str, ...]
    traces: _tenant_account.Traces
    problems: tuple[Refusal, ...]


def observe(params: _change.Params) -> State:
    name, uid = params["username"], params["uid"]
    home = _tenant_account.home_of(name)
    problems = _host_mode.not_ordinary()
    problems += _ledger.load(_ledger.MACHINE).stale(params["fence"])
    if params["state"] == "present":
        problems += [*_tenant_account.taken(name, uid), *_keys(params["ssh_keys"])]
        problems += _pool_workers.missing_program() if params["workers"] else []
    return State(
        user=next((user for user in _accounts.users() if user.uid == uid), None),
        keys=_host.read(f"{home}/.ssh/authorized_keys"),
        sudoers=_host.read(_tenant_account.SUDOERS),
        token=_host.read(_pool_workers.TOKEN),
        unit=_host.read(_pool_workers.UNIT),
        enabled=tuple(_pool_workers.enabled()),
        traces=_tenant_account.traces(name, uid),
        problems=tuple(problems),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    steps = _present(params, state) if params["state"] == "present" else _end(params, state)
    if params["state"] == "absent":
        steps += _absent(params, state)
    return _change.Plan(tuple(steps), state.problems)


def _present(params: _change.Params, state: State) -> list[_change.Step]:
    name, home = params["username"], _tenant_account.home_of(params["username"])
    steps = []
    if state.user is None:
        after = {"name": name, "uid": params["uid"], "home": home}
        steps.append(_change.Step("add_account", name, None, after))
    keys = "\n".join(params["ssh_keys"])
    if state.keys != keys:
        steps.append(_change.Step("write_keys", f"{home}/.ssh/authorized_keys", state.keys, keys))
    rule = _rule(name)
    if state.sudoers != rule:
        steps.append(_change.Step("write_sudoers", _tenant_account.SUDOERS, state.sudoers, rule))
    return steps + (_start(params["workers"], state) if params["workers"] else [])


def _start(workers: _change.Params, state: State) -> list[_change.Step]:
    """The token is in no step, because steps are printed."""
    steps = []
    if state.token != workers["token"]:
        steps.append(_change.Step("write_token", _pool_workers.TOKEN))
    unit = workers["unit"].rstrip("\n")
    if state.unit != unit:
        steps.append(_change.Step("write_unit", _pool_workers.UNIT, state.unit, unit))
    units = _pool_workers.instances(workers["replicas"])
    if steps or list(state.enabled) != sorted(units):
        before = list(state.enabled)
        steps.append(_change.Step("start_workers", _pool_workers.UNIT, before, units))
    return steps


def _end(params: _change.Params, state: State) -> list[_change.Step]:
    """Logins are closed before sessions are ended, so that no new session starts meanwhile."""
    left, name = state.traces, params["username"]
    steps = []
    if left.sudoers:
        steps.append(_change.Step("remove_sudoers", _tenant_account.SUDOERS, "present", None))
    steps += [_change.Step("lock_account", name, "open", "expired") for name in _open(left)]
    if left.slice_alive:
        steps.append(_change.Step("end_sessions", f"sessions of {name}", "alive", "ended"))
    if left.processes:
        steps.append(_change.Step("end_processes", f"uid {params['uid']}", list(left.processes)))
    if left.workers:
        steps.append(_change.Step("end_workers", _pool_workers.UNIT, list(left.workers), []))
    return steps


def _absent(params: _change.Params, state: State) -> list[_change.Step]:
    left, name = state.traces, params["username"]
    home = _tenant_account.home_of(name)
    steps = []
    if left.lingering:
        steps.append(_change.Step("remove_linger", f"/var/lib/systemd/linger/{name}", "set", None))
    if left.schedules:
        subject = f"schedules of uid {params['uid']}"
        steps.append(_change.Step("remove_schedules", subject, list(left.schedules), []))
    if left.mounts:
        steps.append(_change.Step("unmount_home", home, list(left.mounts), []))
    steps += [_change.Step("remove_account", account, "present", None) for account in left.accounts]
    steps += [_change.Step("remove_group", group, "present", None) for group in left.groups]
    if left.home:
        steps.append(_change.Step("remove_home", f"{home} and what is in it", "present", None))
    if left.files:
        subject = f"files of uid {params['uid']}"
        steps.append(_change.Step("remove_files", subject, list(left.files), []))
    if left.models:
        steps.append(_change.Step("remove_models", _pool_workers.MODELS, "present", None))
    return steps


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    name, uid = params["username"], params["uid"]
    _ledger.check(_ledger.MACHINE, params["fence"])
    match step.name:
        case "add_account":
            _command.run(_useradd(name, uid))
        case "write_keys":
            _write_keys(name, step.after)
        case "write_sudoers":
            _command.run(["visudo", "--check", "--quiet", "--file=-"], stdin=f"{step.after}\n")
            _host.write(step.subject, f"{step.after}\n", mode=0o440)
        case "lock_account":
            _command.run(["usermod", "--expiredate", "1", "--", step.subject])
        case "end_sessions":
            _tenant_account.end_sessions(uid)
        case "end_processes":
            return {"ended": _accounts.end_processes(uid, grace=params["grace"])}
        case "remove_sudoers" | "remove_linger":
            _host.remove(step.subject)
        case "unmount_home":
            _tenant_account.unmount_home(name)
        case "remove_account" | "remove_group":
            # 6: there is none. The group goes with the account, unless it has members.
            _command.run([_REMOVALS[step.name], "--", step.subject], ok=(0, 6))
        case "remove_home":
            _tenant_account.remove_home(name)
        case "remove_schedules" | "remove_files":
            _tenant_account.remove_files(_FOLDERS[step.name], uid)
        case _:
            _apply_workers(params, step)
    return None


def _apply_workers(params: _change.Params, step: _change.Step) -> None:
    match step.name:
        case "write_token":
            _host.write(step.subject, f"{params['workers']['token']}\n", mode=0o600)
        case "write_unit":
            _host.write(step.subject, f"{step.after}\n")
        case "start_workers":
            _pool_workers.start(step.after)
        case "end_workers":
            _pool_workers.end(params["grace"])
        case "remove_models":
            _command.remove_trees(step.subject)


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    checks = state.traces.checks()
    return {
        "account": {
            "username": params["username"],
            "uid": params["uid"],
            "home": _tenant_account.home_of(params["username"]),
        },
        "absence": {"absent": all(check["absent"] for check in checks.values()), "checks": checks},
    }


def _open(left: _tenant_account.Traces) -> list[str]:
    """Accounts of the tenant's uid that have not expired."""
    expired = set()
    for line in (_host.kept("/etc/shadow") or "").splitlines():
        fields = line.split(":")
        if len(fields) == 9 and fields[7] == "1":
            expired.add(fields[0])
    return [name for name in left.accounts if name not in expired]


def _keys(keys: list[str] | None) -> list[Refusal]:
    bad = [key for key in keys or [] if not key.isprintable() or not key.strip()]
    if keys and not bad:
        return []
    return [
        Refusal(
            "key_invalid",
            expected="at least one public key, each on one line",
            found=f"{len(bad)} that are not" if keys else "none",
            remedy="launch with the text of a .pub file",
        )
    ]


def _rule(name: str) -> str:
    return f"{name} ALL=(ALL:ALL) NOPASSWD:ALL"


def _useradd(name: str, uid: int) -> list[str]:
    # "*" is no password at all; a locked one ("!") would keep keys out where PAM is not used.
    return [
        "useradd", "--uid", str(uid), "--user-group", "--create-home",
        "--home-dir", _tenant_account.home_of(name), "--shell", "/bin/bash",
        "--password", "*", "--comment", "gpuaas tenant", "--", name,
    ]  # fmt: skip


def _write_keys(name: str, keys: str) -> None:
    folder = f"{_tenant_account.home_of(name)}/.ssh"
    _command.run(["install", "-d", "-m", "0700", "-o", name, "-g", name, "--", folder])
    _host.write(f"{folder}/authorized_keys", f"{keys}\n", mode=0o600)
    _command.run(["chown", "--", f"{name}:{name}", f"{folder}/authorized_keys"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "username": {"type": "str", "required": True},
            "uid": {"type": "int", "default": 59000},
            "fence": {"type": "int", "required": True},
            "ssh_keys": {"type": "list", "elements": "str", "no_log": False},
            "workers": {
                "type": "dict",
                "options": {
                    "token": {"type": "str", "required": True, "no_log": True},
                    "unit": {"type": "str", "required": True},
                    "replicas": {"type": "int", "required": True},
                },
            },
            "state": {
                "type": "str",
                "choices": ["present", "ended", "absent"],
                "default": "present",
            },
            "grace": {"type": "int", "default": 10},
        },
        required_if=[("state", "present", ["ssh_keys"])],
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
