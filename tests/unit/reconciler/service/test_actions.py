"""Work that AWX starts: the collection's module and playbook over the real service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.modules import reconciler_task

from reconciler.db.engine import transaction
from reconciler.inventory import maas_sync
from reconciler.model.states import TaskState
from reconciler.records import leasing, queue
from tests.standin.maas import TOKEN
from tests.standin.service import Manager, standing
from tests.unit.plugins.inventory.inventories import ROOT, environment
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.service.service import Service, serving, until

pytestmark = pytest.mark.covers("ECO-1", "ECO-4")


class Site:
    """A service without a worker. `ending`: the next task ends with this result or error."""

    def __init__(self, stack: Stack, service: Service, token: Path) -> None:
        self.stack, self.service, self.token = stack, service, token
        self._headers = {"Authorization": f"Bearer {stack.secrets['admin']}"}

    def items(self, path: str) -> list[dict[str, Any]]:
        url = f"{self.service.url}/api/v1{path}"
        answer = httpx.get(url, headers=self._headers, trust_env=False, timeout=60)
        return list(answer.json()["items"])

    def act(self, action: str, subject: str = NODE, **params: Any) -> dict[str, Any]:
        """The module's own function, with the values of its options."""
        defaults = {"reason": "a test of the module", "to": None, "allow_reboot": False}
        connection = {"url": self.service.url, "token_file": str(self.token), "ca_file": ""}
        values = {"discovery": None, "key": None, "wait_timeout": 30, **defaults, **connection}
        return reconciler_task.act({"action": action, "subject": subject, **values, **params})

    def ending(self, work: Callable[[], Any], **outcome: Any) -> Any:
        """The result of `work`, whose task ends with this outcome."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            leased: list[Any] = []

            def lease() -> bool:
                with transaction(self.stack.engine) as conn:
                    leased.extend(leasing.lease(conn, "test"))
                # Work that fails before it has queued a task says why itself.
                return bool(leased) or done.done()

            # A playbook begins slowly on a busy machine.
            until(lease, 120)
            state = TaskState.FAILED if outcome.get("error") else TaskState.SUCCEEDED
            for task in leased:
                held = (task.id, task.lease_token)
                with transaction(self.stack.engine) as conn:
                    result = {"result": {}, "error": None, **outcome}
                    queue.finish(conn, *held, state, ACT, **result)
            return done.result()


@pytest.fixture(scope="module")
def maas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    with standing(tmp_path_factory.mktemp("maas"), "maas", TOKEN) as manager:
        manager.begin()
        yield manager


@pytest.fixture
def site(
    selling: Stack, maas: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setattr(reconciler_task, "_PAUSE_S", 0.05)
    token = tmp_path / "token"
    token.write_text(selling.secrets["admin"] + "\n")
    environment = {f"GPUAAS_{name}".upper(): str(text) for name, text in maas.settings.items()}
    with serving(selling.settings.state_dir, **environment) as service:
        service.start("serve", "--api-only")
        until(service.alive)
        yield Site(selling, service, token)


def play(site: Site, name: str, *words: object, folder: str = "") -> None:
    """Play as a job of AWX does. folder: that AWX has made for the job."""
    program = Path(sys.executable).parent / "ansible-playbook"
    done = subprocess.run(
        [program, ROOT / "awx/playbooks" / name, *words],
        env=environment(
            GPUAAS_API=site.service.url,
            GPUAAS_TOKEN_FILE=str(site.token),
            AWX_PRIVATE_DATA_DIR=folder,
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_of_awx_has_a_task_and_an_audit_row_and_is_not_done_twice(site: Site) -> None:
    answers = {"gpuaas_action": "parity", "gpuaas_subject": NODE, "gpuaas_reason": "nightly check"}
    words = ("-i", "localhost,", "-e", json.dumps({**answers, "awx_job_id": 7}))
    # The second job is of another AWX, which counts its jobs from 1, too.
    for number, folder in enumerate(("/tmp/awx_7_ab12", "/tmp/awx_7_cd34"), 1):

        def job(folder: str = folder) -> None:
            play(site, "act.yml", *words, folder=folder)

        site.ending(job, result={"failures": 0})
        job()
        task, *others = site.items("/admin/tasks")
        assert len(others) == number - 1
        assert (task["kind"], task["node_id"], task["state"]) == ("node.parity", NODE, "succeeded")
    assert "nightly check" in [row["reason"] for row in site.items("/admin/audit")]


def test_parity_of_all_asks_for_each_ready_node_without_root(site: Site, tmp_path: Path) -> None:
    """The inventory gives each host the user and the rights that its own playbooks need."""
    # Another user than root, which the test may be.
    become = {"ansible_become_user": "nobody", "ansible_become_exe": "/bin/false"}
    host = {"ansible_user": "ubuntu", "ansible_become": True, **become}
    groups = {"state_ready": {"hosts": {NODE: host}}, "state_draining": {"hosts": {"node-9": host}}}
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"all": {"children": groups}}))
    words = ("-i", inventory)
    site.ending(lambda: play(site, "parity_of_all.yml", *words), result={"failures": 0})
    (task,) = site.items("/admin/tasks")
    assert (task["kind"], task["node_id"], task["state"]) == ("node.parity", NODE, "succeeded")


def test_what_the_reconciler_refuses_fails_with_its_own_code(site: Site) -> None:
    def code(action: str, subject: str = NODE, **params: Any) -> str:
        with pytest.raises(Refusal) as refused:
            site.act(action, subject, **params)
        return refused.value.code

    assert code("parity", "{{ lookup('pipe', 'id') }}") == "subject_invalid"
    assert code("parity", "../settings/slice-scheduling") == "subject_invalid"
    assert code("recover", NODE) == "subject_invalid"
    assert code("drain", reason="why") == "reason_missing"
    assert code("drain", "node-9") == "node_not_found"
    assert code("approve", discovery=10_000) == "discovery_changed"
    assert code("netbox_sync", "") == "netbox_not_configured"
    assert site.items("/admin/tasks") == []
    error = {"code": "ovs_missing", "expected": "a bridge", "found": "none", "remedy": "bootstrap"}
    failed = site.ending(lambda: code("bind"), error=error)
    assert failed == "ovs_missing"
    assert site.ending(lambda: code("parity"), result={"failures": 2}) == "not_proven"


def test_a_job_uploads_the_scripts_that_maas_runs(site: Site, maas: Manager) -> None:
    settings = site.stack.settings.model_copy(update=maas.settings)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(site.act, "maas_sync", "")

        def answered() -> bool:
            """The leader of the site takes a turn."""
            maas_sync.tend(site.stack.engine, settings)
            return done.done()

        until(answered)
    assert done.result()["answer"]["done"] == {"scripts uploaded": 2}
    assert "50-gpuaas-slice-firmware-preflight" in maas.record()["scripts"]


def test_a_discovery_is_shown_with_its_number_and_only_that_is_approved(site: Site) -> None:
    seen = site.ending(lambda: site.act("discover"), result={})
    assert [row["slot_index"] for row in seen["candidates"]] == [0, 1, 2, 3]
    assert all(isinstance(row["blockers"], list) for row in seen["candidates"])
    assert site.act("drain")["answer"]["state"] == "draining"
    with pytest.raises(Refusal, match="discovery_changed"):
        site.act("approve", discovery=seen["discovery"] - 1)
