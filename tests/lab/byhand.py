"""Scripts and playbooks run on a stage's lab host as an operator runs them: over SSH."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import machine, state
from lab.command import LabError
from lab.demo.stage import INVENTORY, Stage
from lab.paths import REPOSITORY

SCRIPTS = REPOSITORY / "scripts" / "ops"
# Single-file programs for other machines.
PROGRAMS = REPOSITORY / "build" / "scripts"
COMMISSIONING = PROGRAMS / "maas" / "commissioning" / "50-gpuaas-slice-firmware-preflight.sh"
# The host is emulated and busy, and a parity check with repair inspects it twice.
_LIMIT_S = 1200
# An emulated host is up after some minutes, and its last services a little later.
_BOOT_S = 1000
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_HEAD, _SUMMARY = "GPUAAS_SLICE_PARITY", "GPUAAS_SLICE_PARITY_SUMMARY"
_LINE = re.compile(rf"{_HEAD} status=(PASS|WARN|FAIL) check=[a-z_]+ detail=[!-~]([ !-~])*")

# Run on the host: the switch goes down by the first line, and no flow may switch until all guards
# are back. Prints both times, in seconds since the boot.
_SWITCH_DOWN = """set -eu
flows() {{ ovs-ofctl dump-flows ovsbr0 2> /dev/null; }}
since_boot() {{ cut -d ' ' -f 1 /proc/uptime; }}
before=$(flows | grep -c cookie=0x)
began=$(since_boot)
{command}
while :; do
  now=$(flows || true)
  case "$now" in *NORMAL*|*FLOOD*) echo "the bridge switched: $now" >&2; exit 1 ;; esac
  [ "$(echo "$now" | grep -c cookie=0x)" -lt "$before" ] || break
  [ "$(($(since_boot | cut -d . -f 1) - ${{began%.*}}))" -lt 90 ] || {{ echo "$now" >&2; exit 1; }}
  sleep 0.1
done
test "$(ovs-vsctl get-fail-mode ovsbr0)" = secure
echo "$began $(since_boot)"
"""
KILL = 'kill -9 "$(cat /run/openvswitch/ovs-vswitchd.pid)"'
RESTART = "systemctl restart openvswitch-switch.service"

_ENTRY = "/sys/firmware/efi/efivars/Boot00AA-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# Attributes of the variable and of the entry, length of its path, description, end of the path.
_LOADER = bytes([7, 0, 0, 0, 1, 0, 0, 0, 4, 0, 120, 0, 0, 0, 127, 255, 4, 0])
# A boot entry of UEFI, for Python on the host and for its shell.
ADD_BOOT_ENTRY = f"open('{_ENTRY}', 'wb').write({_LOADER})"
REMOVE_BOOT_ENTRY = f"set -e; chattr -i {_ENTRY}; rm {_ENTRY}"

_UP = ("running", "degraded")

Done = subprocess.CompletedProcess[str]
Fields = dict[str, str]


@dataclass(frozen=True)
class Report:
    """Output of the parity check. `checks`: the fields of each line by check, in order.

    `summary`: the fields of the last line. `told`: standard error.
    """

    status: int
    checks: dict[str, Fields]
    summary: Fields
    output: str

    def having(self, status: str) -> dict[str, Fields]:
        return {name: check for name, check in self.checks.items() if check["status"] == status}


def way(stage: Stage, user: str = "root") -> list[str]:
    """Return the SSH options to the host: the lab's key, and the host key read over its channel."""
    lab = stage.host()
    config = stage.folder / "operator_ssh_config"
    config.write_text(
        "Host 127.0.0.1\n"
        f'  IdentityFile "{lab.key}"\n'
        "  IdentitiesOnly yes\n"
        f'  UserKnownHostsFile "{lab.known_hosts}"\n'
        "  GlobalKnownHostsFile /dev/null\n"
    )
    words = ["--host", "127.0.0.1", "--user", user, "--port", str(lab.ssh_port)]
    return [*words, "--ssh-config", str(config)]


def script(stage: Stage, name: str, *words: str) -> Done:
    """Run a script of scripts/ops to its end."""
    assert stage.service is not None
    return subprocess.run(
        [str(SCRIPTS / name), *words],
        env=stage.service.environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def parity(stage: Stage, *words: str, user: str = "root") -> Report:
    """Run the parity check over SSH; every line must be readable by a program."""
    done = script(stage, "gpuaas_slice_host_parity_check.sh", *way(stage, user), *words)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert all(_LINE.fullmatch(line) for line in lines[:-1]), done.stdout
    rows = [fields(_HEAD, line) for line in lines[:-1]]
    checks = {row["check"]: row for row in rows}
    assert len(checks) == len(rows), "a check has one line"
    return Report(done.returncode, checks, fields(_SUMMARY, lines[-1]), done.stderr)


def playbooks(stage: Stage, *names: str, limit_s: float = _LIMIT_S, **variables: Any) -> str:
    """Play playbooks of the collection in a single call, past the reconciler; return Ansible's
    output.

    They get the profile and the approved slots, as from the reconciler.
    """
    values = {"slice_profile": stage.profile(), "slice_slots": stage.bundles(), **variables}
    file = stage.folder / "operator_variables.json"
    file.write_text(json.dumps(values))
    full = [f"gpuaas.slice.{name}" for name in names]
    words = ["playbook", *full, "-i", str(INVENTORY), "-e", f"@{file}"]
    return _ansible(stage, words, limit_s)


def changed(output: str) -> set[str]:
    """Return the number of changed tasks for each host, from the recap."""
    counts = set(re.findall(r"\bchanged=(\d+)", output))
    assert counts, output[-6000:]
    return counts


def reboot(stage: Stage) -> None:
    """Reboot the host in order and wait until it answers again."""
    words = ["adhoc", "all", "-i", str(INVENTORY), "-m", "ansible.builtin.reboot"]
    _ansible(stage, [*words, "-a", f"reboot_timeout={_BOOT_S - 100}"], _BOOT_S)


def power_cut(stage: Stage, *, lost_gpus: Collection[int] = ()) -> None:
    """Cut the power and restore it; the host gets no warning. Return once SSH answers."""
    before = stage.host()
    os.kill(before.pid, signal.SIGKILL)
    while before.alive():
        time.sleep(0.1)
    stage.lab = machine.up(lost_gpus=lost_gpus)
    if stage.lab.ssh_port != before.ssh_port:
        stage.api().patch(stage.path(), {"port": stage.lab.ssh_port})


@contextmanager
def hanging_guardian(stage: Stage) -> Iterator[None]:
    """Suspend the network's service inside the block, which its watchdog notices after 90 seconds.

    A running service would restore a test's removals within seconds.
    """
    unit = "gpuaas-slice-network-baseline.service"
    stage.on_host("systemctl", "service-watchdogs", "no")
    try:
        stage.on_host("systemctl", "kill", "--signal=STOP", unit)
        yield
    finally:
        stage.on_host("systemctl", "service-watchdogs", "yes")
        stage.on_host("systemctl", "kill", "--signal=CONT", unit)
        stage.on_host("systemctl", "restart", unit)


def switch_down(stage: Stage, command: str) -> tuple[float, float]:
    """Take the switch down by KILL or RESTART; no flow switches until all guards are back.

    Returns both times, in seconds since the host's boot.
    """
    down, back = stage.on_host("sh", "-s", stdin=_SWITCH_DOWN.format(command=command)).split()
    return float(down), float(back)


def boot(stage: Stage) -> str:
    """Return the host's boot id."""
    return stage.on_host("cat", _BOOT_ID).strip()


def firmware_report(stage: Stage) -> dict[str, Any]:
    """Firmware of the host in its latest discovery."""
    latest = stage.api().get(stage.path("/slice-topology/discovery"))
    report: dict[str, Any] = latest["document"]["firmware"]
    assert report["unreadable"] == {}, report
    return report


def booted(stage: Stage, *, after: str = "") -> None:
    """Wait for a boot other than `after`, until its last service has started."""
    end = time.monotonic() + _BOOT_S
    while not _is_up(stage, after):
        assert time.monotonic() < end, f"the host is not up after {_BOOT_S} s"
        time.sleep(5)


def _is_up(stage: Stage, after: str) -> bool:
    script = f"'cat {_BOOT_ID}; systemctl is-system-running || true'"
    try:
        now, state = stage.on_host("sh", "-c", script, limit_s=60).split()
    except (LabError, subprocess.TimeoutExpired, ValueError):
        return False  # The host is going down or coming up.
    return now != after and state in _UP


def standalone(stage: Stage, script: Path, **settings: str) -> Done:
    """Copy a single-file program to the host and run it there as cloud-init would."""
    place = f"/run/{script.name}"
    stage.on_host("sh", "-c", f"'cat > {place}'", stdin=script.read_text())
    words = ["env", *(f"{name}={value}" for name, value in settings.items()), "sh", place]
    return subprocess.run(
        state.ssh_command(stage.host(), words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def commissioning(stage: Stage) -> dict[str, list[Fields]]:
    """Run the commissioning script on a machine without Dell's BIOS; return its lines by kind."""
    done = standalone(
        stage,
        COMMISSIONING,
        GPUAAS_SLICE_NOT_APPLICABLE="bios_settings",
        GPUAAS_SLICE_GPU_IDS=",".join(stage.profile()["gpu"]["ids"]),
        GPUAAS_SLICE_GPU_EXPECTED=str(stage.profile()["gpu"]["expected"]),
        GPUAAS_SLICE_FABRIC_IDS=",".join(stage.profile()["fabric"]["pf_ids"]),
        GPUAAS_SLICE_FABRIC_LINK=stage.profile()["fabric"]["link"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sections: dict[str, list[Fields]] = {}
    for line in done.stdout.splitlines():
        head = line.partition(" ")[0]
        sections.setdefault(head.removeprefix("GPUAAS_SLICE_"), []).append(fields(head, line))
    return sections


def _ansible(stage: Stage, words: Sequence[str], limit_s: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ansible", *words],
        env=stage.ansible_environment(),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def token(stage: Stage) -> list[str]:
    """Return the arguments for the reconciler's address, its token and the node."""
    assert stage.service is not None
    file: Path = stage.service.folder / "token"
    words = ["--api-base", stage.service.url, "--api-token-file", str(file)]
    return [*words, "--node-id", stage.path().rpartition("/")[2]]


def fields(head: str, line: str) -> Fields:
    """Split the line into fields as a shell would; any value is a single word."""
    first, *words = shlex.split(line)
    assert first == head, line
    pairs = [word.partition("=") for word in words]
    fields = {name: value for name, _equals, value in pairs}
    assert len(fields) == len(pairs), f"a field has one value: {line}"
    return fields
