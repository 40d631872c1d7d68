"""The programs of scripts/ops on the lab host of a stage, as an operator runs them: over SSH."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.demo.stage import Stage
from lab.paths import REPOSITORY

SCRIPTS = REPOSITORY / "scripts" / "ops"
# Emulated and busy; two looks at the host with a repair in between.
_LIMIT_S = 1200
_HEAD, _SUMMARY = "GPUAAS_SLICE_PARITY", "GPUAAS_SLICE_PARITY_SUMMARY"
_LINE = re.compile(rf"{_HEAD} status=(PASS|WARN|FAIL) check=[a-z_]+ detail=[!-~]([ !-~])*")

Done = subprocess.CompletedProcess[str]
Fields = dict[str, str]


@dataclass(frozen=True)
class Report:
    """What the parity check printed. checks: the fields of each line by check, in its order.

    summary: the fields of the last line. told: standard error.
    """

    status: int
    checks: dict[str, Fields]
    summary: Fields
    told: str

    def having(self, status: str) -> dict[str, Fields]:
        return {name: one for name, one in self.checks.items() if one["status"] == status}


def way(stage: Stage) -> list[str]:
    """How the programs get to the host: the lab's key, and the host key learnt over its channel."""
    lab = stage.host()
    config = stage.folder / "operator_ssh_config"
    config.write_text(
        "Host 127.0.0.1\n"
        f'  IdentityFile "{lab.key}"\n'
        "  IdentitiesOnly yes\n"
        f'  UserKnownHostsFile "{lab.known_hosts}"\n'
        "  GlobalKnownHostsFile /dev/null\n"
    )
    words = ["--host", "127.0.0.1", "--user", "root", "--port", str(lab.ssh_port)]
    return [*words, "--ssh-config", str(config)]


def script(stage: Stage, name: str, *words: str) -> Done:
    """Run one of scripts/ops to its end."""
    assert stage.service is not None
    return subprocess.run(
        [str(SCRIPTS / name), *words],
        env=stage.service.environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def parity(stage: Stage, *words: str) -> Report:
    """The parity check over SSH; every line must be one that a program can read."""
    done = script(stage, "gpuaas_slice_host_parity_check.sh", *way(stage), *words)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert all(_LINE.fullmatch(line) for line in lines[:-1]), done.stdout
    found = [_fields(_HEAD, line) for line in lines[:-1]]
    checks = {one["check"]: one for one in found}
    assert len(checks) == len(found), "a check has one line"
    return Report(done.returncode, checks, _fields(_SUMMARY, lines[-1]), done.stderr)


def token(stage: Stage) -> list[str]:
    """Who asks the reconciler, and about which node."""
    assert stage.service is not None
    file: Path = stage.service.folder / "token"
    words = ["--api-base", stage.service.url, "--api-token-file", str(file)]
    return [*words, "--node-id", stage.path().rpartition("/")[2]]


def _fields(head: str, line: str) -> Fields:
    """The fields as a shell would split the line: a value holds whatever it holds, as one word."""
    first, *words = shlex.split(line)
    assert first == head, line
    pairs = [word.partition("=") for word in words]
    fields = {name: value for name, _equals, value in pairs}
    assert len(fields) == len(pairs), f"a field has one value: {line}"
    return fields
