"""Lab host and story that all lab tests of a session share."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.demo.stage import Stage
from lab.paths import REPOSITORY
from scripts import scenarios
from tests.lab import prepared

ENDING = pytest.StashKey[contextlib.ExitStack]()
# The files play a single story on a single host: each continues from the state that the previous
# file left.
STORY = (
    "test_slice_host",
    "test_two_slices",
    "test_upkeep",
    "test_roles",
    "test_guest_pool",
    "test_power_cut",
    "test_firmware_change",
    "test_entry_points",
    "test_way_back",
    "test_whole_machine",
    "test_way_forth",
)
# Files with a host of their own, played before the story.
ALONE = (
    "test_worked_slice",
    "test_several_gpus",
    "test_docker_and_ufw",
    "test_missing_packages",
)

# Tests of make test-long, which also plays the rest of the story. `make test` plays a single short
# scenario of test_roles.py, which changes daily.
LONG = frozenset(
    {
        *ALONE,
        "test_roles",
        "test_guest_pool",
        "test_power_cut",
        "test_firmware_change",
        "test_entry_points",
        "test_way_forth",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if _is_ours(item)]
    day = datetime.datetime.now(datetime.UTC).date()
    today = scenarios.of_the_day(scenarios.README.read_text(encoding="utf-8"), day)
    for item in ours:
        item.add_marker(pytest.mark.lab)
        if item.path.stem in LONG and not (today and item.name.endswith(f"[{today}]")):
            item.add_marker(pytest.mark.long)
    ours.sort(key=lambda item: (*ALONE, *STORY).index(item.path.stem))
    # Lab tests run last, because a failing unit test makes the boot of a host pointless.
    items[:] = [item for item in items if item not in ours] + ours


class Chapter:
    """Progress of the story. A later test fails at once with the name of the missing part."""

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
    """Stage for the story of test_slice_host.py and the files after it.

    A session without that file starts from a host in the state after it: a saved host if none of
    its sources has changed, else a host that is prepared and saved now.
    """
    with contextlib.ExitStack() as ending:
        request.config.stash[ENDING] = ending
        stage = Stage(
            REPOSITORY / "build" / "test",
            firmware=os.environ.get("SLICE_FIRMWARE", "bios"),
            console=Console(stderr=True),
            # Tests break the host on purpose, and ask for comparisons themselves.
            settings={"GPUAAS_DRIFT_INTERVAL_S": "0"},
        )
        stage.folder.mkdir(parents=True, exist_ok=True)
        patch = ending.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("GPUAAS_LAB_DIR", str(stage.folder / "lab"))
        ending.callback(stage.close)
        if not any(item.path.stem == STORY[0] for item in request.session.items):
            story.done |= prepared.open_on(stage)
            story.done["prepared"] = True
        yield stage


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the chapters of the story for which a slow machine has no time."""
    end = float(os.environ.get("SLICE_TEST_LAB_ENDS", "inf"))
    if _is_ours(item) and time.time() > end:
        pytest.skip("not begun: the time for it, by SLICE_TEST_LAB_ENDS, is over")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the stage with the last lab test: the worker that played it goes on with unit tests."""
    if (nextitem is None or not _is_ours(nextitem)) and ENDING in item.config.stash:
        item.config.stash[ENDING].close()


def _is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent)
