"""Services at three stages: empty but for tokens and a node, discovered, selling two slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.reconciler.api.world import World, migrated, snapshot, world_in

Stage = tuple[Path, dict[str, str]]


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    """The databases of the stages, made once."""
    folder = tmp_path_factory.mktemp("stages")
    made: dict[str, Stage] = {}
    world = world_in(folder, migrated(tmp_path_factory.mktemp("empty")))
    steps = {"new": (world.add_node, world.issue), "prepared": (world.prepare,)}
    for name, acts in {**steps, "selling": (world.sell,)}.items():
        for act in acts:
            act()
        made[name] = (snapshot(world, tmp_path_factory.mktemp(name)), dict(world.secrets))
    world.engine.dispose()
    return made


def _at(stage: Stage, folder: Path) -> Iterator[World]:
    world = world_in(folder, *stage)
    yield world
    world.engine.dispose()


@pytest.fixture
def new(stages: dict[str, Stage], tmp_path: Path) -> Iterator[World]:
    """A node that has not enrolled, and a token for everybody."""
    yield from _at(stages["new"], tmp_path)


@pytest.fixture
def prepared(stages: dict[str, Stage], tmp_path: Path) -> Iterator[World]:
    """The node is discovered; nothing is approved."""
    yield from _at(stages["prepared"], tmp_path)


@pytest.fixture
def selling(stages: dict[str, Stage], tmp_path: Path) -> Iterator[World]:
    """Two slots are available and scheduling is on."""
    yield from _at(stages["selling"], tmp_path)
