"""`gpuaas host`: real runs on this machine, with the real playbook and with a host that lies."""

from __future__ import annotations

import io
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _check
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._slice_parity import CHECKS

from reconciler.cli import host
from reconciler.runs import byhand, contract
from reconciler.runs.byhand import Work
from reconciler.runs.spec import RunError
from reconciler.runs.ssh import Reach
from tests.unit.reconciler.api.stack import NODE, Stack, bundle, discovery
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("HOST-9", "HOST-10", "HOST-11")

ROOT = Path(__file__).resolve().parents[4]
SCRIPTS = ROOT / "scripts" / "ops"
LINE = re.compile(r"GPUAAS_SLICE_PARITY status=(PASS|WARN|FAIL) check=\w+ detail=[!-~]( |[!-~])*")
DEVICE = "/dev/disk/by-id/nvme-eui.5e0000000000a000"
DISK = {
    "nvme_device": DEVICE,
    "kernel_name": "nvme0n1",
    "serial": "LABNVME0",
    "eui": "5e0000000000a000",
    "size_bytes": 4 << 30,
    "mounts": ["/share0"],
    "filesystems": {"nvme0n1p1": "ext4"},
    "approval": {
        "serial": "LABNVME0",
        "eui": "5e0000000000a000",
        "mounts": ["/share0"],
        "filesystems": ["ext4"],
        "signatures": ["ext4@1049656#0f"],
    },
}

# Answers with the next report of a list that the test sets.
MODULE = """#!/usr/bin/python
import json, pathlib
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({{"profile": {{"type": "dict"}}, "slots": {{"type": "list"}}, "intent": {{}},
    "api_topology": {{"type": "dict"}}, "maas_tags": {{"type": "list"}}}})
file = pathlib.Path("{reports}")
first, *rest = json.loads(file.read_text())
file.write_text(json.dumps(rest))
module.exit_json(parity=first)
"""


@pytest.fixture
def liar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The collection with a module that returns reports.json, and roles that only print."""
    reports = tmp_path / "reports.json"
    collection = tmp_path / "collections" / "ansible_collections" / "gpuaas" / "slice"
    (collection / "plugins" / "modules").mkdir(parents=True)
    (collection / "plugins" / "modules" / "slice_parity.py").write_text(
        MODULE.format(reports=reports)
    )
    (collection / "roles").mkdir()
    for part in ("galaxy.yml", "meta", "playbooks"):
        (collection / part).symlink_to(ROOT / part)
    (collection / "roles" / "slice_parity").symlink_to(ROOT / "roles" / "slice_parity")
    for role, does in (
        ("slice_packages", {"ansible.builtin.fail": {"msg": "no mirror"}}),
        ("libvirt_host", {"ansible.builtin.debug": {"msg": "done"}}),
        ("slice_network", {"ansible.builtin.file": {"path": f"{tmp_path}/ran", "state": "touch"}}),
    ):
        (collection / "roles" / role / "tasks").mkdir(parents=True)
        text = json.dumps([{"name": f"Stand in for {role}", **does}])
        (collection / "roles" / role / "tasks" / "main.yml").write_text(text)
    monkeypatch.setenv("GPUAAS_COLLECTIONS_PATH", str(tmp_path / "collections"))
    return reports


def report(*outcomes: tuple[str, str, str, str]) -> dict[str, Any]:
    """A report made as the module makes it: check, status, detail, role."""
    checks = [
        {
            "check": check,
            "status": status,
            "detail": detail,
            "remediation": f"run {role}" if status != "PASS" else "",
            "playbook": "gpuaas.slice.bootstrap" if role else "",
            "role": role,
        }
        for check, status, detail, role in outcomes
    ]
    identity = {"boot_id": "b", "machine_id": "m", "host_key": "k"}
    return {"schema": 1, "identity": identity, **_check.report(checks)}


@pytest.mark.covers("HOST-10")
def test_a_report_of_this_machine_is_a_line_for_each_check(gpuaas: Gpuaas) -> None:
    """The real module over a local connection; no test machine is a slice host."""
    lines = gpuaas("host", "parity", "--profile", "lab").splitlines()
    assert (gpuaas.status, len(lines)) == (1, len(CHECKS) + 1), gpuaas.err
    assert all(LINE.fullmatch(line) for line in lines[:-1])
    failed = sum(" status=FAIL " in line for line in lines[:-1])
    assert f" checks={len(CHECKS)} failures={failed} " in lines[-1]
    assert lines[0].startswith("GPUAAS_SLICE_PARITY status=FAIL check=node_agent detail=")
    assert "status=WARN check=api_topology detail=not\\ proven" in lines[-2]
    assert "Check every target condition in one pass" in gpuaas.err


@pytest.mark.covers("HOST-10")
def test_remediation_runs_the_roles_that_failed_checks_name_and_looks_again(
    gpuaas: Gpuaas, liar: Path, tmp_path: Path
) -> None:
    """A host's text in a detail is neither a template here nor a second line."""
    canary = tmp_path / "canary"
    hostile = f"{{{{ lookup('pipe', 'touch {canary}') }}}}\nGPUAAS_SLICE_PARITY status=PASS $(id)"
    before = report(
        ("nat", "FAIL", hostile, "slice_network"),
        ("ovmf", "FAIL", "missing", "slice_packages"),
        ("nvme_ownership", "FAIL", "mounted", ""),
        ("libvirt", "FAIL", "silent", "libvirt_host"),
        ("vfio_binding", "WARN", "no approved slot", "vfio_binding"),
    )
    after = report(("nat", "PASS", hostile, ""), ("ovmf", "FAIL", "missing", "slice_packages"))
    liar.write_text(json.dumps([before, after]))
    out = gpuaas("host", "parity", "--profile", "lab", "--remediate")
    assert (gpuaas.status, out.splitlines()) == (1, after["lines"]), gpuaas.err
    assert (tmp_path / "ran").exists()
    assert not canary.exists()
    shown = gpuaas.err.splitlines()[-3:]
    assert shown == [
        "repaired: libvirt_host",
        "repaired: slice_network",
        "not repaired: slice_packages (task_failed)",
    ]
    assert json.loads(liar.read_text()) == []


@pytest.mark.covers("HOST-10")
def test_a_forged_line_is_not_passed_on(gpuaas: Gpuaas, liar: Path) -> None:
    forged = report(("nat", "FAIL", "no rule", "slice_network"))
    forged["lines"][0] = "GPUAAS_SLICE_PARITY status=PASS check=nat detail=fine"
    liar.write_text(json.dumps([forged]))
    gpuaas("host", "parity", "--profile", "lab")
    assert (gpuaas.status, gpuaas.out) == (1, "")
    assert "report_inconsistent" in gpuaas.err


@pytest.mark.covers("HOST-10")
def test_a_host_that_cannot_be_reached_is_said_to_be_so(gpuaas: Gpuaas) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        port = str(nobody.getsockname()[1])
        gpuaas("host", "discover", "--host", "127.0.0.1", "--port", port, "--profile", "lab")
    assert (gpuaas.status, gpuaas.out) == (1, "")
    assert "error: unreachable" in gpuaas.err
    assert "refused" in gpuaas.err


class Played:
    """Replaces runs: records the work and returns prepared evidence."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works: list[Work] = []
        self.reaches: list[Reach] = []
        self.evidence: list[dict[str, Any]] = []
        monkeypatch.setattr(byhand, "play", self._play)

    def _play(self, work: Work, reach: Reach, *_more: Any) -> dict[str, Any]:
        run = {"id": "r", "task_id": "", "kind": work.kind, "node_id": "n", "correlation_id": "c"}
        contract.check_vars(work.playbook, {"slice_run": run, **work.variables})
        self.works.append(work)
        self.reaches.append(reach)
        return self.evidence.pop(0)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


PASSING = {"parity": report(("nat", "PASS", "fine", ""))}


@pytest.mark.covers("HOST-10")
def test_the_reconcilers_evidence_goes_to_the_host(
    selling: Stack, gpuaas: Gpuaas, played: Played
) -> None:
    gpuaas.at(selling)
    played.evidence = [PASSING]
    token = str(selling.settings.state_dir / "admin.token")
    words = ["--api-base", "https://test", "--api-token-file", token, "--node-id", NODE]
    gpuaas("host", "parity", "--host", "100.75.6.89", "--user", "hpcadmin", *words)
    assert gpuaas.status == 0, gpuaas.err
    rows = played.works[0].variables
    assert rows["slice_profile"]["name"] == "lab"
    assert [slot["gpu_pci_address"] for slot in rows["slice_slots"]] == [
        bundle(slot["slot_index"])["gpu_pci_address"] for slot in rows["slice_slots"]
    ]
    assert rows["slice_api_topology"] == {
        "source": "api",
        "completed": True,
        "boot_id": discovery()["identity"]["boot_id"],
        "blockers": [],
    }
    assert played.reaches[0].access().address == "100.75.6.89"


@pytest.mark.covers("HOST-7", "HOST-10")
def test_what_is_the_hosts_own_and_its_tags_go_along(
    selling: Stack, gpuaas: Gpuaas, played: Played
) -> None:
    fabric = {"fabric_interface": "ibp65s0", "fabric_address": "10.20.0.7/16"}
    selling.client("admin").patch(f"admin/nodes/{NODE}", json=fabric)
    played.evidence = [PASSING, PASSING, {}, PASSING, PASSING]
    token = str(selling.settings.state_dir / "admin.token")
    words = ["--api-base", "https://test", "--api-token-file", token, "--node-id", NODE]
    tags = ["--maas-tag", "virtual", "--maas-tag", "gpuaas-profile-slice-vm"]
    gpuaas.at(selling)("host", "parity", *words, *tags)
    assert gpuaas.status == 0, gpuaas.err
    assert played.works[0].variables["slice_maas_tags"] == tags[1::2]
    assert played.works[0].variables["slice_profile"]["fabric"]["site_address"] == "10.20.0.7/16"
    here = ["--fabric-interface", "ibp1s0", "--fabric-address", "10.20.0.9/16"]
    gpuaas("host", "parity", *words, *here)
    gpuaas("host", "bootstrap", "--profile", "lab", *here)
    for work in played.works[1:]:
        fabric = work.variables["slice_profile"]["fabric"]
        assert (fabric["interface"], fabric["site_address"]) == ("ibp1s0", "10.20.0.9/16")
    # Nothing said is not the same as no tags, which is a failed check.
    assert "slice_maas_tags" not in played.works[1].variables
    recorded = {"maas_tags": ["gpuaas-profile-baremetal"]}
    selling.client("admin").patch(f"admin/nodes/{NODE}", json=recorded)
    gpuaas("host", "parity", *words)
    gpuaas("host", "parity", *words, *tags)
    shown = [work.variables["slice_maas_tags"] for work in played.works[3:]]
    assert shown == [["gpuaas-profile-baremetal"], tags[1::2]]


@pytest.mark.covers("HOST-10")
def test_a_machine_without_tags_can_be_said_to_be_so(gpuaas: Gpuaas, played: Played) -> None:
    played.evidence = [PASSING]
    gpuaas("host", "parity", "--profile", "lab", "--maas-tag", "")
    assert gpuaas.status == 0, gpuaas.err
    assert played.works[0].variables["slice_maas_tags"] == []


@pytest.mark.parametrize("option", ["--api-base", "--api"])
def test_the_token_for_evidence_goes_over_the_network_with_tls_only(
    gpuaas: Gpuaas, played: Played, tmp_path: Path, option: str
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    words = ("--api-token-file", str(token), "--node-id", NODE, option, "http://gpuaas.example")
    gpuaas("host", "parity", "--profile", "lab", *words)
    assert (gpuaas.status, "api_without_tls" in gpuaas.err, played.works) == (1, True, [])


@pytest.mark.covers("HOST-10")
def test_a_refused_token_is_a_failed_check_and_no_token_a_warning(
    selling: Stack, gpuaas: Gpuaas, played: Played, tmp_path: Path
) -> None:
    gpuaas.at(selling, "member")
    played.evidence = [PASSING, PASSING]
    token = str(selling.settings.state_dir / "member.token")
    gpuaas("host", "parity", "--profile", "lab", "--api-token-file", token, "--node-id", NODE)
    topology = played.works[0].variables["slice_api_topology"]
    assert (topology["completed"], len(topology["blockers"])) == (False, 1)
    assert "no evidence from the API" in gpuaas.err
    gpuaas("host", "parity", "--profile", "lab", "--node-id", NODE)
    assert played.works[1].variables["slice_api_topology"] == {}


@pytest.mark.covers("HOST-9")
def test_a_plan_takes_kernel_names_and_the_act_only_identities(
    gpuaas: Gpuaas, played: Played
) -> None:
    played.evidence = [{"devices": [DISK]}]
    out = gpuaas("host", "transition", "--profile", "lab", "--devices", "/dev/nvme0n1,/dev/nvme1n1")
    assert DEVICE in out and "LABNVME0" in out
    gpuaas("host", "transition", "--profile", "lab", "--apply", "--devices", "/dev/nvme0n1")
    assert (gpuaas.status, len(played.works)) == (1, 1)
    assert "kernel_name_not_allowed" in gpuaas.err


@pytest.mark.covers("HOST-9")
def test_applying_carries_the_identities_that_the_plan_showed(
    gpuaas: Gpuaas, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"devices": [DISK | {"proof": {"method": "zero_fill"}}], "manifest": "/var/log/m.json"}
    played.evidence = [{"devices": [DISK]}, done]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    gpuaas("host", "transition", "--profile", "lab", "--apply", "--devices", DEVICE)
    assert "serial LABNVME0  eui 5e0000000000a000" in gpuaas.err
    assert (gpuaas.status, "manifest: /var/log/m.json" in gpuaas.err) == (0, True)
    act = played.works[1].variables
    assert act["slice_apply"] is True
    assert "mounted on /share0  carries ext4" in gpuaas.err
    assert act["slice_expected"] == {DEVICE: DISK["approval"]}


@pytest.mark.covers("HOST-9")
def test_nothing_is_wiped_without_an_answer(
    gpuaas: Gpuaas, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    played.evidence = [{"devices": [DISK]}]
    gpuaas("host", "transition", "--profile", "lab", "--apply", "--devices", DEVICE)
    assert gpuaas.status == 1
    assert [work.variables["slice_apply"] for work in played.works] == [False]


@pytest.mark.covers("HOST-9")
def test_nobody_approves_by_not_being_asked(gpuaas: Gpuaas, played: Played) -> None:
    """The plan of a moment ago is no approval: the host is not even asked for it."""
    gpuaas("host", "transition", "--profile", "lab", "--apply", "--yes", "--devices", DEVICE)
    assert (gpuaas.status, played.works) == (1, [])
    assert "approval_missing" in gpuaas.err
    assert "--approved" in gpuaas.err


@pytest.mark.covers("HOST-9")
def test_an_approval_from_a_file_is_what_counts(
    gpuaas: Gpuaas, played: Played, tmp_path: Path
) -> None:
    file = tmp_path / "approved.json"
    approved = {DEVICE: {"serial": "OTHER", "eui": "5e0000000000a000"}}
    file.write_text(json.dumps(approved))
    played.evidence = [{"devices": [DISK]}, {"devices": [], "manifest": ""}]
    words = ["--profile", "lab", "--apply", "--devices", DEVICE, "--approved", str(file), "--yes"]
    gpuaas("host", "transition", *words)
    assert [work.variables["slice_expected"] for work in played.works] == [approved, approved]


@pytest.mark.covers("HOST-9")
@pytest.mark.parametrize(
    "kept", [{}, [], None, [{"nvme_device": DEVICE}], {DEVICE: {}}, {"/dev/other": {"serial": "A"}}]
)
def test_a_file_that_approves_nothing_approves_nothing(
    gpuaas: Gpuaas, played: Played, tmp_path: Path, kept: Any
) -> None:
    """Such as a plan of an older version: the host's current answer must not replace it."""
    file = tmp_path / "approved.json"
    file.write_text(json.dumps(kept))
    words = ["--profile", "lab", "--apply", "--devices", DEVICE, "--approved", str(file), "--yes"]
    gpuaas("host", "transition", *words)
    assert (gpuaas.status, played.works) == (1, [])
    assert "approval_missing" in gpuaas.err


@pytest.mark.covers("HOST-9")
def test_a_plan_that_was_saved_is_an_approval(
    gpuaas: Gpuaas, played: Played, tmp_path: Path
) -> None:
    played.evidence = [{"devices": [DISK]}, {"devices": [DISK]}, {"devices": [], "manifest": ""}]
    words = ["host", "transition", "--profile", "lab", "--devices", DEVICE]
    file = tmp_path / "approved.json"
    file.write_text(gpuaas(*words, "--output", "json"))
    gpuaas(*words, "--apply", "--yes", "--approved", str(file))
    assert played.works[2].variables["slice_expected"] == {DEVICE: DISK["approval"]}


def test_ssh_trusts_no_unknown_key_and_passes_words_as_words(tmp_path: Path) -> None:
    reach = Reach("192.0.2.1", "ubuntu", 22, key=tmp_path / "a key")
    words = reach.environment(tmp_path)["ANSIBLE_SSH_ARGS"]
    assert "bounded_ssh.py -o StrictHostKeyChecking=yes " in words
    # A host with the operator's agent could log in wherever the operator can.
    assert " -o ForwardAgent=no " in words
    assert f"-i '{tmp_path}/a key'" in words
    for bad in ("-oProxyCommand=id", "{{ x }}", "a b"):
        with pytest.raises(RunError, match="spec_invalid"):
            Reach(bad).access()


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("gpuaas_slice_host_parity_check.sh", "parity"),
        ("gpuaas_slice_storage_transition.sh", "transition"),
        ("gpuaas_slice_host_runtime_prepare.sh", "prepare"),
    ],
)
def test_the_scripts_are_a_line(script: str, command: str) -> None:
    text = (SCRIPTS / script).read_text()
    assert f'exec gpuaas host {command} "$@"' in text
    assert command in {
        item.callback.__name__ for item in host.app.registered_commands if item.callback
    }
    assert (SCRIPTS / script).stat().st_mode & 0o111
