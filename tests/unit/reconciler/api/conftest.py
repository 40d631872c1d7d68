"""Services in three states: empty but for tokens and a node, discovered, selling two slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.reconciler.api.provider import Provider, running
from tests.unit.reconciler.api.stack import Stack, copy_database, migrated, stack_in

Saved = tuple[Path, dict[str, str]]


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """The database and the tokens of each state, made once."""
    folder = tmp_path_factory.mktemp("databases")
    made: dict[str, Saved] = {}
    stack = stack_in(folder, migrated(tmp_path_factory.mktemp("empty")))
    steps = {"new": (stack.add_node, stack.issue), "prepared": (stack.prepare,)}
    for name, acts in {**steps, "selling": (stack.sell,)}.items():
        for act in acts:
            act()
        made[name] = (copy_database(stack, tmp_path_factory.mktemp(name)), dict(stack.secrets))
    stack.engine.dispose()
    return made


def _at(saved: Saved, folder: Path) -> Iterator[Stack]:
    stack = stack_in(folder, *saved)
    yield stack
    stack.engine.dispose()


@pytest.fixture
def new(databases: dict[str, Saved], tmp_path: Path) -> Iterator[Stack]:
    """A node that has not enrolled, and a token for each role."""
    yield from _at(databases["new"], tmp_path)


@pytest.fixture
def prepared(databases: dict[str, Saved], tmp_path: Path) -> Iterator[Stack]:
    """The node is discovered; nothing is approved."""
    yield from _at(databases["prepared"], tmp_path)


@pytest.fixture
def selling(databases: dict[str, Saved], tmp_path: Path) -> Iterator[Stack]:
    """Two slots are available and scheduling is on."""
    yield from _at(databases["selling"], tmp_path)


@pytest.fixture(scope="session")
def process() -> Iterator[Provider]:
    """An OpenID provider."""
    with running() as provider:
        yield provider
