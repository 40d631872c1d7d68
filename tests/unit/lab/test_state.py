"""Record of a lab between commands, and the check whether its host runs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from lab import state
from lab.command import LabError


def lab(folder: Path, pid: int, started: int) -> state.Lab:
    return state.Lab(
        folder=str(folder),
        pid=pid,
        pid_started=started,
        ssh_port=2222,
        key=str(folder / "key"),
        known_hosts=str(folder / "known_hosts"),
        qmp=str(folder / "qmp.sock"),
        userdata=str(folder / "userdata.sock"),
        accel="tcg",
        qemu="11.1",
        firmware="/fw",
        gateway="10.0.2.2",
        image="/image",
    )


def own_start() -> int:
    started = state.process_start(os.getpid())
    assert started is not None
    return started


def test_a_lab_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = lab(tmp_path, os.getpid(), own_start())
    saved.save()
    assert state.load(tmp_path) == saved
    assert state.running(tmp_path) == saved


def test_a_reused_pid_is_not_the_lab(tmp_path: Path) -> None:
    saved = lab(tmp_path, os.getpid(), own_start() - 1)
    saved.save()
    assert not saved.alive()
    with pytest.raises(LabError, match="lab up"):
        state.running(tmp_path)


def test_no_lab_is_none(tmp_path: Path) -> None:
    assert state.load(tmp_path) is None


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text('{"port": 1}')
    with pytest.raises(LabError, match="remove it"):
        state.load(tmp_path)


def test_ssh_trusts_only_the_learnt_host_key(tmp_path: Path) -> None:
    words = state.ssh_command(dataclasses.replace(lab(tmp_path, 1, 1)), ["true"])
    assert "StrictHostKeyChecking=yes" in words
    assert f"UserKnownHostsFile={tmp_path}/known_hosts" in words
    assert words[-2:] == ["root@127.0.0.1", "true"]
