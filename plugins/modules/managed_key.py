#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""The key of an application in a bare-metal tenant's authorized_keys, with an end."""

from __future__ import annotations

DOCUMENTATION = r"""
module: managed_key
short_description: The key of an application in a tenant's authorized_keys
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - V(present) keeps one line with the instance's marker in C(~/.ssh/authorized_keys) of the tenant
    of a whole machine. Until it expires, the key may run commands and use no other feature of SSH.
  - V(absent) removes that line. Without the account there is nothing to remove.
  - All other lines, the file's owner, group and mode stay as they are; the file is replaced in one
    step.
  - The home belongs to the tenant. No link in it is followed, and nothing that is not the tenant's
    own is read or written.
  - Refuses with C(node_in_slice_mode), C(stale_fence), C(machine_not_leased), C(account_missing),
    C(username_invalid), C(home_unsafe), C(keys_not_written), C(managed_key_invalid).
options:
  username:
    description: The tenant's account.
    type: str
    required: true
  uid:
    description: The account's uid.
    type: int
    default: 59000
  allocation_id:
    description: The allocation that the machine is given to.
    type: str
    required: true
  fence:
    description: The fence of the node's claim.
    type: int
    required: true
  instance_id:
    description: The application's instance, a UUID with dashes. Its marker is made of it.
    type: str
    required: true
  public_key:
    description: Type and base64 of the key. Required with O(state=present).
    type: str
  expires_at:
    description:
      - When the key ends, in seconds since 1970; sshd counts whole minutes. Required with
        O(state=present).
    type: int
  state:
    description: Whether the line is to be there.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gpuaas.slice.baremetal_tenant
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Let the application's controller run commands until the key ends
  gpuaas.slice.managed_key:
    username: alice
    allocation_id: 0f8fad5b-d9cb-469f-a165-70867728950e
    fence: 3
    instance_id: 7c9e6679-7425-40de-944b-e07fc1f90ae7
    public_key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX
    expires_at: 1767225600

- name: Remove the key
  gpuaas.slice.managed_key:
    username: alice
    allocation_id: 0f8fad5b-d9cb-469f-a165-70867728950e
    fence: 3
    instance_id: 7c9e6679-7425-40de-944b-e07fc1f90ae7
    state: absent
"""

RETURN = r"""
managed_key:
  description: Whether the line is there, and when its key ends (0 without a line).
  returned: always
  type: dict
  sample: {present: true, expires_at: 1767225600}
"""

from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _change,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import (
    _managed_key,
    _tenant_account,
)


@dataclass(frozen=True)
class State:
    user: _accounts.User | None
    lines: tuple[bytes, ...]
    problems: tuple[Refusal, ...]


def observe(params: _change.Params) -> State:
    home = _tenant_account.home_of(params["username"])
    entry = _ledger.load(_ledger.MACHINE)
    problems = _host_mode.not_ordinary()
    problems += entry.stale(params["fence"])
    user = _account(params)
    if params["state"] == "present":
        problems += [*_not_leased(params, entry), *_missing(params, user)]
    lines: tuple[bytes, ...] = ()
    # The files of an account that is not the tenant's are not read.
    if user is not None and not problems:
        with _managed_key.folder(home, user.uid) as at:
            content = b"" if at is None else _managed_key.read(at, home, user.uid).content
        lines = tuple(_managed_key.ours(content, params["instance_id"]))
    return State(user, lines, tuple(problems))


def plan(params: _change.Params, state: State) -> _change.Plan:
    key_line = _key_line(params)
    if state.user is None or list(state.lines) == ([] if key_line is None else [key_line]):
        return _change.Plan((), state.problems)
    subject = f"{_tenant_account.home_of(params['username'])}/.ssh/authorized_keys"
    before = "\n".join(line.decode(errors="replace") for line in state.lines) or None
    name = "remove_line" if key_line is None else "put_line"
    after = None if key_line is None else key_line.decode()
    return _change.Plan((_change.Step(name, subject, before, after),), state.problems)


def apply(params: _change.Params, _step: _change.Step) -> dict[str, Any] | None:
    _ledger.check(_ledger.MACHINE, params["fence"])
    home, line, user = (
        _tenant_account.home_of(params["username"]),
        _key_line(params),
        _account(params),
    )
    if user is None:
        return None
    make_for = None if line is None else user.gid
    with _managed_key.folder(home, user.uid, make_for=make_for) as at:
        if at is None:
            return None
        # Read again: the tenant may have changed the file since the first read.
        existing = _managed_key.read(at, home, user.uid)
        content = _managed_key.replaced(existing.content, params["instance_id"], line)
        if content != existing.content:
            gid = user.gid if existing.gid is None else existing.gid
            mode = 0o600 if existing.mode is None else existing.mode
            _managed_key.write(at, content, uid=user.uid, gid=gid, mode=mode)
    return None


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    present = bool(state.lines)
    ends = params["expires_at"] if present and list(state.lines) == [_key_line(params)] else 0
    return {"managed_key": {"present": present, "expires_at": ends}}


def _key_line(params: _change.Params) -> bytes | None:
    if params["state"] == "absent":
        return None
    given = (params["instance_id"], params["public_key"], params["expires_at"])
    return _managed_key.line(*given)


def _account(params: _change.Params) -> _accounts.User | None:
    """The tenant's account. Name and uid must both match; either alone may be another account."""
    for user in _accounts.users():
        if (user.name, user.uid) == (params["username"], params["uid"]):
            return user
    return None


def _not_leased(params: _change.Params, entry: _ledger.Entry) -> list[Refusal]:
    if entry.allocation_id == params["allocation_id"]:
        return []
    return [
        Refusal(
            "machine_not_leased",
            expected=f"a machine that is leased to allocation {params['allocation_id']}",
            found=f"leased to {entry.allocation_id or 'none'}",
            remedy="compare the host with the records; a key goes to its own tenant only",
        )
    ]


def _missing(params: _change.Params, user: _accounts.User | None) -> list[Refusal]:
    if user is not None:
        return []
    return [
        Refusal(
            "account_missing",
            expected=f"the user {params['username']} with uid {params['uid']}",
            found="no such account",
            remedy="the tenant has renamed or removed it; release the allocation",
        )
    ]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "username": {"type": "str", "required": True},
            "uid": {"type": "int", "default": 59000},
            "allocation_id": {"type": "str", "required": True},
            "fence": {"type": "int", "required": True},
            "instance_id": {"type": "str", "required": True},
            "public_key": {"type": "str", "no_log": False},
            "expires_at": {"type": "int"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ["public_key", "expires_at"])],
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
