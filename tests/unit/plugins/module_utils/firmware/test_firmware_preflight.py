"""Firmware preflight: the module, the program and the generated commissioning script."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _openpgp
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host_snapshot,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _bios,
    _firmware_preflight,
    _preflight_command,
)
from ansible_collections.gpuaas.slice.plugins.modules import firmware_preflight

from scripts import standalone
from tests.deployed_machine import NEEDS_ROOT

pytestmark = pytest.mark.covers("HOST-1")

REPOSITORY = Path(__file__).resolve().parents[5]
STANDIN = REPOSITORY / "tests" / "standin" / "racadm"
SCRIPT = standalone.BUILD / standalone.FIRMWARE.path
PROFILE: dict[str, Any] = {
    "name": "test",
    "gpu": {"ids": ["10de:2335"], "expected": 2},
    "fabric": {"pf_ids": ["15b3:a2dc"], "link": "infiniband"},
    "nvme": {"exclude_models": []},
}
FORGED = "S1\nGPUAAS_SLICE_FIRMWARE status=PASS check=kvm\r\x1b[2K$(touch pwned) `id` ;"
bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]


def record(machine: Any) -> None:
    """A machine with two GPUs, a BlueField-3 with InfiniBand and another with Ethernet, an unused
    IOMMU, and a disk with a hostile name."""
    machine.file("/proc/cpuinfo", "processor : 0\nflags : fpu vmx sse\n")
    machine.file("/proc/cmdline", "root=squash:http://maas ro\n")
    machine.file("/proc/self/mountinfo")
    machine.file("/sys/firmware/acpi/tables/DMAR")
    machine.pci("0000:1b:00.0", "10de:2335", node=0)
    machine.pci("0000:43:00.0", "10de:2335", node=1)
    card = {"sriov_totalvfs": "16", "sriov_numvfs": "0"}
    machine.pci("0000:1a:00.0", "15b3:a2dc", node=0, **card, **{"class": "0x020700"})
    machine.pci("0000:bc:00.0", "15b3:a2dc", node=1, **card, **{"class": "0x020000"})
    block = machine.folder("/sys/devices/virtual/nvme0n1")
    for name, value in {"dev": "259:0", "size": "8388608"}.items():
        (block / name).write_text(f"{value}\n")
    controller = machine.folder("/sys/devices/virtual/nvme0n1/device")
    (controller / "serial").write_text(FORGED)
    (controller / "model").write_text("Micron 7450\n")
    machine.link("/sys/class/block/nvme0n1", block)
    machine.link("/sys/block/nvme0n1", block)
    # A multipath member is no separate disk.
    machine.folder("/sys/block/nvme4c4n1")


@pytest.fixture
def racadm(tmp_path: Path) -> Path:
    (tmp_path / "racadm").symlink_to(STANDIN)
    return tmp_path / "racadm"


def state(racadm: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((racadm.parent / "racadm-state.json").read_text())
    return document


def module(racadm: Path, **profile: Any) -> dict[str, Any]:
    report: dict[str, Any] = firmware_preflight.look(
        {
            "profile": PROFILE | profile,
            "attributes": _bios.BARE,
            "program": str(racadm),
            "timeout": 20,
            "refused": {},
        }
    )["preflight"]
    return report


def run(racadm: Path, root: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), "--root", str(root)],
        capture_output=True, text=True, check=False, cwd=racadm.parent,
        env={"PATH": os.environ["PATH"], "GPUAAS_SLICE_RACADM": str(racadm),
             "GPUAAS_SLICE_GPU_EXPECTED": "2", "GPUAAS_SLICE_BIOS_INTERVAL": "0", **settings},
    )  # fmt: skip


def fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(line)[1:])


def checks(lines: list[str]) -> dict[str, str]:
    rows = [fields(row) for row in lines if row.startswith("GPUAAS_SLICE_FIRMWARE ")]
    return {row["check"]: row["status"] for row in rows}


def changes(racadm: Path) -> list[list[str]]:
    """Return the calls of RACADM that change a setting."""
    return [call for call in state(racadm)["calls"] if call[0] == "set" or "create" in call]


def test_the_script_and_the_module_say_the_same(machine: Any, tree: Path, racadm: Path) -> None:
    record(machine)
    done = run(racadm, tree)
    lines = module(racadm)["lines"]
    assert done.stdout.splitlines() == lines and done.stderr == ""
    assert done.returncode == 1
    assert {row.split(" ", 1)[0].removeprefix("GPUAAS_SLICE_") for row in lines} == {
        "BIOS", "BIOS_PLAN", "GPU", "FABRIC", "NVME", "FIRMWARE", "FIRMWARE_SUMMARY",
    }  # fmt: skip
    assert (
        "GPUAAS_SLICE_BIOS attribute=ProcSettings.LogicalProc current=Disabled pending=-"
        " wanted=Enabled status=wrong" in lines
    )
    assert "GPUAAS_SLICE_BIOS_PLAN ProcSettings.LogicalProc=Enabled" in lines
    assert checks(lines) == {
        "bios_settings": "FAIL", "firmware_virtualization": "PASS", "kvm": "FAIL",
        "iommu_groups": "WARN", "gpu": "PASS", "fabric": "PASS", "sriov": "PASS", "nvme": "FAIL",
    }  # fmt: skip
    assert lines[-1] == ("GPUAAS_SLICE_FIRMWARE_SUMMARY status=FAIL checks=8 failures=3 warnings=1")
    # Both only read.
    assert not [call for call in state(racadm)["calls"] if call[0] == "set" or "create" in call]


def test_hostile_values_stay_values(machine: Any, tree: Path, racadm: Path) -> None:
    record(machine)
    done = run(racadm, tree)
    rows = [row for row in done.stdout.split("\n") if row]
    assert all(row.startswith("GPUAAS_SLICE_") and row.isprintable() for row in rows)
    (disk,) = [fields(row) for row in rows if row.startswith("GPUAAS_SLICE_NVME ")]
    assert "status" not in disk and "check=kvm" in disk["serial"]
    assert sum(" check=kvm " in row for row in rows) == 1
    assert not (racadm.parent / "pwned").exists()


def test_told_to_apply_it_changes_the_bios_and_follows_the_job(
    machine: Any, tree: Path, racadm: Path
) -> None:
    record(machine)
    done = run(racadm, tree, GPUAAS_SLICE_APPLY_BIOS="1")
    rows = done.stdout.splitlines()
    jobs = [fields(row) for row in rows if row.startswith("GPUAAS_SLICE_BIOS_JOB ")]
    followed = [job["status"] for job in jobs if job["id"] == "JID_763788807801"]
    assert followed == ["Scheduled", "Running", "Completed", "Completed"]
    assert "GPUAAS_SLICE_BIOS_APPLY status=PASS changed=yes" in rows
    assert checks(rows)["bios_settings"] == "PASS" and state(racadm)["cycles"] == 1
    again = run(racadm, tree, GPUAAS_SLICE_APPLY_BIOS="1")
    assert "GPUAAS_SLICE_BIOS_APPLY status=PASS changed=no" in again.stdout
    assert state(racadm)["cycles"] == 1


def as_maas(
    program: Path, racadm: Path, root: Path, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as MAAS does: without settings, but the stand-in's path and no pause."""
    environment = {"GPUAAS_SLICE_RACADM": str(racadm), "GPUAAS_SLICE_BIOS_INTERVAL": "0"}
    return subprocess.run(
        [str(program), "--root", str(root)],
        capture_output=True, text=True, check=False, cwd=racadm.parent,
        env={"PATH": os.environ["PATH"], **environment, **settings},
    )  # fmt: skip


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The commissioning script in the code's present form."""
    place = tmp_path / "preflight.sh"
    place.write_text(standalone.build(standalone.FIRMWARE))
    place.chmod(0o755)
    return place


@pytest.mark.parametrize(
    ("there", "given", "status", "detail"),
    [
        (8, {}, "PASS", "8 GPUs"),
        (7, {}, "FAIL", "7 GPUs, not 8"),
        (7, {"GPUAAS_SLICE_GPU_EXPECTED": "7"}, "PASS", "7 GPUs"),
        (7, {"GPUAAS_SLICE_GPU_EXPECTED": ""}, "PASS", "7 GPUs"),
        (8, {"GPUAAS_SLICE_GPU_IDS": "10de:2330"}, "FAIL", "no GPU (10de:2330) on the PCI bus"),
    ],
)
def test_a_dead_gpu_fails_commissioning(
    machine: Any, racadm: Path, program: Path, there: int, given: dict[str, str], status: str,
    detail: str,
) -> None:  # fmt: skip
    machine.file("/proc/self/mountinfo")
    for number in range(there):
        machine.pci(f"0000:{0x1B + number:02x}:00.0", "10de:2335")
    done = as_maas(program, racadm, machine.root, **given)
    assert done.stderr == ""
    rows = [fields(row) for row in done.stdout.splitlines() if " check=gpu " in row]
    assert [(row["status"], row["detail"]) for row in rows] == [(status, detail)]


@pytest.mark.parametrize(
    ("model", "given", "blockers"),
    [
        ("Dell BOSS-N1", {}, "identity_missing,excluded_model"),
        ("ACME Boot 2", {"GPUAAS_SLICE_NVME_EXCLUDE": "ACME Boot"},
         "identity_missing,excluded_model"),
        ("ACME Boot 2", {}, "identity_missing"),
    ],
)  # fmt: skip
def test_the_script_excludes_a_boot_card_without_identity(
    machine: Any, racadm: Path, program: Path, model: str, given: dict[str, str], blockers: str
) -> None:
    record(machine)
    machine.file("/sys/devices/virtual/nvme0n1/device/model", f"{model}\n")
    rows = as_maas(program, racadm, machine.root, **given).stdout.splitlines()
    (disk,) = [fields(row) for row in rows if row.startswith("GPUAAS_SLICE_NVME ")]
    assert (disk["model"], disk["blockers"]) == (model, blockers)
    (check,) = [fields(row) for row in rows if " check=nvme " in row]
    assert ("identity_missing" in check["detail"]) == ("excluded" not in blockers)


@pytest.mark.parametrize(
    ("given", "code"),
    [({}, 1), ({"GPUAAS_SLICE_FABRIC_LINK": "ethernet"}, 1),
     ({"GPUAAS_SLICE_FABRIC_IDS": "15b3:a2dc"}, 2)],
)  # fmt: skip
def test_what_the_script_has_by_itself_completes_no_half_of_a_setting(
    machine: Any, racadm: Path, program: Path, given: dict[str, str], code: int
) -> None:
    """Card ids without their link are refused, as in a script without built-in settings."""
    record(machine)
    done = as_maas(program, racadm, machine.root, **given)
    assert (done.returncode, "GPUAAS_SLICE_FABRIC_LINK" in done.stderr) == (code, code == 2)


def test_maas_changes_the_bios_by_the_script_made_for_it_and_by_no_other(
    machine: Any, racadm: Path, program: Path, tmp_path: Path
) -> None:
    record(machine)
    reading = as_maas(program, racadm, machine.root)
    assert "GPUAAS_SLICE_BIOS_PLAN ProcSettings.LogicalProc=Enabled" in reading.stdout
    assert not changes(racadm) and state(racadm)["cycles"] == 0
    applying = tmp_path / "apply.sh"
    assert standalone.main(["--apply-bios", str(applying)]) == 0
    # The environment still overrides a script's built-in setting.
    as_maas(applying, racadm, machine.root, GPUAAS_SLICE_APPLY_BIOS="0")
    assert not changes(racadm) and state(racadm)["cycles"] == 0
    rows = as_maas(applying, racadm, machine.root).stdout.splitlines()
    jobs = [fields(row) for row in rows if row.startswith("GPUAAS_SLICE_BIOS_JOB ")]
    followed = [job["status"] for job in jobs if job["id"] == "JID_763788807801"]
    assert followed == ["Scheduled", "Running", "Completed", "Completed"]
    assert "GPUAAS_SLICE_BIOS_APPLY status=PASS changed=yes" in rows
    assert checks(rows)["bios_settings"] == "PASS" and state(racadm)["cycles"] == 1
    # The next commissioning run of the other script finds the settings done.
    assert checks(as_maas(program, racadm, machine.root).stdout.splitlines())["bios_settings"] == (
        "PASS"
    )
    assert state(racadm)["cycles"] == 1


def test_a_machine_with_somebody_on_it_is_not_power_cycled(
    machine: Any, tree: Path, racadm: Path
) -> None:
    record(machine)
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id="23bd713b", disk_identity="")
    done = run(racadm, tree, GPUAAS_SLICE_APPLY_BIOS="1")
    assert done.returncode == 1
    (line,) = (row for row in done.stdout.splitlines() if "GPUAAS_SLICE_BIOS_APPLY" in row)
    values = fields(line)
    assert (values["status"], values["code"]) == ("FAIL", "host_in_use")
    assert "23bd713b" in values["found"] and values["remedy"]
    assert not [call for call in state(racadm)["calls"] if call[0] == "set" or "create" in call]


def test_a_failed_job_fails_the_script_and_is_said(machine: Any, tree: Path, racadm: Path) -> None:
    record(machine)
    (racadm.parent / "racadm-state.json").write_text(json.dumps({"outcome": "Failed"}))
    done = run(racadm, tree, GPUAAS_SLICE_APPLY_BIOS="1")
    row = next(r for r in done.stdout.splitlines() if r.startswith("GPUAAS_SLICE_BIOS_APPLY"))
    assert (fields(row)["status"], fields(row)["code"]) == ("FAIL", "bios_job_failed")
    assert done.returncode == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"GPUAAS_SLICE_APPLY_BIOS": "yes"},
        {"GPUAAS_SLICE_APPLY_BIOS": "1", "GPUAAS_SLICE_NOT_APPLICABLE": "bios_settings"},
        {"GPUAAS_SLICE_BIOS_DEADLINE": "soon"},
        {"GPUAAS_SLICE_RACADM_REPOSITORY": "http://example.org/x"},
        {"GPUAAS_SLICE_RACADM_PACKAGES": "--allow-unauthenticated"},
        {"GPUAAS_SLICE_FABRIC_LINK": "roce"},
        # Both link types have the same id, so a machine with its own ids must name the link.
        {"GPUAAS_SLICE_FABRIC_LINK": "", "GPUAAS_SLICE_FABRIC_IDS": "15b3:a2dc"},
    ],
)
def test_a_setting_is_never_guessed_at(
    settings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _preflight_command.main([], settings) == _preflight_command.WRONG_CALL
    assert next(iter(settings)).removesuffix("_REPOSITORY") in capsys.readouterr().err


def test_a_key_that_is_not_the_publishers_installs_nothing(
    tree: Path, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs are scripted here: apt-get is not among them, so calling it fails the test."""
    (tree / "key").write_text("not a key")
    script.on("apt-config", "dump")
    scripted = script.run

    def answer(argv: Any, **more: Any) -> _command.Result:
        if argv[0] == "racadm":
            raise _command.Refusal("command_missing", expected="", found="", remedy="")
        if argv[0] == "gpg":
            return _command.Result(2, "", "no valid OpenPGP data found")
        result: _command.Result = scripted(argv, **more)
        return result

    monkeypatch.setattr(_command, "run", answer)
    settings = {
        "GPUAAS_SLICE_RACADM_REPOSITORY": "http://example.org/x",
        "GPUAAS_SLICE_RACADM_SUITE": "jammy",
        "GPUAAS_SLICE_RACADM_KEY_URL": "file:///key",
        "GPUAAS_SLICE_RACADM_FINGERPRINT": "A" * 40,
    }
    assert _preflight_command.main(["--root", str(tree)], settings) == 1
    output = capsys.readouterr().out
    assert "GPUAAS_SLICE_RACADM_INSTALL status=FAIL code=key_fingerprint_mismatch" in output
    assert "detail=command_missing" in output and not (tree / "usr").exists()


def test_racadm_is_installed_where_it_is_missing_and_signed_only(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpg is real; apt-get is a program that records its call and brings RACADM."""
    home = tmp_path / "gpg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--batch", "--quiet", "--homedir", str(home)]
    make = ["--passphrase", "", "--pinentry-mode", "loopback", "--quick-generate-key", "v@x.org"]
    subprocess.run([*gpg, *make, "ed25519", "sign"], check=True, capture_output=True)
    (tree / "key").write_text(
        subprocess.run(
            [*gpg, "--armor", "--export"], check=True, capture_output=True, text=True
        ).stdout
    )
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    apt = tmp_path / "apt-get"
    apt.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$*" in *" install "*)'
        f" ln -s {STANDIN} {tmp_path}/racadm ;; esac\n"
    )
    apt.chmod(0o755)
    monkeypatch.setattr(_command, "_PATH", f"{tmp_path}:{_command._PATH}")
    fingerprint = _openpgp.keys(tree / "key")[0].fingerprint
    settings = {
        "GPUAAS_SLICE_RACADM_REPOSITORY": "http://example.org/x",
        "GPUAAS_SLICE_RACADM_SUITE": "jammy",
        "GPUAAS_SLICE_RACADM_KEY_URL": "file:///key",
        "GPUAAS_SLICE_RACADM_FINGERPRINT": fingerprint,
        "GPUAAS_SLICE_RACADM_COMPONENTS": "main,extra",
    }
    before = os.umask(0o077)
    _preflight_command.main(["--root", str(tree)], settings)
    assert os.umask(before) == 0o077
    output = capsys.readouterr().out
    assert "GPUAAS_SLICE_RACADM_INSTALL status=PASS packages=srvadmin-idracadm8" in output
    assert "GPUAAS_SLICE_BIOS attribute=ProcSettings.LogicalProc current=Disabled" in output
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.rpartition("=any ")[2] for call in calls] == [
        "update", "install --yes --no-install-recommends -- srvadmin-idracadm8",
    ]  # fmt: skip
    assert all("APT::Get::AllowUnauthenticated=false" in call for call in calls)
    # apt's locks are waited for, because the machine's own first upgrade may hold them.
    assert all("DPkg::Lock::Timeout=600" in call for call in calls)
    # apt's own user can read the file in spite of enrolment's umask.
    source = tree / "etc/apt/sources.list.d/dell-openmanage.sources"
    assert (source.stat().st_mode & 0o777, "Components: main extra" in source.read_text()) == (
        0o644, True,
    )  # fmt: skip
    assert (source.parent.stat().st_mode & 0o777) == 0o755
    # Packages that were not installed before are recorded.
    assert _host_snapshot.recall("packages") == {"srvadmin-idracadm8": "installed"}
    # RACADM is present now, so nothing is installed again.
    _preflight_command.main(["--root", str(tree)], settings)
    assert (tmp_path / "calls").read_text().splitlines() == calls


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("given", "signed"),
    [
        ({}, True),
        ({"GPUAAS_SLICE_RACADM_REPOSITORY": ""}, False),
        ({"GPUAAS_SLICE_RACADM_PACKAGES": "other"}, False),
        ({"GPUAAS_SLICE_NOT_APPLICABLE": "bios_settings"}, False),
    ],
)
def test_where_nobody_sets_anything_the_script_knows_dells_repository(
    machine: Any, tree: Path, tmp_path: Path, given: dict[str, str], signed: bool
) -> None:
    """Run as by MAAS. The requested address decides, because nothing can be reached here."""
    record(machine)
    machine.folder("/etc/apt")
    done = subprocess.run(
        ["unshare", "--net", str(SCRIPT), "--root", str(tree)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "GPUAAS_SLICE_RACADM": "no-such-racadm", **given},
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr == ""
    installs = [row for row in done.stdout.splitlines() if "RACADM_INSTALL" in row]
    assert len(installs) == signed
    assert all("linux.dell.com/repo/pgp_pubkeys" in row for row in installs)


def test_what_is_not_applicable_is_not_looked_at(machine: Any, tree: Path) -> None:
    record(machine)
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"])
    assert next(iter(report["checks"])) == {
        "check": "bios_settings", "status": "PASS", "detail": "not_applicable", "remediation": "",
    }  # fmt: skip
    missing = module(Path("/nonexistent/racadm"))
    assert missing["checks"][0]["detail"] == "command_missing: no such program"


def test_an_open_job_is_not_settled(machine: Any, tree: Path, racadm: Path) -> None:
    record(machine)
    names = ("ProcSettings", "LogicalProc"), ("ProcSettings", "ProcVirtualization")
    settings: dict[str, dict[str, str]] = {"IntegratedDevices": {"SriovGlobalEnable": "Enabled"}}
    for group, name in names:
        settings.setdefault(group, {})[name] = "Enabled"
    job = {"id": "JID_763788807801", "name": "Configure: BIOS.Setup.1-1", "status": "Scheduled"}
    file = racadm.parent / "racadm-state.json"
    file.write_text(json.dumps({"settings": settings, "jobs": [job]}))
    assert "a BIOS job is open" in module(racadm)["checks"][0]["detail"]
    file.write_text(json.dumps({"settings": settings, "jobs": []}))
    assert module(racadm)["checks"][0]["status"] == "PASS"


def test_a_disk_is_shown_with_everything_on_it(bench: Any) -> None:
    bench.disk("nvme1n1", minor=1)
    bench.partition("nvme1n1", 1 << 20, 16 << 20, minor=2)
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", (1 << 20) + 1024 + 56, b"\x53\xef")
    bench.mount("259:2", r"/share\0402", "/dev/nvme1n1p1")
    bench.disk("nvme2n1", minor=3, eui="5e0000000000a002")
    request = _firmware_preflight.Request(bios={}, not_applicable=["bios_settings"])
    report = _firmware_preflight.report(request)
    used, raw = (fields(r) for r in report["lines"] if r.startswith("GPUAAS_SLICE_NVME "))
    assert used["by_id"] == "/dev/disk/by-id/nvme-eui.5e0000000000a000"
    assert (used["partitions"], used["mountpoints"]) == ("nvme1n1p1", "/share 2")
    assert used["filesystems"] == "nvme1n1p1:ext2"
    assert used["signatures"].split(",")[0] == "nvme1n1:gpt@512"
    assert f"nvme1n1p1:ext2@{(1 << 20) + 1024 + 56}" in used["signatures"]
    assert "mounted_child" in used["blockers"] and raw["blockers"] == "-"
    assert raw["signatures"] == "-" and raw["size_bytes"] == str(48 << 20)
    nvme = next(check for check in report["checks"] if check["check"] == "nvme")
    assert nvme["status"] == "WARN" and "nvme1n1: mounted_child" in nvme["detail"]


def nvme(*exclude: str) -> tuple[list[dict[str, str]], tuple[str, str]]:
    """Return the lines of the disks, and the result of their check."""
    request = _firmware_preflight.Request(
        bios={}, not_applicable=["bios_settings"], exclude_models=exclude
    )
    report = _firmware_preflight.report(request)
    disks = [fields(r) for r in report["lines"] if r.startswith("GPUAAS_SLICE_NVME ")]
    check = next(row for row in report["checks"] if row["check"] == "nvme")
    return disks, (check["status"], check["detail"])


def test_a_boot_card_is_shown_and_not_judged(bench: Any) -> None:
    """Many boot cards lack a disk identity, and all carry a system."""
    bench.disk("nvme0n1", minor=0, eui="", model="Dell BOSS-N1")
    folder = bench.root / "sys/devices/virtual/nvme0n1/device"
    folder.mkdir()
    (folder / "model").write_text("Dell BOSS-N1                            \n")
    alone, judged = nvme("Dell BOSS")
    assert [disk["blockers"] for disk in alone] == ["identity_missing,excluded_model"]
    assert judged == ("FAIL", "no NVMe namespace but those of excluded models")
    bench.disk("nvme1n1", minor=1)
    both, judged = nvme("Dell BOSS")
    assert [disk["model"] for disk in both] == ["Dell BOSS-N1", "QEMU NVMe Ctrl"]
    assert judged == ("PASS", "1 raw disks")
    (folder / "model").write_text("Micron 7450\n")
    assert nvme("Dell BOSS")[1] == ("FAIL", "nvme0n1: identity_missing")
    assert nvme("Micron 7450")[1] == ("PASS", "1 raw disks")


def test_a_boot_card_in_use_takes_no_storage_transition(bench: Any) -> None:
    bench.disk("nvme0n1", minor=0, eui="5e0000000000a0ff", model="Dell BOSS-N1")
    bench.mount("259:0", "/boot", "/dev/nvme0n1")
    bench.disk("nvme1n1", minor=1)
    disks, judged = nvme()
    (card,) = (disk for disk in disks if disk["kernel_name"] == "nvme0n1")
    assert "excluded_model" in card["blockers"] and "mounted" in card["blockers"]
    assert judged == ("PASS", "1 raw disks")


def test_hardware_that_is_not_there_fails(machine: Any, tree: Path) -> None:
    machine.file("/proc/self/mountinfo")
    machine.pci("0000:1a:00.0", "15b3:a2dc", sriov_totalvfs="0", **{"class": "0x020700"})
    machine.pci("0000:1b:00.0", "10de:2335")
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"])
    details = {row["check"]: row["detail"] for row in report["checks"] if row["status"] == "FAIL"}
    assert details["gpu"] == "1 GPUs, not 2" and "no virtual function" in details["sriov"]
    assert "no DMAR or IVRS" in details["iommu_groups"]
    assert details["nvme"] == "no NVMe namespace" and _block.disks() == []


@pytest.mark.parametrize(
    ("link", "card"), [("infiniband", "0000:1a:00.0"), ("ethernet", "0000:bc:00.0")]
)
def test_only_what_has_the_fabrics_link_counts_as_a_card(
    machine: Any, tree: Path, link: str, card: str
) -> None:
    """The other card is shown all the same, because it has a configured id."""
    record(machine)
    fabric = PROFILE["fabric"] | {"link": link}
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"], fabric=fabric)
    details = {row["check"]: row["detail"] for row in report["checks"]}
    assert (details["fabric"], details["sriov"]) == (card, f"{card} offers 16")
    shown = [fields(row) for row in report["lines"] if row.startswith("GPUAAS_SLICE_FABRIC ")]
    assert {card["address"]: card["link"] for card in shown} == {
        "0000:1a:00.0": "infiniband", "0000:bc:00.0": "ethernet",
    }  # fmt: skip


def test_a_storage_port_without_virtual_functions_is_no_fabric_card(
    machine: Any, tree: Path
) -> None:
    """A plain ConnectX-7 speaks InfiniBand too; a card without virtual functions would fail the
    check."""
    record(machine)
    machine.pci("0000:2a:00.0", "15b3:1021", sriov_totalvfs="0", **{"class": "0x020700"})
    shipped = yaml.safe_load((REPOSITORY / "profiles/xe9680l-h200.yml").read_text())["fabric"]
    assert tuple(shipped["pf_ids"]) == _firmware_preflight.FABRIC_IDS
    assert shipped["link"] == _firmware_preflight.FABRIC_LINK
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"], fabric=shipped)
    details = {row["check"]: row["detail"] for row in report["checks"]}
    assert (details["fabric"], details["sriov"]) == ("0000:1a:00.0", "0000:1a:00.0 offers 16")


def test_what_had_to_come_before_and_failed_is_the_reason(machine: Any, tree: Path) -> None:
    record(machine)
    why = {"code": "apt_failed", "expected": "a package", "found": "no route", "remedy": "a mirror"}
    settings = {"attributes": _bios.BARE, "program": "/nonexistent/racadm", "timeout": 20}
    given = {"profile": PROFILE, "refused": why, **settings}
    bios, *others = firmware_preflight.look(given)["preflight"]["checks"]
    assert (bios["status"], bios["detail"]) == ("FAIL", "apt_failed: no route")
    assert {row["check"] for row in others} >= {"kvm", "gpu", "fabric", "nvme"}


def test_a_machine_with_the_wrong_kind_of_card_is_told_why(machine: Any, tree: Path) -> None:
    machine.file("/proc/self/mountinfo")
    machine.pci("0000:bc:00.0", "15b3:a2dc", sriov_totalvfs="16", **{"class": "0x020000"})
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"])
    details = {row["check"]: row["detail"] for row in report["checks"] if row["status"] == "FAIL"}
    why = "0000:bc:00.0 is ethernet, the fabric is infiniband"
    assert details["fabric"] == f"no card (15b3:a2dc); {why}"
    assert details["sriov"] == "no fabric card that could offer virtual functions"


def test_what_cannot_be_read_takes_nothing_else_along(machine: Any, tree: Path) -> None:
    record(machine)
    machine.file("/dev/nvme0n1")  # no block device
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"])
    details = {row["check"]: row["detail"] for row in report["checks"]}
    assert details["nvme"] == "nvme0n1: identity_missing"
    assert sum(row.startswith("GPUAAS_SLICE_GPU ") for row in report["lines"]) == 2


def test_iommu_groups_are_the_proof(machine: Any, tree: Path) -> None:
    machine.pci("0000:1b:00.0", "10de:2335", group=4)
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"])
    details = {row["check"]: row["detail"] for row in report["checks"]}
    assert details["iommu_groups"] == "1 IOMMU groups"


@pytest.mark.parametrize(
    ("table", "words", "detail"),
    [
        ("DMAR", "quiet", "the kernel does not ask for it"),
        ("DMAR", "intel_iommu=on", "the kernel asks for it"),
        ("IVRS", "quiet", "the kernel asks for it"),
        ("IVRS", "amd_iommu=off", "the kernel is told amd_iommu=off"),
    ],
)
def test_without_groups_the_kernels_words_count(
    machine: Any, tree: Path, table: str, words: str, detail: str
) -> None:
    machine.file(f"/sys/firmware/acpi/tables/{table}")
    machine.file("/proc/cmdline", words)
    report = module(Path("/nonexistent/racadm"), not_applicable=["bios_settings"])
    outcome = {row["check"]: row for row in report["checks"]}["iommu_groups"]
    assert (outcome["status"], detail in outcome["detail"]) == ("WARN", True), outcome
