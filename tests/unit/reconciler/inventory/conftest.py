"""A site, and a stand-in NetBox with matching devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.db import clock
from reconciler.db.engine import reading
from reconciler.inventory import sync
from reconciler.inventory.expected import DEVICE_FIELDS
from reconciler.settings import Settings
from tests.standin.netbox import TOKEN
from tests.standin.service import Manager, standing
from tests.unit.reconciler.conftest import Site

PROFILES = Path(__file__).parents[4] / "profiles"
SLICE, BAREMETAL = "gpuaas-profile-slice-vm", "gpuaas-profile-baremetal"
PREFIX = {"prefix": "10.0.0.0/8", "scope_type": "dcim.site", "scope_id": 1}


def tags(*slugs: str) -> list[dict[str, str]]:
    return [{"name": slug, "slug": slug} for slug in slugs]


def device(
    name: str | None, address: str = "10.0.2.15", *slugs: str, **values: Any
) -> dict[str, Any]:
    """A device with the tag of a slice host, unless others are given."""
    context = {"gpuaas": {"hardware_profile": "lab"}}
    return {
        "name": name,
        "primary_ip4": {"address": f"{address}/24"},
        "tags": tags(*(slugs or (SLICE,))),
        "local_context_data": context,
        **values,
    }


class Pass:
    """Runs passes as the leader's loop does, and shows the objects in NetBox."""

    def __init__(self, site: Site, manager: Manager, settings: Settings) -> None:
        self.site = site
        self.manager = manager
        self.settings = settings

    def begin(self, *devices: dict[str, Any], **faults: Any) -> None:
        self.manager.begin(**{"devices": devices, "fields": list(DEVICE_FIELDS), **faults})

    def __call__(self, *, apply: bool = False) -> sync.NetboxReading:
        with reading(self.site.engine) as conn:
            now = clock.read(conn)
        result = sync.run(self.site.engine, self.settings, sync.NetboxReading(now, applied=apply))
        assert self.record["violations"] == []
        assert TOKEN not in str(result)
        return result

    @property
    def record(self) -> dict[str, Any]:
        return self.manager.record()

    def objects(self, path: str) -> list[dict[str, Any]]:
        return list(self.record["objects"][path].values())


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    with standing(tmp_path_factory.mktemp("netbox"), "netbox", TOKEN) as manager:
        yield manager


@pytest.fixture
def netbox(sold: Site, process: Manager, tmp_path: Path) -> Pass:
    """A NetBox with the device of node n1."""
    settings = Settings(state_dir=tmp_path, profiles_dir=PROFILES, **process.settings)
    run = Pass(sold, process, settings)
    run.begin(device("n1"))
    return run
