"""Planted secrets of a run at the highest verbosity: on controller and host, in every process."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reconciler.runs import collect
from tests.contract.test_redfish_logs import SYSTEMD
from tests.unit.reconciler.benchmark.sshd import boot
from tests.unit.reconciler.runs.test_hostile_host import ENROLLED, IMAGE, Pair, pair

__all__ = ["boot", "pair"]
pytestmark = pytest.mark.covers("P3")

SLOT = {"slot_id": "slot-0", "fence": 3, "nvme_device": "/dev/disk/by-id/nvme-eui.0"}
SECRETS = {
    "link": "planted-in-the-link-of-an-image",
    "login": "planted-in-the-login-of-a-link",
    "seed": "planted-in-the-user-data",
    "tenant": "planted-in-the-tenants-own-data",
    "environment": "planted-in-the-environment-of-the-service",
}


@contextmanager
def argument_lists() -> Iterator[set[bytes]]:
    """Argument lists of every process of this machine, which plays controller and host."""
    seen: set[bytes] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(path.read_bytes())
                except OSError:
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    ended.set()
    thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_a_secret_of_a_run_is_left_nowhere(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUAAS_DATABASE_URL", f"postgresql://gpuaas:{SECRETS['environment']}@db/x")
    library = pair.folder / "library" / "systemd"
    library.mkdir(parents=True)
    for name, text in SYSTEMD.items():
        (library / name).write_text(text)
    journal, calls = pair.folder / "journal", pair.folder / "calls"
    wrapper = pair.folder / "counting-ssh"
    wrapper.write_text(f'#!/bin/sh\necho call >> "{calls}"\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    logging = {"PYTHONPATH": str(library.parent), "STANDIN_JOURNAL": str(journal)}
    answer = f"os.environ.update({logging!r})\n{ENROLLED.format(node='node-a')}"
    (pair.a.folder / "answer.py").write_text(answer)
    link = f"http://site:{SECRETS['login']}@127.0.0.1:9/image?key={SECRETS['link']}"
    spec = pair.spec(pair.a, "run-1", "run_secrets")
    variables = {
        **spec.variables,
        "slice_image": {**IMAGE, "url": link},
        "slice_allocation": {"id": "23bd713b-6073-4ef7-8a51-2897e902365d"},
        "slice_seed": {
            "user_data": {"password": SECRETS["seed"]},
            "tenant_data": {"runcmd": [f'echo "{SECRETS["tenant"]}" \\ \n']},
        },
        "slice_slots": [SLOT],
    }
    site = dataclasses.replace(
        pair.site,
        environment={
            "ANSIBLE_VERBOSITY": "4",
            "ANSIBLE_DISPLAY_ARGS_TO_STDOUT": "1",
            "ANSIBLE_LOG_PATH": str(pair.folder / "ansible.log"),
            "ANSIBLE_SSH_EXECUTABLE": str(wrapper),
        },
    )
    with argument_lists() as processes:
        outcome = pair.run(site, dataclasses.replace(spec, variables=variables))

    assert outcome.result is not None, outcome
    image, seed = (outcome.result["evidence"][name] for name in ("image", "seed"))
    assert image["failed"] and seed["failed"], "each refusal is printed with all that it holds"
    output = collect.output(pair.folder / "runs" / "run-1", 1 << 20)
    assert output.count("VALUE_SPECIFIED_IN_NO_LOG_PARAMETER") >= 2
    assert "NOT_LOGGING_PARAMETER" in journal.read_text()
    key = (pair.folder / "trust" / "operator").read_text().splitlines()[2]
    planted = [*SECRETS.values(), key]
    ours = {pair.folder / "trust", pair.folder / "node-a" / "answer.py"}
    left = {
        str(path): text
        for path in pair.folder.rglob("*")
        if path.is_file() and not any(path.is_relative_to(each) for each in ours)
        for text in planted
        if text.encode() in path.read_bytes()
    }
    assert left == {}
    assert not [text for text in planted if text in output + json.dumps(outcome.result)]
    # The two modules are two commands over SSH: no folder is made, nothing is copied or fetched.
    assert calls.read_text().split() == ["call", "call"]
    assert len(processes) > 10
    assert not [words for words in processes for text in planted if text.encode() in words]
