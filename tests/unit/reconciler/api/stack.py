"""A service with its database and clients, in the states that tests begin from."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine

from reconciler.api.app import PREFIX, create_app
from reconciler.api.catalog import AnswerCache
from reconciler.api.security import Places, Rates
from reconciler.db import journal, settings
from reconciler.db.engine import open_engine, transaction
from reconciler.db.migrations import migrate
from reconciler.db.schema import IngressRule, Task
from reconciler.lifecycle import gate, host
from reconciler.model.act import Act
from reconciler.model.states import IngressState, Role
from reconciler.records import images, leasing, nodes, projects, proofs, tokens
from reconciler.settings import Settings
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.conformity import Client, Conformity, client

ACT = Act("test", "prepared by the test")
RECORDED = Path(__file__).parents[3] / "data" / "lab-discovery.json"
NODE = "lab-host"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX tenant"
# Disks 1 and 3 of the recorded host are blank, the others are in use.
FREE = (1, 3)
IMAGE: dict[str, Any] = {
    "name": "ubuntu",
    "version": "1",
    "digest": f"sha256:{'0' * 64}",
    "size_bytes": 1,
    "url": "https://images.example/ubuntu.raw",
}
TOKENS: dict[str, dict[str, Any]] = {
    "admin": {"role": Role.PLATFORM_ADMIN},
    "member": {"role": Role.PROJECT_MEMBER, "project_id": "demo"},
    "stranger": {"role": Role.PROJECT_MEMBER, "project_id": "other"},
    "node": {"role": Role.NODE, "node_id": NODE},
}


@lru_cache
def _application() -> FastAPI:
    return create_app(Settings(), open_engine("sqlite://"))


@lru_cache
def _judge() -> Conformity:
    return Conformity(_application().openapi())


def discovery() -> dict[str, Any]:
    """The recorded host as it is after bootstrap, storage transition not yet done."""
    document: dict[str, Any] = copy.deepcopy(json.loads(RECORDED.read_text()))
    document["reboot_required"] = False
    document["bootstrap"]["blockers"] = []
    document["slice_network"]["blockers"] = []
    document["slice_network"]["bridge"]["addresses"] = ["10.100.0.1/24"]
    document["candidate_summary"]["blockers"] = []
    card = document["fabric"][0]
    card["blockers"] = []
    prepared = json.loads(RECORDED.with_name("prepared-discovery.json").read_text())
    function = prepared["fabric"][0]["vfs"][0]
    card["vfs"] = [
        {**function, "address": f"0000:25:10.{index}", "index": index} for index in range(4)
    ]
    for candidate, function in zip(document["candidates"], card["vfs"], strict=True):
        candidate["bundle"]["fabric_vf_pci_address"] = function["address"]
        candidate["complete"] = True
    return document


def bundle(index: int) -> dict[str, Any]:
    """The bundle that the discovery suggests for a slot."""
    suggested: dict[str, Any] = discovery()["candidates"][index]["bundle"]
    return suggested


@dataclass
class Stack:
    """A service with its own database, and a client for each kind of caller."""

    settings: Settings
    engine: Engine
    secrets: dict[str, str] = field(default_factory=dict)

    def client(self, who: str = "", *, base: str = f"{PREFIX}/", **options: Any) -> Client:
        headers = {"Authorization": f"Bearer {self.secrets[who]}"} if who else {}
        # All tests share an application, because building it takes seconds.
        app = _application()
        if app.state.engine is not self.engine:
            app.state.rates, app.state.availability = Rates(), AnswerCache()
            app.state.places = Places()
        app.state.settings, app.state.engine = self.settings, self.engine
        return client(app, _judge(), base_url=f"http://test{base}", headers=headers, **options)

    def add_node(self) -> None:
        with transaction(self.engine) as conn:
            nodes.create(conn, ACT, id=NODE, address="192.0.2.7", profile="lab")

    def issue(self) -> None:
        """Two projects without limits, and a token for each role."""
        with transaction(self.engine) as conn:
            settings.store(conn, "default_quota", {})
            for project in ("demo", "other"):
                projects.create(conn, project, ACT, id=project)
            for who, values in TOKENS.items():
                _, self.secrets[who] = tokens.issue(conn, ACT, name=who, **values)

    def prepare(self) -> None:
        """The node is enrolled, bootstrapped and discovered."""
        identity = discovery()["identity"]
        with transaction(self.engine) as conn:
            host.enrolled(conn, NODE, ACT, **identity)
            host.bootstrapped(conn, NODE, ACT, identity=identity)
            host.record_discovery(conn, NODE, discovery(), ACT)

    def sell(self) -> None:
        """Two slots proven clean, parity passed, an image, switches on."""
        with transaction(self.engine) as conn:
            images.register(conn, ACT, **IMAGE)
            for index in FREE:
                disk = bundle(index)["nvme_eui"]
                proof = {"disk": f"eui.{disk}", "verified": True, "method": "discard"}
                proofs.record_transition(conn, NODE, proof, ACT)
        body = {"slots": [bundle(index) for index in FREE], "reason": "test"}
        admin = self.client("admin")
        assert admin.post(f"admin/nodes/{NODE}/resource-slots", json=body).status_code == 201
        report = {"failures": 0, "warnings": 0, **wipes.proven(discovery())}
        with transaction(self.engine) as conn:
            host.record_discovery(conn, NODE, discovery(), ACT)
            host.record_parity(conn, NODE, report, ACT)
            assert len(gate.open_gate(conn, NODE, ACT)["opened"]) == len(FREE)
        on = {"enabled": True}
        assert admin.put(f"admin/nodes/{NODE}/scheduling", json=on).status_code == 200
        assert admin.put("admin/settings/slice-scheduling", json=on).status_code == 200

    def ingress_rule(self, allocation_id: str) -> str:
        """A rule of an allocation that has just been requested."""
        rule = {"protocol": "tcp", "public_address": "203.0.113.10", "public_port": 443}
        with transaction(self.engine) as conn:
            made = journal.create(
                conn,
                IngressRule,
                ACT,
                **rule,
                allocation_id=allocation_id,
                project_id="demo",
                guest_port=8443,
                sources=["198.51.100.0/24"],
                expires_at=4e9,
                state=IngressState.REQUESTED,
            )
        return str(made.id)

    def lease(self) -> Task:
        """Take the next task as a worker would."""
        with transaction(self.engine) as conn:
            (task,) = leasing.lease(conn, "test")
        return task


@contextmanager
def listening(app: FastAPI, **options: Any) -> Iterator[str]:
    """The address of an application on a free port; options are uvicorn's."""
    options = {"log_config": None, "timeout_graceful_shutdown": 1, **options}
    with socket.create_server(("127.0.0.1", 0)) as port:
        server = uvicorn.Server(uvicorn.Config(app, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{port.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def migrated(folder: Path) -> Path:
    """A database file at the newest revision; copying it is much quicker than migrating again."""
    file = folder / "reconciler.db"
    engine = open_engine(f"sqlite:///{file}")
    migrate(engine)
    engine.dispose()
    return file


def copy_database(stack: Stack, folder: Path) -> Path:
    """Copy the database into a single file."""
    target = folder / "reconciler.db"
    source = sqlite3.connect(stack.settings.state_dir / "reconciler.db")
    copied = sqlite3.connect(target)
    source.backup(copied)
    source.close()
    copied.close()
    return target


def stack_in(folder: Path, database: Path, secrets: dict[str, str] | None = None) -> Stack:
    """A service on its own copy of a database."""
    shutil.copy(database, folder / "reconciler.db")
    images = folder.with_name(f"{folder.name}-images")
    images.mkdir(exist_ok=True)
    settings = Settings(
        state_dir=folder,
        public_url="http://198.51.100.1:8080",
        images_dir=images,
        enrolment_insecure=True,
    )
    return Stack(settings, open_engine(settings.database), dict(secrets or {}))
