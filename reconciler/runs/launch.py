"""Launch of a run in a process of its own, exactly once.

There are two launchers that share the run's folder. The process in it plays the playbook itself
(ansible-runner), or starts a job of AWX and follows it. Waiting, progress, output and cancelling
are the same for both (`collect`).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from reconciler.durable import sync, write_text
from reconciler.runs import contract, lock, ssh
from reconciler.runs.awx.client import AwxAccess
from reconciler.runs.awx.request import prepare as prepare_awx
from reconciler.runs.paths import (
    RunPaths,
    read_json,
    run_directory,
    socket_directory,
    write_json,
)
from reconciler.runs.spec import PYTHON, LauncherAway, RunError, RunSpec, SpecError

# Where runs find programs: beside our interpreter first.
SEARCH_PATH = (
    f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
# An interpreter needs less time to start, even on a loaded machine.
_START_LIMIT_S = 60
# Pause between two starts of the process that follows an AWX job. Too low, and a process that
# cannot start, for want of memory perhaps, overloads the machine.
_AGAIN_S = 5.0


@dataclass(frozen=True)
class Site:
    """Settings that every run of this reconciler shares.

    collections_path: the folder that holds `ansible_collections`.
    ssh: the operator's identity, renewed for each launch; None for local playbooks.
    playbooks: a folder of playbooks instead of those of the collection; these have no contract.
    environment: of ansible-playbook; overrides the values set here.
    awx: the AWX that carries out the runs instead of a process here.
    """

    state_dir: Path
    collections_path: Path
    ssh: ssh.SshAccess | None
    playbooks: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    awx: AwxAccess | None = None


def launch(site: Site, spec: RunSpec) -> Path:
    """The folder of the run, which is then alive, finished or lost: see `collect.observe`.

    RunError: nothing was started. LauncherAway: nothing was started, and a later try may succeed.
    """
    if site.playbooks is None:
        contract.check_vars(spec.playbook, spec.variables)
    try:
        return _launch(site, spec)
    except OSError as broken:
        # Usually a full disk. Trying again is safe: a half-written folder is no run.
        raise LauncherAway(
            "run_folder_unwritable",
            expected=f"room for the files of a run in {site.state_dir}",
            found=f"{broken.strerror or broken}",
            remedy="free space there, or repair it; the task goes on by itself",
        ) from broken


def _launch(site: Site, spec: RunSpec) -> Path:
    paths = RunPaths(run_directory(site.state_dir, spec.run_id))
    paths.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.root.mkdir(mode=0o700, exist_ok=True)
    sync(paths.root.parent)
    with lock.attempt(paths.lock) as descriptor:
        _refuse_another_meaning(paths, spec)
        if descriptor is None or paths.process.exists() or paths.outcome.exists():
            return paths.root
        _prepare(site, spec, paths)
        _spawn(paths, descriptor)
    return paths.root


def resume(run_dir: Path) -> None:
    """Start a process again that follows the AWX job of a run, unless a process does."""
    paths = RunPaths(run_dir)
    with lock.attempt(paths.lock) as descriptor:
        if descriptor is None or paths.outcome.exists():
            return
        if time.time() - paths.process.stat().st_mtime < _AGAIN_S:
            return
        _spawn(paths, descriptor)


def _refuse_another_meaning(paths: RunPaths, spec: RunSpec) -> None:
    manifest = read_json(paths.manifest)
    if manifest is None or manifest["fingerprint"] == spec.fingerprint():
        return
    raise SpecError(
        "run_id_reused",
        expected=f"the same playbook, node and variables as before under {spec.run_id}",
        found=f"{spec.playbook} on {spec.node.node_id} with other variables",
        remedy="give the new attempt a run id of its own",
    )


def _prepare(site: Site, spec: RunSpec, paths: RunPaths) -> None:
    if site.awx is not None:
        awx = {"awx": prepare_awx(site.awx, spec, paths)}
    else:
        awx = {}
        _prepare_here(site, spec, paths)
    write_json(
        paths.manifest,
        {
            "schema": 1,
            "run_id": spec.run_id,
            "playbook": spec.playbook,
            "target": _target(site, spec.playbook),
            "node_id": spec.node.node_id,
            "correlation_id": spec.correlation_id,
            "deadline_s": spec.deadline_s,
            "fingerprint": spec.fingerprint(),
            "prepared_at": datetime.now(UTC).isoformat(),
            **awx,
        },
    )


def _prepare_here(site: Site, spec: RunSpec, paths: RunPaths) -> None:
    for folder in (paths.env, paths.inventory.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    write_text(paths.variables, inert(spec.variables))
    write_json(paths.inventory, _inventory(spec))
    write_text(paths.env / "ansible.cfg", "# All settings are in envvars.\n")
    write_json(paths.env / "envvars", _environment(site, spec, paths))
    write_json(paths.env / "settings", {"pexpect_timeout": 1, "suppress_ansible_output": True})


def inert(variables: Mapping[str, Any]) -> str:
    """Variables for Ansible, marked so that none is expanded as a template.

    Ansible trusts a file of variables. Without the mark it would run Jinja from a host's serial
    number or a tenant's host name, here on the controller.
    """
    node = yaml.SafeDumper(io.StringIO()).represent_data(dict(variables))
    node.tag = "!unsafe"
    return str(yaml.serialize(node, Dumper=yaml.SafeDumper, explicit_start=True))


def _target(site: Site, playbook: str) -> str:
    if site.playbooks is None:
        return f"gpuaas.slice.{playbook}"
    return str(site.playbooks.resolve() / f"{playbook}.yml")


def _inventory(spec: RunSpec) -> dict[str, Any]:
    node = spec.node
    host = {
        "ansible_host": node.address,
        "ansible_port": node.port,
        "ansible_user": node.user,
        "ansible_become": node.user != "root",
        "ansible_python_interpreter": PYTHON,
    }
    return {"all": {"hosts": {node.node_id: host}}}


def _environment(site: Site, spec: RunSpec, paths: RunPaths) -> dict[str, str]:
    values = {
        "ANSIBLE_CONFIG": str(paths.env / "ansible.cfg"),
        "ANSIBLE_HOME": str(paths.root / "home"),
        "ANSIBLE_COLLECTIONS_PATH": str(site.collections_path.resolve()),
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_HOST_KEY_CHECKING": "1",
        "ANSIBLE_GATHERING": "explicit",
        # Otherwise every fact that a host answers is a variable of its later tasks, and replaces
        # defaults of roles and settings of the connection.
        "ANSIBLE_INJECT_FACT_VARS": "0",
        "ANSIBLE_FORKS": "1",
        "ANSIBLE_NOCOLOR": "1",
        # Appears in each module's line in the host's syslog.
        "ANSIBLE_TARGET_LOG_INFO": spec.log_tag,
    }
    if site.ssh is not None:
        sockets = socket_directory(site.state_dir, spec.node.node_id)
        values |= ssh.environment(site.ssh, spec.node.node_id, sockets)
    return values | dict(site.environment)


def _spawn(paths: RunPaths, descriptor: int) -> None:
    """Returns once the process has detached; it has forked and inherited the lock."""
    log = os.open(paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        started = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "reconciler.runs.process"),
                *(str(paths.root), str(descriptor)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_clean_environment(paths),
            cwd=paths.root,
            pass_fds=(descriptor,),
            start_new_session=True,
            timeout=_START_LIMIT_S,
            check=False,
        )
    finally:
        os.close(log)
    if started.returncode:
        raise RunError(
            "run_not_started",
            expected="the process of the run to start",
            found=f"exit {started.returncode}",
            remedy=f"read {paths.log.name} in the folder of the run; launching again is safe",
        )


def _clean_environment(paths: RunPaths) -> dict[str, str]:
    """Nothing of the reconciler's environment: it may hold secrets, and runs record theirs."""
    return {
        "PATH": SEARCH_PATH,
        "HOME": str(paths.root / "home"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        lock.MARK: str(paths.root),
    }
