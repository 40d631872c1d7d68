"""The site with which every story of the model begins, and queries on its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.model.states import LIVE_CLAIMS
from reconciler.records import nodes, slots
from reconciler.runs.collect import RunState
from reconciler.runs.spec import RunSpec
from reconciler.settings import Settings
from tests.unit.reconciler.conftest import ADMIN, Database, Site
from tests.unit.reconciler.faults.fake_runs import FakeRuns
from tests.unit.reconciler.faults.site_model import Host, SiteModel, Slot
from tests.unit.reconciler.whole_machines import Machines

FREE = (0, 1, 3)  # disk 2 of the prepared host is in use
STATES = sa.select(tables.allocations.c.id, tables.allocations.c.state)
UNCLEAN = sa.select(tables.nodes.c.id, tables.nodes.c.unclean_allocation_id)
FENCES = sa.select(tables.slots.c.id, tables.slots.c.fence)
SLOTS = sa.select(tables.slots.c.id, tables.slots.c.status).where(
    tables.slots.c.retired_at.is_(None)
)
LIVE = sa.select(tables.claims.c.allocation_id, tables.claims.c.nvme_identity).where(
    tables.claims.c.state.in_(LIVE_CLAIMS), tables.claims.c.slot_id.is_not(None)
)


def pairs(conn: sa.Connection, query: sa.Select[Any]) -> dict[str, Any]:
    return {str(row[0]): row[1] for row in conn.execute(query)}


def written(conn: sa.Connection) -> tuple[int, int]:
    """The connection, and the number of rows that it has changed."""
    driver: Any = conn.connection.driver_connection
    return id(driver), driver.total_changes


class PreparedSite:
    """A slice host with three slots on sale, and a bare-metal machine."""

    def __init__(self, database: Database, template: Path, state_dir: Path) -> None:
        self.database = database
        self.settings = Settings(state_dir=state_dir, poll_s=0.01)
        site = Site(database.restore(template))
        site.node("n1", FREE, 0)
        Machines(site).machine("m1", 1)
        with transaction(site.engine) as conn:
            for name in ("n1", "m1"):
                nodes.change(conn, name, ADMIN, profile="lab", tenant_address="203.0.113.1")
        self.site = site
        self.documents = {"n1": site.document(0), "m1": site.document(1)}
        self.kept = database.keep("model.db")
        # The runs of the current story.
        self.runs = FakeRuns(SiteModel(), {})

    def launch(self, site: object, spec: RunSpec) -> Path:
        return self.runs.launch(site, spec)

    def observe(self, directory: Path) -> RunState:
        return self.runs.observe(directory)

    def model(self) -> SiteModel:
        """The model of the site at the beginning of a story."""
        model = SiteModel()
        for number, (name, document) in enumerate(self.documents.items()):
            boot = document["identity"]["boot_id"]
            passed = boot if name == "n1" else ""
            model.hosts[name] = Host(number, boot, boot, boot, passed, sliced=name == "n1")
        with reading(self.site.engine) as conn:
            for row in slots.of_node(conn, "n1"):
                model.slots[row.id] = Slot("n1", row.nvme_identity)
        return model
