"""State that the demonstration's steps share: lab host, reconciler, identities and results."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lab import machine, qemu, saved, state
from lab.command import LabError
from lab.demo.service import Service
from lab.distro import this_distro
from lab.paths import REPOSITORY
from lab.saved import Saved
from lab.state import Lab
from reconciler.client import Client
from reconciler.model.bundle import run_bundle

NODE = "lab-host"
# Inventory of the lab host for Ansible by hand, past the reconciler. It follows GPUAAS_LAB_DIR.
INVENTORY = REPOSITORY / "inventory" / "lab"
PROJECT = "demo"
TASK_DEADLINE_S = 2700


@dataclass
class Stage:
    """State of a demonstration. All its files lie in `folder`."""

    folder: Path
    firmware: str = "bios"
    console: Console = field(default_factory=lambda: Console(stderr=True))
    # Candidates that become slots: one on each NUMA node, because a node has one CPU by default. So
    # two slices run at once.
    slots: tuple[int, ...] = (0, 3)
    # Environment variables of the service; they override those that the stage sets.
    settings: Mapping[str, str] = field(default_factory=dict)
    # Set by `open` and by the steps.
    lab: Lab | None = None
    service: Service | None = None
    admin: Client | None = None
    member: Client | None = None
    # Tokens of the admin and of the tenant.
    secrets: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _shown: str = ""

    def boot(self) -> Lab:
        """Boot a fresh lab host for this stage. The host of `make lab-up` is not touched."""
        self._clear()
        self.lab = machine.up(fresh=True)
        return self.lab

    def boot_saved(self, name: str) -> Saved:
        """Boot the saved lab host of this name instead of a fresh host."""
        self._clear()
        kept = saved.load(name)
        self.lab = machine.up()
        return kept

    def _clear(self) -> None:
        """Select this stage's lab folder and stop any host that runs there."""
        os.environ["GPUAAS_LAB_DIR"] = str(self.folder / "lab")
        lab = state.load()
        if lab is not None and lab.alive():
            machine.power_cut()

    def open(self) -> None:
        """Start a reconciler with an empty database and get tokens for admin and tenant."""
        shutil.rmtree(self.folder / "reconciler", ignore_errors=True)
        service = self._serve()
        words = ("token", "create", "--role", "platform-admin", "--name", "demo")
        secret = service.cli(*words)
        token_file = service.folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(secret)
        self._connect(service, secret)
        self.facts["project"] = self.api().post("/admin/projects", {"name": PROJECT})["id"]
        self._admit_tenant(service, "tenant")
        self._lift_limits()

    def reopen(self, facts: Mapping[str, Any]) -> None:
        """Start the reconciler of an existing folder; `facts` is the saved state of its stage.

        The node gets the host's present address.
        """
        self.facts.update(facts)
        service = self._serve()
        self._connect(service, (service.folder / "token").read_text())
        self._admit_tenant(service, "tenant-again")
        self._lift_limits()
        port = self.host().ssh_port
        if self.api().get(self.path())["port"] != port:
            self.api().patch(self.path(), {"port": port})

    def _serve(self) -> Service:
        service = Service(
            self.folder / "reconciler",
            gateway=self.host().gateway,
            profiles=self._profiles(),
            settings=self.settings,
        )
        self.service = service
        service.start()
        return service

    def _connect(self, service: Service, secret: str) -> None:
        self.secrets["admin"] = secret
        self.admin = Client(service.url, secret, correlation_id="make-demo")

    def _admit_tenant(self, service: Service, name: str) -> None:
        body = {"role": "project-member", "name": name, "project_id": self.facts["project"]}
        self.secrets["tenant"] = self.api().post("/admin/tokens", body)["token"]
        self.member = Client(service.url, self.secrets["tenant"])

    def _lift_limits(self) -> None:
        """The story launches at its own pace, and a person recovers what it leaves blocked."""
        names = ("open_requests", "launches_per_hour", "failures_per_hour")
        self.api().put("/admin/settings/default-quota", dict.fromkeys(names))
        policy = {"enabled": False, "tenant_failures": False}
        self.api().put("/admin/settings/recovery-policy", policy)

    def close(self) -> None:
        """Stop every process of this stage, even if stopping another process fails."""
        with contextlib.ExitStack() as stack:
            if self.lab is not None and self.lab.alive():
                stack.callback(machine.power_cut)
            if self.service is not None:
                stack.callback(self.service.stop)
            for client in (self.admin, self.member):
                if client is not None:
                    stack.callback(client.close)

    def api(self) -> Client:
        if self.admin is None:
            raise LabError("the reconciler is not started")
        return self.admin

    def host(self) -> Lab:
        if self.lab is None:
            raise LabError("the lab host is not booted")
        return self.lab

    def path(self, rest: str = "") -> str:
        return f"/admin/nodes/{NODE}{rest}"

    def task(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST, then wait for the queued task and all that follow it. Return the last result."""
        result = self.follow(self.api().post(path, body))
        while following := result.get("next_task_id"):
            result = self.follow({"id": following})
        return result

    def follow(self, task: dict[str, Any]) -> dict[str, Any]:
        """Wait for a task and return its result."""
        ended = self.api().wait(
            task["id"], deadline_s=TASK_DEADLINE_S, on_progress=self.show_progress
        )
        if ended["state"] != "succeeded":
            error = ended.get("error") or {}
            raise LabError(
                f"task {ended['kind']} {ended['state']} at {error.get('step') or '?'}: "
                f"expected {error.get('expected')}; found {error.get('found')}; "
                f"{error.get('remedy')}"
            )
        result: dict[str, Any] = ended["result"]
        return result

    def show_progress(self, task: dict[str, Any]) -> None:
        """Print the present subject of the task's run, once per change."""
        line = (task.get("progress") or {}).get("task", "")
        if line and line != self._shown and not line.startswith("Validating arguments"):
            self._shown = line
            self.console.print(f"      [dim]{line}[/]", highlight=False)

    def on_host(self, *words: str, stdin: str = "", limit_s: float = 300) -> str:
        """Run a program on the lab host as the lab's operator."""
        done = subprocess.run(
            state.ssh_command(self.host(), list(words)),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode != 0:
            raise LabError(f"{' '.join(words)} on the lab host: {done.stderr.strip()[-500:]}")
        return done.stdout

    def ansible_environment(self) -> dict[str, str]:
        collections = str(REPOSITORY / "build" / "collections")
        # Ansible's programs lie beside this Python.
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ANSIBLE_COLLECTIONS_PATH": collections,
            "ANSIBLE_PIPELINING": "true",
        }

    def module(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a module of the collection on the lab host, past the reconciler."""
        words = [sys.executable, "-m", "ansible", "adhoc", "all", "-i", str(INVENTORY)]
        words += ["-m", f"gpuaas.slice.{name}", "-a", json.dumps(arguments)]
        done = subprocess.run(
            words,
            env=self.ansible_environment(),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        # Warnings and errors may come first and contain braces.
        _, arrow, document = done.stdout.partition(" => ")
        if not arrow:
            raise LabError(f"module {name}: {done.stderr[-500:]}{done.stdout[-500:]}")
        result: dict[str, Any] = json.JSONDecoder().raw_decode(document)[0]
        return {"failed": done.returncode != 0, **result}

    def profile(self) -> dict[str, Any]:
        """Return the hardware profile that this stage's reconciler uses."""
        profile: dict[str, Any] = yaml.safe_load((self.folder / "profiles" / "lab.yml").read_text())
        return profile

    def bundles(self) -> list[dict[str, Any]]:
        """Return the approved slots in the form of the run contract."""
        slots = self.api().get(self.path("/resource-slots"))["items"]
        return [run_bundle(slot, fence=False) for slot in slots]

    def _profiles(self) -> Path:
        """Copy the shipped profiles; the lab's profile gets the requested firmware, and no
        arguments that the lab's QEMU does not need.
        """
        folder = self.folder / "profiles"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(REPOSITORY / "profiles", folder)
        self.use_vm(firmware=self.firmware)
        if qemu.ensure(this_distro()).mended:
            self.use_vm(qemu_arguments={"bios": [], "uefi": []})
        return folder

    def use_vm(self, **changes: Any) -> None:
        """Change the profile's `vm`, for VMs whose run starts from now on."""
        self.use(vm={**self.profile()["vm"], **changes})

    def use(self, **changes: Any) -> None:
        """Change parts of the profile, for runs that start from now on."""
        file = self.folder / "profiles" / "lab.yml"
        profile = {**self.profile(), **changes}
        half = file.with_suffix(".partial")
        half.write_text(yaml.safe_dump(profile, sort_keys=False))
        half.rename(file)
