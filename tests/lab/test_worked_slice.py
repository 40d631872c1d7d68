"""The worked slice of docs/hosts.md, played as the page prints it, on a lab host of its own.

The host is a freshly deployed machine, and there is no reconciler. The commands run in a copy of
`inventory/` whose values are those of the lab.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import canary, guest_image, machine, state
from lab.distro import this_distro
from lab.guest_image import GuestImage
from lab.paths import REPOSITORY
from lab.state import Lab
from tests.worked_slice import COMMANDS, INVENTORY, subject

pytestmark = pytest.mark.covers("ECO-1")

FOLDER = REPOSITORY / "build" / "worked-slice"
# Files that the commands need beside `inventory/`.
CHECKOUT = ("ansible.cfg", "build", "playbooks", "profiles")
LIMIT_S = 2400
Document = dict[str, Any]
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A freshly deployed machine."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUAAS_LAB_DIR", str(FOLDER / "lab"))
        booted = machine.up(fresh=True)
        try:
            yield booted
        finally:
            if booted.alive():
                machine.power_cut()


@pytest.fixture(scope="module")
def image(lab: Lab) -> Iterator[Document]:
    """The lab's slice image, as `slice_image` names it, from a web server of this machine."""
    made: GuestImage = guest_image.ensure(this_distro())
    file = Path(made.zst)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(file.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "name": "lab-slice",
            "version": "1",
            "digest": f"sha256:{made.sha256}",
            "size_bytes": made.size,
            "url": f"http://{lab.gateway}:{server.server_port}/{file.name}",
            "compression": "zstd",
        }
        server.shutdown()


class Page:
    """The commands of the page in their order, and the files that a person edits for them."""

    def __init__(self, folder: Path) -> None:
        self.hosts = folder / "inventory" / "example" / "hosts.yml"
        self.group = folder / "inventory" / "example" / "group_vars" / "slice_hosts.yml"
        self.slice = folder / "inventory" / "slice.yml"
        shutil.copytree(INVENTORY, folder / "inventory")
        for name in CHECKOUT:
            (folder / name).symlink_to(REPOSITORY / name)
        self._folder = folder
        self._commands = iter(COMMANDS)

    def play(self, name: str) -> Done:
        """Run the next command of the page, whose playbook or module is this one."""
        words = next(self._commands)
        assert subject(words) == name
        ours = {key: value for key, value in os.environ.items() if "ANSIBLE" not in key}
        return subprocess.run(
            [str(Path(sys.executable).parent / words[0]), *words[1:]],
            env=ours | {"ANSIBLE_NOCOLOR": "1"},
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def result(self, name: str) -> Document:
        """Run the next command, which succeeds, and return the evidence that it prints."""
        done = self.play(name)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        result = printed(done)
        assert result["ok"]
        evidence: Document = result["evidence"]
        return evidence

    def look(self, name: str) -> Document:
        """Run the next command, an ad-hoc command, and return its module's answer."""
        done = self.play(name)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        answer: Document = json.loads(done.stdout.partition(" => ")[2])
        return answer

    def at_its_end(self) -> bool:
        return next(self._commands, None) is None


def printed(done: Done) -> Document:
    """Return the result document that a playbook prints in its last line."""
    (line,) = re.findall(r"^\tRUN: (.*)$", done.stdout, re.MULTILINE)
    result: Document = json.loads(line)["slice_result"]
    return result


def edit(file: Path, change: Callable[[Document], None]) -> None:
    """Change a YAML file as a person does in an editor."""
    document = yaml.safe_load(file.read_text())
    change(document)
    file.write_text(yaml.safe_dump(document, sort_keys=False))


def test_the_worked_slice_of_the_page(lab: Lab, image: Document, tmp_path: Path) -> None:
    page = Page(tmp_path / "site")
    host: Document = {
        "ansible_host": "127.0.0.1",
        "ansible_port": lab.ssh_port,
        "ansible_ssh_private_key_file": lab.key,
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={lab.known_hosts}",
    }
    profile = "{{ inventory_dir }}/../../profiles/lab.yml"
    edit(page.group, lambda shared: shared.update(ansible_user="root", slice_profile_file=profile))
    lacking = yaml.safe_load((REPOSITORY / "profiles" / "lab.yml").read_text())["not_applicable"]

    def address(document: Document) -> None:
        shown = document["all"]["children"]["slice_hosts"]["hosts"]["slicehost"]
        shown.update(host)
        overrides = shown["slice_profile_overrides"]
        del overrides["fabric"]
        overrides["not_applicable"] += lacking

    edit(page.hosts, address)

    discovery = page.result("convert_to_slice")["discovery"]
    bundle = discovery["candidates"][0]["bundle"]
    tenant = key(tmp_path / "tenant")

    def replace_key(document: Document) -> None:
        (slot,) = document["slice_slots"]
        slot.update(bundle)
        document["slice_allocation"]["ssh_keys"] = [tenant]
        document["slice_devices"] = [bundle["nvme_device"]]
        document["slice_expected"] = {}
        document["slice_image"] = image
        document["slice_fabric"] = {"isolation": "vlan", "link": "ethernet", "vlan": 3001}
        document["slice_gateway_authority"] = key(tmp_path / "authority").rpartition(" ")[0]

    edit(page.slice, replace_key)
    planned = page.result("transition_storage")["devices"]
    approval = {device["nvme_device"]: device["approval"] for device in planned}
    assert list(approval) == [bundle["nvme_device"]] and "/share0" in on_host(lab, "findmnt", "-n")
    edit(page.slice, lambda document: document.update(slice_expected=approval))
    (taken,) = page.result("transition_storage")["devices"]
    assert taken["proof"]["verified"] and "/share0" not in on_host(lab, "findmnt", "-n")

    bound = {row["address"] for row in page.result("bind_topology")["bound"]}
    assert bound == {bundle["gpu_pci_address"], bundle["fabric_vf_pci_address"]}
    parity = page.result("parity")["parity"]
    assert (parity["failures"], parity["intent"]) == (0, "slice")
    edit(page.slice, lambda document: document.update(boot_id=parity["identity"]["boot_id"]))

    readiness = page.result("provision_slice")["readiness"]
    assert readiness["actual_ip"] == bundle["private_ip"]
    probes = {row["name"]: row["ok"] for row in readiness["probes"]}
    assert probes == dict.fromkeys(("address", "lease", "ssh", "gpu_compute"), True)

    variables = yaml.safe_load(page.slice.read_text())
    allocation = variables["slice_allocation"]
    (vm,) = page.look("slice_vm_info")["machines"]
    assert (vm["allocation_id"], vm["state"]) == (allocation["id"], "running")
    assert vm["disks"] == [bundle["nvme_device"]] and vm["guard_kept"] and vm["flows"]
    (hold,) = page.look("slice_lease_info")["leases"]
    assert (hold["fence"], hold["allocation_id"]) == (1, allocation["id"])
    assert hold["dirty"]
    login = Login(lab, allocation["username"], bundle["private_ip"], tmp_path)
    assert login.run(readiness["host_keys"], "hostname") == allocation["hostname"]
    mark, disk = secrets.token_hex(32), data_disk(lab, bundle["nvme_eui"])
    login.run(readiness["host_keys"], "sudo python3 -", canary.writer(mark))
    assert canary.count(disk, mark)

    there = page.play("verify_absent")
    assert there.returncode != 0
    refusal = printed(there)["error"]
    assert refusal["code"] == "not_absent" and "domain" in refusal["found"], refusal

    released = page.result("release_slice")
    assert released["shutdown"] == "graceful" and released["absence"]["absent"]
    (proof,) = released["proofs"].values()
    assert proof["verified"] and proof["gpu"]["verified"], proof
    gone = page.result("verify_absent")
    assert gone["absence"]["absent"] and not gone["disk_dirty"]
    (hold,) = page.look("slice_lease_info")["leases"]
    assert (hold["fence"], hold["allocation_id"], hold["dirty"]) == (2, "", False)
    assert page.at_its_end()
    assert canary.count(disk, mark) == 0


def key(file: Path) -> str:
    """Make a key pair and return its public half with the comment."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", file.name, "-f", str(file)]
    subprocess.run(words, check=True)
    return file.with_suffix(".pub").read_text().strip()


def on_host(lab: Lab, *words: str) -> str:
    done = subprocess.run(
        state.ssh_command(lab, list(words)), capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def data_disk(lab: Lab, eui: str) -> Path:
    """Return the file that backs the disk in the lab's QEMU."""
    (index,) = [i for i, disk in enumerate(lab.devices["data"]) if disk["eui64"] == eui]
    return Path(lab.folder) / f"nvme{index}.raw"


class Login:
    """SSH of the tenant through the host; the guest's key is that of the readiness report."""

    def __init__(self, lab: Lab, user: str, address: str, folder: Path) -> None:
        *hop, there = state.ssh_command(lab)
        self._known = folder / "known_hosts"
        self._address = address
        options = {
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(self._known),
            "LogLevel": "ERROR",
            "ProxyCommand": " ".join([*hop, "-W", f"{address}:22", there]),
        }
        pairs = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        identity = ["-i", str(folder / "tenant")]
        self._words = ["ssh", "-F", "/dev/null", *identity, *pairs, f"{user}@{address}"]

    def run(self, host_keys: list[str], command: str, stdin: str = "") -> str:
        self._known.write_text("".join(f"{self._address} {host_key}\n" for host_key in host_keys))
        done = subprocess.run(
            [*self._words, command], input=stdin, capture_output=True, text=True, timeout=600,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-800:]
        return done.stdout.strip()
