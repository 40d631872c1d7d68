"""The gateway's access to slices: a line for each, and an account that can do nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _change,
    _command,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _relay, _traces

from tests.conftest import Script

pytestmark = pytest.mark.covers("SLICE-10")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
TWO = "33bd713b-6073-4ef7-8a51-2897e902365d"
AUTHORITY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKlD7mHAmvLJF1Eb8RvzpO3kcJHk1bkNQMeIKMxZk0V3"
OTHER = AUTHORITY.replace("IKlD", "IKlE")
FILES = ["write_authority", "write_settings"]
USERS = "root:x:0:0:root:/root:/bin/bash\n"
RELAY = "gpuaas-relay:x:998:998::/nonexistent:/usr/sbin/nologin\n"


def params(state: str = "present", allocation: str = ONE, **changes: Any) -> dict[str, Any]:
    slots = [{"slot_id": f"slot-{allocation[:2]}", "fence": 3}]
    given = {"allocation_id": allocation, "ip": "10.100.0.10", "slots": slots, "state": state}
    return {**given, "authority": AUTHORITY, **changes}


@pytest.fixture
def host(tree: Path, script: Script) -> Path:
    """A host that leases a slot to each of two slices, with the programs that add the account."""
    (tree / "etc").mkdir()
    (tree / "etc/passwd").write_text(USERS)
    script.on("sshd", "-t")
    script.on("systemctl", "try-reload-or-restart", "ssh")
    for allocation in (ONE, TWO):
        _ledger.hold(f"slot-{allocation[:2]}", fence=3, allocation_id=allocation, disk_identity="")
    return tree


def drive(given: dict[str, Any]) -> _change.Outcome:
    return _change.drive(_relay.SUBJECT, given, check_mode=False)


def lines(tree: Path) -> list[str]:
    return (tree / _relay.PRINCIPALS.lstrip("/")).read_text().splitlines()


def with_account(tree: Path, entry: str = RELAY) -> None:
    (tree / "etc/passwd").write_text(USERS + entry)


def programs(host: Path, monkeypatch: pytest.MonkeyPatch, **leave: str) -> list[list[str]]:
    """Programs that change the accounts; with the entry that each leaves."""
    made: list[list[str]] = []
    run = _command.run

    def change(argv: list[str], **options: Any) -> Any:
        if argv[0] not in leave:
            return run(argv, **options)
        made.append(argv)
        with_account(host, leave[argv[0]])
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", change)
    return made


def test_a_way_is_opened_beside_others_and_closed(host: Path) -> None:
    with_account(host)
    first = drive(params())
    assert first.done == [*FILES, "open_way"] and first.facts == {"relay": {"open": True}}
    assert drive(params()).plan.steps == ()
    assert drive(params(allocation=TWO, ip="10.100.0.11")).done == ["open_way"]
    assert lines(host) == [
        f'restrict,port-forwarding,permitopen="10.100.0.10:22" slice:{ONE}',
        f'restrict,port-forwarding,permitopen="10.100.0.11:22" slice:{TWO}',
    ]
    assert [trace.owner for trace in _traces.looks("ovsbr0")["relay"]()] == [ONE, TWO]
    closed = drive(params("absent"))
    assert closed.done == ["close_way"] and closed.facts == {"relay": {"open": False}}
    assert len(lines(host)) == 1 and TWO in lines(host)[0]
    assert drive(params("absent")).plan.steps == ()


def test_a_line_that_is_nobodys_goes_with_the_next_change(host: Path) -> None:
    """It would let the gateway connect to other addresses than a guest's."""
    with_account(host)
    drive(params())
    with (host / _relay.PRINCIPALS.lstrip("/")).open("a") as file:
        file.write(f'permitopen="10.0.0.1:22" slice:{TWO}\n')
    drive(params(allocation=TWO, ip="10.100.0.11"))
    assert [_relay.owner(text) for text in lines(host)] == [ONE, TWO]


def test_an_address_of_an_earlier_slice_is_replaced(host: Path) -> None:
    with_account(host)
    drive(params(ip="10.100.0.9"))
    assert drive(params()).done == ["open_way"]
    assert lines(host) == [_relay.line(ONE, "10.100.0.10")]


def test_the_account_is_made_without_shell_password_and_home(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = programs(host, monkeypatch, useradd=RELAY)
    assert drive(params()).done == ["add_account", *FILES, "open_way"]
    ((*options, name),) = made
    assert name == "gpuaas-relay" and "--no-create-home" in options
    assert options[options.index("--shell") + 1] == "/usr/sbin/nologin"
    assert options[options.index("--password") + 1] == "*"


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ("gpuaas-relay:x:998:998::/nonexistent:/bin/bash\n", "relay_account_foreign"),
        ("gpuaas-relay:x:0:0::/nonexistent:/usr/sbin/nologin\n", "relay_account_foreign"),
    ],
)
def test_an_account_that_can_do_more_is_refused(host: Path, entry: str, code: str) -> None:
    with_account(host, entry)
    outcome = drive(params())
    assert outcome.failure is not None and outcome.failure.code == code
    assert not (host / _relay.PRINCIPALS.lstrip("/")).exists()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"slots": [{"slot_id": "slot-23", "fence": 2}]}, "stale_fence"),
        ({"slots": [{"slot_id": "slot-33", "fence": 3}]}, "lease_missing"),
        ({"slots": []}, "lease_missing"),
        ({"ip": '10.100.0.10:22",permitopen="10.0.0.1'}, "spec_invalid"),
        ({"ip": "10.100.0.10 "}, "spec_invalid"),
        ({"authority": ""}, "spec_invalid"),
        ({"authority": f"{AUTHORITY}\n{OTHER}"}, "spec_invalid"),
    ],
)
def test_a_late_or_wrong_run_opens_nothing(host: Path, changes: dict[str, Any], code: str) -> None:
    with_account(host)
    with pytest.raises(Refusal) as refused:
        drive(params(**changes))
    assert refused.value.code == code
    assert not (host / _relay.PRINCIPALS.lstrip("/")).exists()


def test_settings_that_sshd_refuses_are_taken_back(tree: Path, script: Script) -> None:
    (tree / "etc").mkdir()
    with_account(tree)
    _ledger.hold("slot-23", fence=3, allocation_id=ONE, disk_identity="")
    script.on("sshd", "-t", rc=255, err="line 3: bad")
    outcome = drive(params())
    assert outcome.failure is not None and outcome.failure.code == "relay_not_taken"
    assert "line 3: bad" in outcome.failure.found
    assert not (tree / _relay.SETTINGS.lstrip("/")).exists()


class Killed(BaseException):
    """The end of a run by SIGKILL: no part of it goes on."""


@pytest.mark.parametrize("program", ["sshd", "systemctl"])
def test_settings_that_a_killed_run_left_are_checked_by_the_next(
    host: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    with_account(host)
    settings, before = host / _relay.SETTINGS.lstrip("/"), "# of a release before\n"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(before)
    real, refused = _command.run, [False]

    def run(argv: list[str], **options: Any) -> Any:
        if argv == ["sshd", "-t"] and refused[0]:
            raise Refusal("command_failed", expected="", found="line 3: bad", remedy="")
        return real(argv, **options)

    def kill(argv: list[str], **options: Any) -> Any:
        if argv[0] == program:
            raise Killed
        return real(argv, **options)

    monkeypatch.setattr(_command, "run", kill)
    with pytest.raises(Killed):
        drive(params())
    assert settings.read_text() == _relay.settings()
    # The next run finds the wanted text, but checks it again.
    monkeypatch.setattr(_command, "run", run)
    refused[0] = True
    outcome = drive({"state": "kept", "authority": AUTHORITY})
    assert outcome.failure is not None and outcome.failure.code == "relay_not_taken"
    assert settings.read_text() == before
    refused[0] = False
    assert drive(params()).done == ["write_settings", "open_way"]
    assert drive(params()).plan.steps == ()
    # A killed removal is completed in the same way.
    drive(params("absent"))
    monkeypatch.setattr(_command, "run", kill)
    if program == "systemctl":
        with pytest.raises(Killed):
            drive({"state": "removed"})
        monkeypatch.setattr(_command, "run", run)
        assert drive({"state": "kept", "authority": AUTHORITY}).plan.steps == ()
        programs(host, monkeypatch, userdel="")
        assert drive({"state": "removed"}).done[0] == "remove_settings"


def test_a_host_of_an_earlier_version_takes_the_gateways_authority(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also takes a replaced authority; a host without the account gets nothing."""
    kept = {"state": "kept", "authority": AUTHORITY}
    with_account(host)
    assert drive(kept).plan.steps == ()
    drive(params())
    (host / _relay.AUTHORITY.lstrip("/")).unlink()
    settings = host / _relay.SETTINGS.lstrip("/")
    lines = settings.read_text().splitlines(keepends=True)
    settings.write_text("".join(line for line in lines if "TrustedUserCAKeys" not in line))
    assert drive(kept).done == FILES
    assert drive(kept).plan.steps == ()
    assert settings.read_text() == "".join(lines)
    # Sessions by the earlier authority end, because its key may have been stolen.
    ended: list[int] = []
    monkeypatch.setattr(_accounts, "end_processes", lambda uid, **_: ended.append(uid))
    replaced = drive({"state": "kept", "authority": OTHER})
    assert (replaced.done, ended) == (["write_authority", "end_sessions"], [998])
    assert (host / _relay.AUTHORITY.lstrip("/")).read_text() == f"{OTHER}\n"


def test_a_machine_that_sells_no_slices_keeps_nothing(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_account(host)
    drive(params())
    in_use = drive({"state": "removed"})
    assert in_use.failure is not None and in_use.failure.code == "relay_in_use"
    drive(params("absent"))
    removed = programs(host, monkeypatch, userdel="")
    outcome = drive({"state": "removed"})
    assert outcome.done == ["remove_settings", "remove_authority", "remove_account"]
    assert len(removed) == 1
    for path in (_relay.SETTINGS, _relay.AUTHORITY, _relay.PRINCIPALS):
        assert not (host / path.lstrip("/")).exists()
    assert drive({"state": "removed"}).plan.steps == ()
