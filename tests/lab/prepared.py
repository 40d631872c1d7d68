"""Prepared slice host: saved by test_slice_host.py, loaded by lab tests of other subjects.

A saved host is loaded while all its sources are unchanged: collection, profiles, lab, images.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from lab import cache, guest_image, host_image, saved
from lab.command import LabError
from lab.demo import host_steps
from lab.demo.stage import NODE, Stage
from lab.distro import host_distro, this_distro
from lab.paths import REPOSITORY
from reconciler.client import ENDED
from tests.lab import traces
from tests.lab.proof import prove_again

# Source folders of a prepared host. A change in any of them makes a new preparation necessary.
SOURCES = (
    *("plugins", "roles", "playbooks", "profiles", "contracts", "lab"),
    # A saved database opens only under the schema with which it was saved.
    *("reconciler/db/schema", "reconciler/db/migrations/versions"),
)
# Parts of the story that later files use.
STORY = ("deployed", "transition")
STEPS: tuple[Callable[[Stage], Any], ...] = (
    host_steps.enrol,
    host_steps.bootstrap,
    host_steps.discover,
    host_steps.transition,
    host_steps.approve,
    host_steps.bind,
    host_steps.parity,
)
_IDLE_LIMIT_S = 60.0

Done = dict[str, Any]


def key(firmware: str) -> str:
    """Return a key that changes with every source of a prepared host."""
    made = {
        "firmware": firmware,
        "host": host_image.name(host_distro()),
        "guest": guest_image.ensure(this_distro()).sha256,
    }
    return cache.content_key(made, [REPOSITORY / name for name in SOURCES])


def open_on(stage: Stage) -> Done:
    """Bring the stage to the state after test_slice_host.py; return the results for later files."""
    done = _loaded(stage)
    if done is None:
        done = _prepare(stage)
        save(stage, done)
    return done


@contextmanager
def alone(
    name: str,
    environment: Mapping[str, str],
    *,
    settings: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Stage]:
    """A fresh host of its own, which is not enrolled yet.

    environment: variables of the lab. settings: variables of the service.
    """
    stage = Stage(
        REPOSITORY / "build" / name,
        console=Console(stderr=True),
        settings={"GPUAAS_DRIFT_INTERVAL_S": "0", **(settings or {})},
        **options,
    )
    stage.folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUAAS_LAB_DIR", str(stage.folder / "lab"))
        for variable, value in environment.items():
            patch.setenv(variable, value)
        try:
            host_steps.host(stage)
            yield stage
        finally:
            stage.close()


def save(stage: Stage, done: Done) -> None:
    """Save the stage's host with its reconciler, once per key; both continue afterwards."""
    digest = key(stage.firmware)
    if os.environ.get("GPUAAS_LAB_SAVE") == "0" or _saved(stage.firmware, digest) is not None:
        return
    if stage.service is None:
        raise LabError("the reconciler is not started")
    if not _idle(stage):
        stage.console.print("the prepared host is not saved: the reconciler still works on it")
        return
    notes = {
        "key": digest,
        "known": {name: stage.facts[name] for name in ("project", "image_id")},
        "done": {name: _plain(done[name]) for name in STORY},
    }
    stage.service.stop()
    try:
        extras = {"reconciler": stage.service.folder}
        saved.save(_name(stage.firmware), replace=True, extras=extras, notes=notes)
    finally:
        stage.service.start()


def _loaded(stage: Stage) -> Done | None:
    """Load a saved host; return None if no saved host fits."""
    kept = _saved(stage.firmware, key(stage.firmware))
    if kept is None:
        return None
    try:
        stage.boot_saved(kept.name)
    except LabError as refused:
        stage.console.print(f"preparing a host anew: {refused}", highlight=False)
        return None
    stage.facts["image"] = guest_image.ensure(this_distro())
    saved.restore(kept, "reconciler", stage.folder / "reconciler")
    stage.reopen(kept.notes["known"])
    # The host has rebooted, so nothing on it is sold until parity passes again.
    prove_again(stage)
    done: Done = kept.notes["done"]
    return {**done, "deployed": set(done["deployed"])}


def _prepare(stage: Stage) -> Done:
    """Play the steps of test_slice_host.py, which verifies them."""
    host_steps.host(stage)
    done: Done = {"deployed": traces.look(stage)}
    for step in STEPS:
        done[step.__name__] = step(stage)
    return done


def _saved(firmware: str, digest: str) -> saved.Saved | None:
    try:
        kept = saved.entry(_name(firmware))
    except LabError:
        return None
    return kept if kept.notes.get("key") == digest else None


def _name(firmware: str) -> str:
    return f"tests-{firmware}"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value


def _idle(stage: Stage) -> bool:
    """Wait until no task is open, because an open task would count as lost after loading."""
    end = time.monotonic() + _IDLE_LIMIT_S
    while time.monotonic() < end:
        tasks = stage.api().get("/admin/tasks", node_id=NODE)["items"]
        if all(task["state"] in ENDED for task in tasks):
            return True
        time.sleep(1)
    return False
