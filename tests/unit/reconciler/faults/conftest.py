"""A database of the fault programme's own, and its sites just before each kind of task.

Here processes die, and never the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from reconciler.db.engine import transaction
from reconciler.db.migrations import migrate
from reconciler.model.states import TaskState
from reconciler.records import nodes
from tests.unit.reconciler.conftest import ADMIN, Database, Site
from tests.unit.reconciler.faults.host import Host
from tests.unit.reconciler.faults.kinds import MOMENTS
from tests.unit.reconciler.faults.playing import Step
from tests.unit.reconciler.faults.scripted_site import ScriptedSite, ended, scripted_site
from tests.unit.reconciler.whole_machines import Machines

Moment = tuple[Path, Host]
Open = Callable[[str], ScriptedSite]


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """As everywhere, but nothing waits for the disk."""
    database = Database(tmp_path_factory.mktemp("faults"))

    def unsynced(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(database.engine, "connect", unsynced)
    yield database
    database.engine.dispose()


@pytest.fixture(scope="session")
def template(database: Database) -> Path:
    """A migrated database, made once."""
    migrate(database.restore(None))
    return database.keep("template.db")


@pytest.fixture(scope="session")
def beginnings(database: Database, template: Path) -> dict[str, Moment]:
    """A site with two slots on sale, and a site with a whole machine."""
    made = {}
    site = Site(database.restore(template))
    site.node()
    with transaction(site.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
    host = Host(boot_id=site.document(0)["identity"]["boot_id"])
    for candidate in site.document(0)["candidates"]:
        host.wiped({"slot_id": "before", **candidate["bundle"]})
    made["Slice"] = (database.keep("faults-slice.db"), host)
    site = Site(database.restore(template))
    Machines(site).machine(profile="lab")
    made["Whole"] = (
        database.keep("faults-whole.db"),
        Host(boot_id=site.document(1)["identity"]["boot_id"]),
    )
    return made


@pytest.fixture(scope="session")
def moments(
    beginnings: dict[str, Moment], database: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Moment]]:
    """Just before each kind of task is taken."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for kind, (scenario, prepare) in MOMENTS.items():
            folder = tmp_path_factory.mktemp("moment")
            scripted = scripted_site(
                scenario, database, beginnings[scenario.__name__], folder, patch
            )
            prepare(scripted)
            name = f"faults-{kind}.db"
            made[kind] = (database.keep(name), scripted.host)
    yield made


@pytest.fixture
def at(
    moments: dict[str, Moment], database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """Opens scenarios that begin before a kind of task, any number of them in sequence."""
    count = iter(range(10_000))

    def opened(kind: str) -> ScriptedSite:
        folder = tmp_path / str(next(count))
        return scripted_site(MOMENTS[kind][0], database, moments[kind], folder, monkeypatch)

    return opened


@dataclass(frozen=True)
class Healthy:
    """The steps of a run when nothing goes wrong, and how the host is after it."""

    steps: tuple[Step, ...]
    host: dict[str, Any]


@pytest.fixture(scope="session")
def healthy(
    moments: dict[str, Moment], database: Database, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Healthy]:
    """By kind of task."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for kind, (scenario, _) in MOMENTS.items():
            folder = tmp_path_factory.mktemp("healthy")
            scripted = scripted_site(scenario, database, moments[kind], folder, patch)
            scripted.work()
            scripted.sound(f"{kind}, nothing wrong")
            assert ended(scripted, kind).state == TaskState.SUCCEEDED
            runs = scripted.runner.runs.values()
            (run,) = [r for r in runs if r.spec.variables["slice_run"]["kind"] == kind]
            made[kind] = Healthy(tuple(run.steps), scripted.host.seen())
    return made
