"""Bootstrap without Ansible: the playbook's order, a line per step, a reboot only when allowed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _deploy_bootstrap,
    _host_packages,
    _host_tuning,
    _kernel_arguments,
    _tuning_opt_in,
    _tuning_profiles,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _host,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

from scripts import standalone

pytestmark = pytest.mark.covers("HOST-4")

ROOT = Path(__file__).resolve().parents[5]
SCRIPT = "scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh"
REBOOT = ("systemctl", "--no-block", "reboot")
TENANT = "23bd713b-6073-4ef7-8a51-2897e902365d"


def profile(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / f"profiles/{name}.yml").read_text())
    return document


@pytest.fixture(autouse=True)
def _carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that the single-file program carries, from the repository."""

    def text(name: str) -> str:
        return json.dumps(yaml.safe_load((ROOT / name).read_text()))

    monkeypatch.setattr(_deploy_bootstrap, "_carried", text)


def test_every_role_and_module_of_the_playbook_has_its_parts() -> None:
    plays = yaml.safe_load((ROOT / _deploy_bootstrap.PLAYBOOK).read_text())
    assert list(_deploy_bootstrap._order(plays)) == list(_deploy_bootstrap._PARTS)


def test_the_order_of_the_parts_is_the_playbooks(monkeypatch: pytest.MonkeyPatch) -> None:
    plays = yaml.safe_load((ROOT / _deploy_bootstrap.PLAYBOOK).read_text())
    plays[0]["tasks"][0]["block"].reverse()
    monkeypatch.setattr(_deploy_bootstrap, "_carried", lambda _name: json.dumps(plays))
    names = [part.name for part in _deploy_bootstrap.parts(profile("lab"))]
    assert names[0] == "slice_mode" and names[-2:] == ["packages", "module_cache"]


def test_the_parts_are_what_the_playbook_gives_its_roles() -> None:
    site = {"site_address": "10.20.0.7/16", "route": "10.20.0.0/16", "interface": "ibp65s0"}
    server = profile("xe9680l-h200")
    server["fabric"] |= site
    parts = {part.name: part.params for part in _deploy_bootstrap.parts(server)}
    assert list(parts) == [
        "module_cache", "packages", "tuning", "gpu_services", "kernel", "libvirt", "fabric",
        "ipoib", "network", "telemetry", "slice_mode",
    ]  # fmt: skip
    assert parts["packages"]["packages"] == [*_host_packages.REQUIRED, *server["packages"]]
    # Not every distribution has this package, and a host works without it.
    assert parts["packages"]["optional"] == server["optional_packages"] == ["rshim"]
    assert "rshim" not in parts["packages"]["packages"]
    assert parts["gpu_services"]["services"] == server["gpu_services"]
    assert parts["kernel"]["arguments"] == server["kernel_arguments"]
    assert (parts["tuning"]["profiles"], parts["kernel"]["tuning"]) == ([], [])
    assert (parts["fabric"]["pf_ids"], parts["fabric"]["count"]) == (server["fabric"]["pf_ids"], 8)
    assert parts["fabric"]["link"] == "infiniband"
    assert parts["ipoib"] == {
        "interface": "ibp65s0",
        "address": "10.20.0.7/16",
        "route": "10.20.0.0/16",
    }
    network = server["network"]
    assert parts["network"] == {
        **{key: network[key] for key in ("bridge", "address", "subnet", "tmfifo")},
        "allowed_networks": network.get("allowed_networks", []),
        "denied_networks": network.get("denied_networks", []),
        "name_servers": [],
        "packets_per_second": 200_000,
        "egress_probe": network.get("egress_probe", ""),
    }
    names = [part.name for part in _deploy_bootstrap.parts(profile("lab"))]
    assert "ipoib" not in names


def test_a_digest_is_for_one_profile_also_where_nothing_can_be_foretold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh machine has no program of the network's, so all of its steps are still to come."""
    monkeypatch.setenv("PATH", str(tmp_path))
    confirmed, other = profile("lab"), profile("lab")
    other["network"]["denied_networks"] = []
    plans = [_deploy_bootstrap.forecast(each) for each in (confirmed, other, confirmed)]
    (network,) = [row for row in plans[0]["plan"] if row["part"] == "network"]
    assert (network["steps"], bool(network["open"])) == ("", True)
    assert plans[0]["plan"] == plans[1]["plan"]
    assert plans[0]["digest"] == plans[2]["digest"] != plans[1]["digest"]


def test_what_the_host_goes_without_is_said(
    script: Any, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = "--showformat=${db:Status-Status} ${Package}\\n"
    script.on("dpkg-query", "--show", form, "--", "zstd", "rshim", out="installed zstd\n", rc=1)
    quiet = ("-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=")
    script.on("apt-cache", *quiet, "policy", "--", "rshim")
    params = {"packages": ["zstd"], "optional": ["rshim"]}
    part = _deploy_bootstrap.Part("packages", _host_packages.SUBJECT, params)
    assert _deploy_bootstrap._done(part, check=False)
    output = capsys.readouterr().out
    assert shlex.split(output)[1:] == [
        "status=PASS", "step=packages",
        "detail=nothing to do; without rshim, which apt does not have",
    ]  # fmt: skip


class Machine:
    """Two parts that write files, and a kernel that may require a reboot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons: list[str] = []
        self.broken = ""
        monkeypatch.setattr(_deploy_bootstrap, "parts", self._parts)
        monkeypatch.setattr(_deploy_bootstrap, "_carried", {"profiles/lab.yml": "{}"}.__getitem__)
        monkeypatch.setattr(_deploy_bootstrap, "_kernel", lambda _profile, **more: more)
        monkeypatch.setattr(_kernel_arguments, "observe", lambda _params: None)
        monkeypatch.setattr(_kernel_arguments, "reboot_reasons", lambda *_state: self.reasons)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        kernel = _change.Subject(lambda _p: None, lambda *_s: _change.Plan(), self._never)
        monkeypatch.setattr(_kernel_arguments, "SUBJECT", kernel)

    def _parts(self, _profile: Any) -> list[_deploy_bootstrap.Part]:
        subject = _change.Subject(
            lambda params: _host.read(params["file"]),
            lambda params, state: _change.Plan(
                () if state == "on" else (_change.Step("write_file", params["file"]),)
            ),
            self._write,
        )
        return [
            _deploy_bootstrap.Part(name, subject, {"file": f"/etc/{name}"})
            for name in ("one", "two", "three")
        ]

    def _write(self, _params: Any, step: _change.Step) -> None:
        if step.subject == self.broken:
            raise Refusal("no", expected="", found="x\nGPUAAS_SLICE_BOOTSTRAP a=b", remedy="")
        _host.write(step.subject, "on")

    def _never(self, *_words: Any) -> None:
        raise AssertionError("nothing is applied to prove something")


@pytest.fixture
def machine(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def run(capsys: Any, *words: str, **environment: str) -> tuple[int, list[str]]:
    """Return the exit code, and each line as `status step`."""
    settings: Mapping[str, str] = {"GPUAAS_SLICE_PROFILE": "lab", **environment}
    code = _deploy_bootstrap.main(words, settings)
    lines = capsys.readouterr().out.splitlines()
    for line in lines:
        assert re.fullmatch(r"GPUAAS_SLICE_BOOTSTRAP status=\w+ step=\w+ detail=[ -~]+", line)
        assert len(shlex.split(line)) == 4
    return code, [" ".join(re.findall(r"(?:status|step)=(\w+)", line)) for line in lines]


def test_done_once_and_nothing_to_do_the_second_time(
    machine: Machine, script: Any, capsys: Any
) -> None:
    changed = ["CHANGED one", "CHANGED two", "CHANGED three", "PASS in_effect"]
    assert run(capsys) == (0, changed)
    same = ["PASS one", "PASS two", "PASS three", "PASS in_effect"]
    assert run(capsys) == (0, same)
    assert script.calls == []


def test_what_is_optional_and_missing_is_a_warning_of_its_part(
    machine: Machine, script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt = Refusal("tmfifo_missing", expected="", found="x\ny", remedy="")
    subject = _change.Subject(
        lambda _params: None, lambda *_: _change.Plan(doubts=(doubt,)), machine._never
    )
    part = _deploy_bootstrap.Part("network", subject, {})
    monkeypatch.setattr(_deploy_bootstrap, "parts", lambda _profile: [part])
    assert run(capsys) == (0, ["PASS network", "WARN network", "PASS in_effect"])


def test_an_optional_step_that_fails_is_not_told_as_done(
    machine: Machine, script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = _change.Step("address_interface", "ovsbr0")
    link = _change.Step("address_interface", "tmfifo_net0", soft=True)
    there: list[_change.Step] = []

    def plan(_params: Any, _state: Any) -> _change.Plan:
        return _change.Plan(tuple(step for step in (bridge, link) if step not in there))

    def apply(_params: Any, step: _change.Step) -> None:
        if step == link:
            raise Refusal("command_failed", expected="", found="", remedy="")
        there.append(step)

    subject = _change.Subject(lambda _params: None, plan, apply)
    part = _deploy_bootstrap.Part("network", subject, {})
    monkeypatch.setattr(_deploy_bootstrap, "parts", lambda _profile: [part])
    assert _deploy_bootstrap.main((), {"GPUAAS_SLICE_PROFILE": "lab"}) == 0
    lines = [shlex.split(line)[1:] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["status=CHANGED", "step=network", "detail=address_interface(ovsbr0)"]
    assert (lines[1][0], "command_failed" in lines[1][2]) == ("status=WARN", True)
    assert run(capsys) == (0, ["PASS network", "WARN network", "PASS in_effect"])
    assert run(capsys, "--check") == (0, ["PLANNED network"])


def test_a_step_that_fails_ends_it_with_one_line(
    machine: Machine, script: Any, capsys: Any
) -> None:
    machine.broken, machine.reasons = "/etc/two", ["initramfs"]
    allowed = {"GPUAAS_SLICE_REBOOT_IF_REQUIRED": "1"}
    assert run(capsys, **allowed) == (1, ["CHANGED one", "FAIL two"])
    assert script.calls == []


def test_a_forecast_changes_nothing_and_never_reboots(
    machine: Machine, script: Any, capsys: Any
) -> None:
    machine.reasons = ["initramfs"]
    code, lines = run(capsys, "--check", GPUAAS_SLICE_REBOOT_IF_REQUIRED="1")
    assert (code, lines) == (0, ["PLANNED one", "PLANNED two", "PLANNED three"])
    assert _host.read("/etc/one") is None
    assert script.calls == []


def test_a_needed_reboot_comes_last_and_only_when_allowed(
    machine: Machine, script: Any, capsys: Any
) -> None:
    machine.reasons = ["not booted with iommu=pt"]
    for value in ("", "0"):
        code, lines = run(capsys, GPUAAS_SLICE_REBOOT_IF_REQUIRED=value)
        assert (code, lines[-1], script.calls) == (3, "WARN reboot", [])
    script.on(*REBOOT)
    code, lines = run(capsys, GPUAAS_SLICE_REBOOT_IF_REQUIRED="1")
    assert (code, lines[-1], script.calls) == (0, "CHANGED reboot", [REBOOT])


def _guest(tree: Path) -> None:
    (tree / "proc/9").mkdir(parents=True)
    (tree / "proc/9/cmdline").write_text("/usr/bin/qemu-system-x86_64\0-name\0guest=x")


def _slot(_tree: Path) -> None:
    _ledger.hold("slot-0", fence=1, allocation_id=TENANT, disk_identity="")


def _broken_ledger(_tree: Path) -> None:
    _host.write(f"{_ledger.DIRECTORY}/slot-0.json", "{")


@pytest.mark.parametrize("comes", [_guest, _slot, _broken_ledger], ids=lambda case: case.__name__)
def test_nobody_is_rebooted(
    machine: Machine, tree: Path, script: Any, capsys: Any, comes: Callable[[Path], None]
) -> None:
    comes(tree)
    machine.reasons = ["not booted with iommu=pt"]
    code, lines = run(capsys, GPUAAS_SLICE_REBOOT_IF_REQUIRED="1")
    assert (code, lines[0], lines[-1], script.calls) == (1, "CHANGED one", "FAIL reboot", [])
    # A slice host can be repaired under its running VMs as long as no reboot is needed.
    machine.reasons = []
    assert run(capsys)[0] == 0


@pytest.mark.covers("HOST-15")
def test_a_machine_that_a_tenant_has_is_left_alone(
    machine: Machine, script: Any, capsys: Any
) -> None:
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id=TENANT, disk_identity="")
    machine.reasons = ["initramfs"]
    allowed = {"GPUAAS_SLICE_REBOOT_IF_REQUIRED": "1"}
    assert run(capsys, **allowed) == (1, ["FAIL tenants"])
    assert _deploy_bootstrap.network([], {"GPUAAS_SLICE_PROFILE": "lab"}) == 1
    output = capsys.readouterr().out
    assert "machine_leased" in output and TENANT in output and output.count("\n") == 1
    assert (_host.read("/etc/one"), script.calls) == (None, [])
    # A forecast names every obstacle.
    forecast = ["FAIL tenants", "PLANNED one", "PLANNED two", "PLANNED three"]
    assert run(capsys, "--check") == (1, forecast)


@pytest.mark.parametrize(
    "settings",
    [
        {"GPUAAS_SLICE_PROFILE": "nope"},
        {"GPUAAS_SLICE_REBOOT_IF_REQUIRED": "yes"},
        {"GPUAAS_SLICE_TUNING": "network-buffers,hugepages-2m"},
        {"GPUAAS_SLICE_TUNING": "none,network-buffers"},
    ],
)
def test_wrong_settings_do_nothing(
    machine: Machine, script: Any, capsys: Any, settings: dict[str, str]
) -> None:
    assert run(capsys, **settings) == (2, ["FAIL settings"])
    assert _host.read("/etc/one") is None


@pytest.mark.covers("HOST-5", "HOST-14")
def test_tuning_and_names_of_the_site_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {
        "GPUAAS_SLICE_PROFILE": "lab",
        "GPUAAS_SLICE_TUNING": "hugepages-1g,network-buffers",
        "GPUAAS_SLICE_API_NAMES": "api.example=192.0.2.20,api6.example=2001:db8::20",
    }
    resolved = _deploy_bootstrap._profile(settings)
    parts = {part.name: part.params for part in _deploy_bootstrap.parts(resolved)}
    assert parts["api_names"]["names"] == {
        "api.example": "192.0.2.20",
        "api6.example": "2001:db8::20",
    }
    assert parts["tuning"]["profiles"] == ["hugepages-1g", "network-buffers"]
    assert parts["tuning"]["opted_in"] == parts["tuning"]["profiles"]
    assert parts["tuning"]["hugepages_1g"] == parts["kernel"]["hugepages_1g"]
    assert parts["kernel"]["tuning"] == parts["tuning"]["profiles"]
    assert "api_names" not in {part.name for part in _deploy_bootstrap.parts(profile("lab"))}


@pytest.mark.covers("HOST-5")
@pytest.mark.parametrize(
    ("word", "opted_in", "names"),
    [
        ({}, None, ["network-buffers"]),
        ({"GPUAAS_SLICE_TUNING": ""}, None, ["network-buffers"]),
        ({"GPUAAS_SLICE_TUNING": "none"}, [], []),
        ({"GPUAAS_SLICE_TUNING": "hugepages-1g"}, ["hugepages-1g"], ["hugepages-1g"]),
    ],
)
def test_without_a_word_what_was_opted_in_to_stays(
    tree: Path, monkeypatch: pytest.MonkeyPatch, word: dict[str, str], opted_in: Any, names: Any
) -> None:
    _host.write(_host_tuning.OPTED_IN, '{"profiles": ["network-buffers"]}')
    profile = _deploy_bootstrap._profile({"GPUAAS_SLICE_PROFILE": "lab", **word})
    parts = {part.name: part for part in _deploy_bootstrap.parts(profile)}
    assert parts["tuning"].params["opted_in"] == opted_in
    assert parts["kernel"].params["tuning"] == names


@pytest.mark.covers("HOST-5")
def test_a_record_of_the_host_that_cannot_be_read_is_named_before_anything_is_done(
    machine: Machine, script: Any, capsys: Any
) -> None:
    _host.write(_host_tuning.OPTED_IN, "{")
    assert _deploy_bootstrap.main([], {"GPUAAS_SLICE_PROFILE": "lab"}) == 2
    output = capsys.readouterr().out
    assert "tuning_record_unreadable" in output and _host_tuning.OPTED_IN in output
    assert _host.read("/etc/one") is None
    # The network part does not depend on this.
    assert _deploy_bootstrap.network([], {"GPUAAS_SLICE_PROFILE": "lab"}) == 0


def test_slice_mode_is_what_the_playbook_writes(tree: Path) -> None:
    parts = {part.name: part for part in _deploy_bootstrap.parts(profile("lab"))}
    part = parts["slice_mode"]
    assert _change.drive(part.subject, part.params, check_mode=False).done == ["write_file"]
    assert _host.read("/etc/gpuaas/slice-mode.json") == '{"mode": "slice", "profile": "lab"}'
    assert not _change.drive(part.subject, part.params, check_mode=False).changed


def test_the_network_alone_proves_nothing_of_the_kernel(
    machine: Machine, script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.reasons = ["initramfs"]
    every = machine._parts(None)
    named = [dataclasses.replace(part, name="network") for part in every[:1]]
    monkeypatch.setattr(_deploy_bootstrap, "parts", lambda _profile: [*named, *every[1:]])
    code = _deploy_bootstrap.network([], {"GPUAAS_SLICE_PROFILE": "lab"})
    assert (code, _host.read("/etc/one"), _host.read("/etc/two")) == (0, "on", None)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("name", _deploy_bootstrap._WHOLE_ONLY)
def test_the_network_alone_refuses_a_setting_that_it_does_not_use(
    machine: Machine, script: Any, capsys: Any, name: str
) -> None:
    code = _deploy_bootstrap.network([], {"GPUAAS_SLICE_PROFILE": "lab", name: "1"})
    output = capsys.readouterr().out
    assert (code, "setting_unused" in output, name in output) == (2, True, True)
    assert _host.read("/etc/one") is None
    settings = {"GPUAAS_SLICE_PROFILE": "lab", name: ""}
    settings |= {"GPUAAS_SLICE_REBOOT_IF_REQUIRED": "0"}
    assert _deploy_bootstrap.network(["--check"], settings) == 0


def test_the_help_of_each_file_names_the_settings_that_it_uses(capsys: Any) -> None:
    helped = []
    for entry in (_deploy_bootstrap.main, _deploy_bootstrap.network):
        with pytest.raises(SystemExit):
            entry(["--help"], {})
        helped.append(set(re.findall(r"^  (GPUAAS_SLICE_\w+)", capsys.readouterr().out, re.M)))
    assert helped[0] == {"GPUAAS_SLICE_PROFILE", *_deploy_bootstrap._WHOLE_ONLY}
    assert helped[1] == {"GPUAAS_SLICE_PROFILE"}


@pytest.mark.covers("HOST-5")
def test_the_help_says_how_tuning_is_taken_back(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        _deploy_bootstrap.main(["--help"], {})
    output = capsys.readouterr().out
    back = f"{_tuning_opt_in.NOTHING} takes all back"
    for words in (_host_tuning.OPTED_IN, back, *_tuning_profiles.PROFILES):
        assert words in output


def test_boot_services_get_their_sources_from_the_generated_file() -> None:
    (script,) = (entry for entry in standalone.SCRIPTS if entry.path == SCRIPT)
    body = standalone.build(script).partition("GPUAAS_STANDALONE_END'\n")[2]
    importer = body.partition("\nGPUAAS_STANDALONE_END\n")[0].rpartition("\nrun(")[0]
    units = ("network._bridge", "fabric._virtual_functions")
    ask = (
        f"from {_boot_service.PACKAGE}.core import _boot_service\n"
        "import json\n"
        f"print(json.dumps({{name: _boot_service.sources(name) for name in {units}}}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-I", "-"],
        input=f"{importer}\n{ask}",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == {n: _boot_service.sources(n) for n in units}


def test_the_generated_file_stands_alone(tmp_path: Path) -> None:
    """Run it outside the repository, as cloud-init does, on a machine that it must not change."""
    (script,) = (entry for entry in standalone.SCRIPTS if entry.path == SCRIPT)
    file = tmp_path / "bootstrap.sh"
    file.write_text(standalone.build(script))
    environment = {"PATH": os.environ["PATH"], "GPUAAS_SLICE_PROFILE": "lab"}
    done = subprocess.run(
        ["sh", str(file), "--check"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    steps = [words[2] for words in lines]
    assert steps[:3] == ["step=module_cache", "step=packages", "step=tuning"]
    assert steps[-1] == "step=slice_mode"
    assert {words[1] for words in lines} <= {"status=PASS", "status=PLANNED", "status=FAIL"}
    assert done.returncode == int(any("status=FAIL" in words for words in lines))
