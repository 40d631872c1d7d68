"""Lab host and story that all lab tests of a session share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.demo.stage import Stage
from lab.paths import REPOSITORY
from tests.lab import prepared

# One story on one host: each file goes on where the one before it left the machine.
STORY = (
    "test_main_path",
    "test_roles",
    "test_upkeep",
    "test_power_cut",
    "test_entry_points",
    "test_way_back",
    "test_whole_machine",
    "test_way_forth",
)


# Shown by make test-long, where the story is played with these too.
LONG = frozenset({"test_roles", "test_power_cut", "test_entry_points", "test_way_forth"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in ours:
        item.add_marker(pytest.mark.lab)
        if item.path.stem in LONG:
            item.add_marker(pytest.mark.long)
    ours.sort(key=lambda item: STORY.index(item.path.stem))
    # After all others: booting a host before a unit test fails would be a waste.
    items[:] = [item for item in items if item not in ours] + ours


class Chapter:
    """Remembers which parts of the story came true: a later one says at once what it lacks."""

    def __init__(self) -> None:
        self.done: dict[str, Any] = {}

    def needs(self, *names: str) -> None:
        missing = [name for name in names if name not in self.done]
        assert not missing, f"the story broke before this test: {', '.join(missing)} did not pass"


@pytest.fixture(scope="session")
def story() -> Chapter:
    return Chapter()


@pytest.fixture(scope="session")
def stage(request: pytest.FixtureRequest, story: Chapter) -> Iterator[Stage]:
    """The stage that the story of test_main_path.py is played on.

    A session without that file begins with the host that it would leave: a saved one where nothing
    has changed that made it, else one that is prepared and saved now.
    """
    stage = Stage(
        REPOSITORY / "build" / "test",
        firmware=os.environ.get("SLICE_FIRMWARE", "bios"),
        console=Console(stderr=True),
    )
    stage.folder.mkdir(parents=True, exist_ok=True)
    try:
        if not any(item.path.stem == STORY[0] for item in request.session.items):
            story.done |= prepared.open_on(stage)
            story.done["prepared"] = True
        yield stage
    finally:
        stage.close()
