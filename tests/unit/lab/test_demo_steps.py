"""Steps of the demonstration with two slices, on a stand-in of their host and guests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.command import LabError
from lab.demo import __main__ as demo
from lab.demo import pair_steps, slice_steps
from lab.demo.stage import NODE

NAMES = (
    "host enrol bootstrap discover transition approve bind parity provision login isolation"
    " telemetry power reboot release wipe_proof blocked recover"
)
UNHEARD = "3 packets transmitted, 0 received, +3 errors, 100% packet loss, time 2030ms"
HEARD = "3 packets transmitted, 1 received, 66.6667% packet loss, time 2030ms"


def test_each_step_has_its_name_and_its_line_in_the_table() -> None:
    assert [name for name, _title, _work in demo.STEPS] == NAMES.split()
    assert set(demo.SUMMARIES) == set(NAMES.split())


@pytest.mark.parametrize(
    ("ping", "tcp", "reached"),
    [
        (UNHEARD, "timed out", False),
        ("ping: connect: Network is unreachable", "[Errno 101] Network is unreachable", False),
        (HEARD, "timed out", True),
        ("3 packets transmitted, 30 received", "timed out", True),
        (UNHEARD, "connected", True),
        ("sh: ping: not found", "timed out", True),
    ],
)
def test_only_an_attempt_that_failed_counts(ping: str, tcp: str, reached: bool) -> None:
    assert pair_steps.reached({"ping": ping, "tcp": tcp}) == reached


def test_the_attempt_is_made_by_the_guests_own_programs(tmp_path: Path) -> None:
    ping = tmp_path / "ping"
    ping.write_text(f'#!/bin/sh\necho "$*: {HEARD}"\n')
    ping.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-", "127.0.0.1"],
        input=pair_steps.KNOCK,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    outcome = json.loads(done.stdout)
    assert outcome["ping"].startswith("-n -c 3 -W 2 127.0.0.1: 3 packets")
    assert outcome["tcp"] == "connected" or "refused" in outcome["tcp"]
    assert pair_steps.reached(outcome)


class Site:
    """A stage whose host runs two guests; `restarts` are the allocations that boot anew."""

    def __init__(self) -> None:
        self.boots = {"a": 1, "b": 1}
        self.node_boot = 1
        self.disturbed = self.stuck = False
        pair = [{"id": id, "claims": [{"private_ip": f"10.100.0.{id}"}]} for id in self.boots]
        self.facts = {"project": "p", "allocation": pair[0], "second": pair[1]}
        self.calls: list[Any] = []
        self.console = SimpleNamespace(print=lambda *_words, **_more: None)
        self.member = SimpleNamespace(post=self.post)
        self.service = SimpleNamespace(cli=self.cli)

    def api(self) -> Any:
        return SimpleNamespace(get=self.get)

    def get(self, path: str) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        if name == NODE:
            return {"boot_id": str(self.node_boot)}
        return {"id": name, "state": "active", "task_ids": ["t"], "claims": self._claims(name)}

    def _claims(self, name: str) -> list[dict[str, str]]:
        return [{"private_ip": f"10.100.0.{name}"}]

    def path(self) -> str:
        return f"/admin/nodes/{NODE}"

    def follow(self, task: dict[str, str]) -> None:
        assert task == {"id": "t"}

    def show_progress(self, _task: dict[str, Any]) -> None:
        pass

    def post(self, path: str, body: dict[str, str]) -> None:
        self.calls.append((path, body))
        for each in ("a", "b") if self.disturbed else ("b",):
            self.boots[each] += 1

    def cli(self, *words: str) -> str:
        self.calls.append(words)
        if not self.stuck:
            self.node_boot += 1
            self.boots = {each: boot + 1 for each, boot in self.boots.items()}
        return ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    site = Site()

    def in_guest(stage: Site, command: str, stdin: str = "", *, allocation: dict[str, Any]) -> str:
        if command == "id -un":
            return "tenant\n"
        if stdin == pair_steps.KNOCK:
            stage.calls.append((allocation["id"], command))
            return json.dumps({"ping": UNHEARD, "tcp": "timed out"})
        assert command == pair_steps.BOOT_ID
        return f"{stage.boots[allocation['id']]}\n"

    monkeypatch.setattr(slice_steps, "in_guest", in_guest)
    return site


def test_packets_are_sent_in_both_directions(site: Any) -> None:
    evidence = pair_steps.isolation(site)
    assert site.calls == [("a", "sudo python3 - 10.100.0.b"), ("b", "sudo python3 - 10.100.0.a")]
    assert evidence["logged_in"] == ["tenant", "tenant"]


def test_a_restart_is_of_one_slice(site: Any) -> None:
    evidence = pair_steps.power(site)
    assert site.calls == [("/projects/p/allocations/b/power", {"action": "restart"})]
    assert evidence["after"] == {"a": "1", "b": "2"}
    site.disturbed = True
    with pytest.raises(LabError, match="the other slice"):
        pair_steps.power(site)


def test_the_host_restarts_under_both(site: Any) -> None:
    evidence = pair_steps.reboot(site)
    (words,) = site.calls
    assert words[2:5] == ("nodes", "reboot", NODE)
    assert words[-4:] == ("--allocation", "a", "--allocation", "b")
    assert evidence["slices"] == {"a": "2", "b": "2"}
    site.stuck = True
    with pytest.raises(LabError, match="not restarted"):
        pair_steps.reboot(site)
