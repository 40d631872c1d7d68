"""Runbooks: each command is played on a service that is in the trouble that the page is for: those
of its blocks in the order of the page, then those of its running text.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import sqlalchemy as sa

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import PoolWorker
from reconciler.model.jobs import Outcome
from reconciler.model.pools import PoolState
from reconciler.pools import control, pools, workers
from reconciler.records import queue
from reconciler.trust import keygen
from tests.unit.reconciler.api.stack import ACT, KEY, NODE, Stack
from tests.unit.reconciler.api.test_jobs import ERROR, bury, enqueue, play, with_model
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.cli.test_certificates import enrol
from tests.unit.reconciler.cli.test_doctor import sound
from tests.unit.reconciler.cli.test_recovery import Host, host, stuck
from tests.unit.reconciler.cli.test_ssh import mine
from tests.unit.reconciler.pools.conftest import FUNCTIONS
from tests.unit.reconciler.pools.test_pools import begun, start
from tests.unit.reconciler.pools.test_pools import host as host_of_pools
from tests.unit.reconciler.service.service import until
from tests.unit.repository.test_docs import ROOT, TEXTS, commands, words

__all__ = ["host", "mine", "sound"]
pytestmark = pytest.mark.covers("CTRL-7", "APP-4", "ORCH-2", "CTRL-12")

WHY = {"WHY": "a runbook"}


class Runbook:
    """Plays the commands of a page. played: their lines, with the output of each."""

    def __init__(self, gpuaas: Gpuaas) -> None:
        self._gpuaas = gpuaas
        self.played: list[tuple[str, str]] = []

    def __call__(
        self,
        page: str,
        names: Mapping[str, str],
        *,
        after: Mapping[str, Callable[[], object]] | None = None,
        aside: Mapping[str, Callable[[list[str]], object]] | None = None,
    ) -> dict[str, str]:
        """The output by command. names: values of the page's placeholders. after: acts that follow
        a played command that begins so. aside: plays commands that begin so.
        """
        lines = list(commands(TEXTS[f"{page}.md"]))
        blocks = [line.partition("#")[0].strip() for line, whole in lines if whole]
        text = [line for line, whole in lines if not whole and line not in blocks]
        # The text of the members' page describes other ways than the played way.
        for line in (*blocks, *(text if page.startswith("runbooks/") else ())):
            given = [re.sub(r"[A-Z]+|/srv/backup", lambda m: names.get(m[0], m[0]), word)
                     for word in words(line)]  # fmt: skip
            assert not [word for word in given if re.fullmatch("[A-Z]+", word)], line
            players = [play for start, play in (aside or {}).items() if line.startswith(start)]
            if players:
                players[0](given)
                continue
            output = self._gpuaas(*given)
            assert self._gpuaas.status == 0, f"{line}: {self._gpuaas.err}"
            self.played.append((line, output))
            for beginning, act in (after or {}).items():
                if line.startswith(beginning):
                    act()
        assert self.played, f"no command in {page}"
        return dict(self.played)


@pytest.fixture
def runbook(gpuaas: Gpuaas) -> Runbook:
    return Runbook(gpuaas)


def refused(gpuaas: Gpuaas, code: str) -> Callable[[list[str]], None]:
    """Plays a command that ends with this code here."""

    def play(given: list[str]) -> None:
        gpuaas(*given)
        assert gpuaas.status == 1 and code in gpuaas.err, gpuaas.err

    return play


def environment(stack: Stack) -> dict[str, str]:
    """Of a command that uses the service's database."""
    url = stack.engine.url.render_as_string(hide_password=False)
    return {"GPUAAS_STATE_DIR": str(stack.settings.state_dir), "GPUAAS_DATABASE_URL": url}


def test_a_blocked_slot_is_recovered(host: Host, gpuaas: Gpuaas, runbook: Runbook) -> None:
    stack = host.stack
    allocation = stuck(stack)
    host.absent = [True]
    (task,) = stack.client("admin").get(f"admin/tasks?allocation_id={allocation}").json()["items"]
    (slot, *_others) = [
        row["id"]
        for row in stack.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
        if row["status"] == "cleanup_blocked"
    ]
    names = {"NODE": NODE, "SLOT": slot, "ALLOCATION": allocation, "TASK": task["id"], **WHY}
    # The host is no whole machine.
    aside = {"gpuaas nodes clean-machine": refused(gpuaas, "machine_")}
    outputs = runbook("runbooks/blocked-slot", names, aside=aside)
    assert {slot, allocation} <= {*outputs["gpuaas slots list --blocked"].split()}
    last = next(text for line, text in reversed(runbook.played) if "slots show" in line)
    assert "available" in last and "healthy" in last


def test_a_task_of_a_silent_host_is_found_and_canceled(
    sound: Stack, host: Host, gpuaas: Gpuaas, runbook: Runbook
) -> None:
    selling, host.absent = sound, [True]
    allocation = launch(selling).json()["id"]
    task = selling.lease()
    with transaction(selling.engine) as conn:
        queue.wait_for_host(conn, task.id, task.lease_token, "no route to host", act=ACT)
    gpuaas.at(selling)
    names = {"NODE": NODE, "TASK": task.id, "ALLOCATION": allocation, **WHY}
    # It has been canceled by then.
    aside = {"gpuaas tasks follow": refused(gpuaas, "canceled")}
    outputs = runbook("runbooks/stuck-task", names, aside=aside)
    assert "host_unreachable" in outputs["gpuaas tasks list --state waiting"]
    assert "no route to host" in outputs["gpuaas tasks show TASK"]
    assert "canceled" in outputs["gpuaas tasks list --node NODE"]
    ended = selling.client("admin").get(f"admin/allocations/{allocation}").json()
    assert ended["state"] == "failed"


def test_a_service_and_a_host_are_drained_and_upgraded(
    sound: Stack, gpuaas: Gpuaas, runbook: Runbook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lead(_seconds: float) -> None:
        with transaction(sound.engine) as conn:
            control.follow(conn)

    # The leader takes a turn while a command waits.
    monkeypatch.setattr(time, "sleep", lead)
    gpuaas.at(sound).ending(sound, lambda _conn, _task: {})
    host_of_pools(sound.engine)
    pool, _worker = begun(sound.engine, start(sound.engine, "vision"))

    def reboot(given: list[str]) -> None:
        assert sound.client("admin").get(f"admin/nodes/{NODE}").json()["state"] == "ready"
        tenant = launch(sound).json()["id"]
        activate(sound, tenant)
        gpuaas(*[tenant if word == "tenant" else word for word in given])
        assert gpuaas.status == 0, gpuaas.err

    outputs = runbook(
        "runbooks/drain-and-upgrade",
        {"NODE": NODE, "POOL": pool.id, "/srv/backup": str(tmp_path), "ID": "tenant", **WHY},
        aside={
            "gpuaas nodes reboot": reboot,
            # On SQLite a gateway has no role.
            "gpuaas gateway-role": refused(gpuaas, "gateway_role_needless"),
        },
    )
    assert "version" in outputs["gpuaas pools show POOL"]
    assert "version unknown" in outputs["gpuaas doctor"]
    assert (tmp_path / "gpuaas-before-upgrade.tar.gz").stat().st_size > 1000
    assert sound.client("admin", base="/").get("control/maintenance").json()["mode"] == "normal"


def test_a_site_without_a_leader_is_looked_at(
    sound: Stack, gpuaas: Gpuaas, runbook: Runbook
) -> None:
    gpuaas.at(sound)
    outputs = runbook("runbooks/leader", {"NODE": NODE, **WHY})
    assert "leader" in outputs["gpuaas doctor"]


def served(stack: Stack) -> list[list[str]]:
    """The models of each worker."""
    with reading(stack.engine) as conn:
        return list(conn.execute(sa.select(PoolWorker.TABLE.c.models)).scalars())


def test_dead_letters_are_looked_at_and_queued_again(
    new: Stack, gpuaas: Gpuaas, runbook: Runbook
) -> None:
    with_model(new)
    jobs = [bury(new) for _ in range(7)]
    gpuaas.at(new)

    def succeed() -> None:
        play(new, Outcome({"y": 2}))

    def work(given: list[str]) -> None:
        """A worker serves its model until it is told to end."""
        program = Path(sys.executable).with_name("gpuaas")
        env = {**os.environ, **environment(new)}
        with subprocess.Popen([program, *given], cwd=ROOT, env=env) as worker:
            try:
                until(lambda: worker.poll() is not None or ["twice"] in served(new))
                worker.send_signal(signal.SIGTERM)
                assert worker.wait(60) == 0
            finally:
                worker.kill()

    names = {"NAME": "twice", "MODULE": FUNCTIONS, "FUNCTION": "double"}
    outputs = runbook(
        "runbooks/dead-letters",
        {"P": "demo", "JOB": jobs[0], **names, **WHY},
        after={"gpuaas jobs reprocess": succeed},
        aside={"gpuaas jobs worker": work},
    )
    assert ERROR["code"] in outputs["gpuaas jobs show JOB --project P"]
    states = {new.client("admin").get(f"projects/demo/jobs/{id}").json()["status"] for id in jobs}
    assert states == {"done"}


def test_an_application_that_waits_for_a_member_gets_its_keys(
    selling: Stack, gpuaas: Gpuaas, runbook: Runbook, tmp_path: Path
) -> None:
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    key = tmp_path / "controller.pub"
    key.write_text(f"{KEY}\n")
    gpuaas.at(selling)
    at = ("--project", "demo", "--output", "json")
    made = gpuaas("apps", "create", "slurm", "--controller", mine, "--key", str(key), *at)
    # The host has enrolled, and so has a certificate that can be renewed.
    keygen.new_key(tmp_path / "host", "root@host")
    accepted = selling.client("admin").post(f"admin/nodes/{NODE}/enrollment-token").json()
    assert enrol(selling, tmp_path, accepted["token"]).status_code == 200
    gpuaas.ending(selling, lambda _conn, _task: {})
    (first, *_others) = selling.client("admin").get("admin/tasks").json()["items"]
    names = {"INSTANCE": json.loads(made)["id"], "P": "demo", "NODE": NODE, "TASK": first["id"]}
    outputs = runbook("runbooks/application-deploying", names)
    assert "member_failed" in next(text for line, text in outputs.items() if "apps show" in line)


def test_a_pool_that_hangs_is_evicted_and_started_again(
    new: Stack, gpuaas: Gpuaas, runbook: Runbook, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_of_pools(new.engine)
    first, worker = begun(new.engine, start(new.engine, "vision", devices=["GPU-0"]))
    gpuaas.at(new)

    def end(_seconds: float) -> None:
        """The supervisor of its machine finds no process left."""
        with transaction(new.engine) as conn:
            workers.end(conn, worker, "ended")
            pool = pools.get(conn, first.id)
            workers.conclude(conn, pool, ACT, PoolState(pool.ends_as))

    monkeypatch.setattr(time, "sleep", end)
    for name, value in environment(new).items():
        monkeypatch.setenv(name, value)
    outputs = runbook(
        "runbooks/worker-pools",
        {"POOL": "vision", "MODEL": "m", **WHY},
        after={"gpuaas pools stop --all": lambda: start(new.engine, "vision")},
    )
    assert "vision" not in next(text for line, text in outputs.items() if "leases" in line)
    assert "evicted" in next(text for line, text in outputs.items() if "list --all" in line)
    assert "requested" in outputs["gpuaas pools show POOL"]
    with reading(new.engine) as conn:
        assert pools.get(conn, first.id).state == "evicted"


def test_jobs_that_wait_are_found_paused_and_go_on(
    new: Stack, gpuaas: Gpuaas, runbook: Runbook
) -> None:
    with_model(new)
    host_of_pools(new.engine)
    waiting = enqueue(new)
    gpuaas.at(new)

    def follow() -> None:
        with transaction(new.engine) as conn:
            control.follow(conn)

    def succeed() -> None:
        play(new, Outcome({"y": 2}))

    outputs = runbook(
        "runbooks/consumer-groups",
        {"P": "demo", "NAME": "vision", "MODEL": "m", **WHY},
        after={"gpuaas maintenance drain": follow, "gpuaas maintenance normal": succeed},
    )
    pending, running, done = (text for line, text in outputs.items() if "jobs list" in line)
    assert waiting in pending and waiting not in running and waiting in done


def test_a_member_gets_a_machine_and_gives_it_back(
    mine: str, selling: Stack, gpuaas: Gpuaas, runbook: Runbook, tmp_path: Path
) -> None:
    """The page of members, by a member of a single project that is not named anywhere."""
    key = tmp_path / "key.pub"
    key.write_text(f"{KEY}\n")
    fingerprint = json.loads(gpuaas("ssh-keys", "add", str(key), "-o", "json"))["fingerprint"]
    token = json.loads(gpuaas("token", "own", "create", "--name", "ci", "-o", "json"))["id"]
    names = {"ALLOCATION": mine, "SHA": "SHA", "FINGERPRINT": fingerprint[7:], "TOKEN": token}

    def launch(given: list[str]) -> None:
        made = gpuaas(*given[:4], str(key), *given[5:], "--no-wait", "-o", "json")
        assert json.loads(made)["hostname"] == "train-1", gpuaas.err

    def not_waiting(given: list[str]) -> None:
        gpuaas(*given, "--no-wait")
        assert gpuaas.status == 0, gpuaas.err

    outputs = runbook(
        "tenants",
        names,
        aside={
            "gpuaas launch": launch,
            "gpuaas stop": not_waiting,
            "gpuaas release": not_waiting,
            # Of a machine that runs.
            **dict.fromkeys(("gpuaas ssh A", "gpuaas ssh-terminal"), len),
        },
    )
    assert mine in outputs["gpuaas allocations --state active"]
    assert mine in outputs["gpuaas allocation show ALLOCATION"]
    state = selling.client("member").get(f"projects/demo/allocations/{mine}").json()["state"]
    assert state == "releasing"


def test_every_page_has_its_story() -> None:
    pages = {name.removesuffix(".md") for name in TEXTS if name.startswith("runbooks/")}
    pages.add("tenants")
    mine = re.findall(r"""runbook\(\s*"([\w/-]+)\"""", Path(__file__).read_text(encoding="utf-8"))
    assert sorted(mine) == sorted(pages)
