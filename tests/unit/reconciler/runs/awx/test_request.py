"""SSH options of an AWX job, tried with a real sshd."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from reconciler.runs.awx import client, request
from reconciler.runs.spec import NodeAccess
from reconciler.trust import ca
from tests.unit.plugins.inventory.inventories import answering
from tests.unit.reconciler.benchmark.sshd import SSHD, USER, machine, new_key
from tests.unit.reconciler.runs.awx.conftest import spec

pytestmark = [
    pytest.mark.covers("CTRL-9", "HOST-13"),
    pytest.mark.skipif(SSHD is None, reason="no sshd"),
]


def test_a_host_key_that_was_revoked_is_refused_by_a_job_too(tmp_path: Path) -> None:
    trust = ca.open_trust(tmp_path)
    login = new_key(tmp_path / "login")
    # The execution environment has our CA and nothing else of ours.
    image = tmp_path / "ssh_known_hosts"
    image.write_text(ca.known_hosts(trust).read_text())

    def connect(at: NodeAccess) -> tuple[int, str]:
        job = replace(spec(), node=at)
        words = shlex.split(request.body(job)["extra_vars"]["ansible_ssh_args"])
        alone = ["-o", "ControlPath=none", "-o", f"GlobalKnownHostsFile={image}"]
        to = ["-i", f"{tmp_path}/login", "-p", str(at.port), "-l", at.user, at.address, "true"]
        # The first value of an option counts.
        argv = ["ssh", *alone, *words, *to]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
        return done.returncode, done.stderr

    def certified(key: str) -> str:
        return ca.certify_host(trust, key, "node-1")

    with machine(tmp_path / "host", login=login, certify=certified) as host:
        at = NodeAccess("node-1", "127.0.0.1", port=host.port, user=USER)
        another = " ".join(new_key(tmp_path / "another").split()[:2])
        assert connect(at)[0] == 0
        assert connect(replace(at, revoked=(another,)))[0] == 0
        code, why = connect(replace(at, revoked=(another, " ".join(host.key.split()[:2]))))
        assert (code, "revoked" in why) == (255, True), why


PAGE = {"next": "/again", "results": [{"id": 1, "name": "gpuaas.slice.discover"}]}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b" " * 2_000_000, "more than 1000000 bytes"),
        (b"[" * 500_000, "not JSON"),
        (PAGE, "does not end, page 3"),
        ({**PAGE, "results": []}, "does not end, page 1"),
    ],
)
def test_an_answer_without_an_end_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object, found: str
) -> None:
    monkeypatch.setattr(client.Client, "LARGEST", 1_000_000)
    monkeypatch.setattr(client, "_MOST_PAGES", 3)
    token = tmp_path / "token"
    token.write_text("t" * 20)
    with answering() as service:
        service.answers = {"awx": answer}
        access = client.AwxAccess(service.url("awx"), token)
        with client.Client(access) as awx, pytest.raises(client.Silent) as silent:
            list(awx.every("/job_templates/"))
    assert found in silent.value.found
