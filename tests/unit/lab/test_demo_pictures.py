"""Pictures that the demonstration takes of the console, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright import sync_api

from lab.command import LabError
from lab.demo import pictures
from lab.demo.stage import NODE as stage_node
from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.conftest import databases, selling
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, discovery
from tests.unit.reconciler.api.test_canaries import fail
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.console.conftest import application, console
from tests.unit.reconciler.console.samples import hour_of_samples
from tests.unit.reconciler.console.test_browser import site

__all__ = ["application", "console", "databases", "selling", "site"]


# Texts that each picture must show, so that a page that is empty is noticed.
SHOWN = {
    "parity": {"fleet": "slots free of 2", "node": "On sale", "parity": "turn it on"},
    "telemetry": {"machine": "GPU temperature"},
    "blocked": {"blocked": "Waiting for recovery", "recovery": "1 blocked slot"},
    "recover": {"timeline": "provision"},
}


@pytest.fixture
def shared_browser(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All steps use the browser that the first has started, because a start takes seconds."""
    launch, started = sync_api.BrowserType.launch, []

    def launch_once(kind: sync_api.BrowserType, **options: Any) -> Any:
        started.extend([] if started else [launch(kind, **options)])
        return nullcontext(started[0])

    with sync_api.sync_playwright() as playwright:
        monkeypatch.setattr(pictures, "sync_playwright", lambda: nullcontext(playwright))
        monkeypatch.setattr(sync_api.BrowserType, "launch", launch_once)
        yield


@pytest.mark.usefixtures("shared_browser")
def test_pictures_are_taken_and_a_page_that_fails_is_named(
    selling: Stack, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (launch(selling, name).json() for name in ("good", "bad"))
    activate(selling, good["id"])
    hour_of_samples(selling, good["id"])
    fail(selling, bad["id"])
    check = {"status": "WARN", "check": "iommu", "detail": "off", "remediation": "turn it on"}
    with transaction(selling.engine) as conn:
        report = {"failures": 0, "warnings": 1, **wipes.proven(discovery()), "checks": [check]}
        host.record_parity(conn, NODE, report, ACT)
    facts = {"project": "demo", "allocation": good, "blocked": bad}
    secrets = {**selling.secrets, "tenant": selling.secrets["member"]}
    service = SimpleNamespace(url=site)
    stage: Any = SimpleNamespace(service=service, secrets=secrets, folder=tmp_path, facts=facts)
    texts: list[str] = []
    screenshot = sync_api.Page.screenshot

    def noted(page: sync_api.Page, **options: Any) -> bytes:
        texts.append(page.locator("body").inner_text())
        return screenshot(page, **options)

    monkeypatch.setattr(sync_api.Page, "screenshot", noted)
    assert pictures.after(stage, "host") == []
    assert stage_node == NODE
    assert set(SHOWN) == set(pictures.PAGES)
    for step, shown in SHOWN.items():
        texts.clear()
        assert pictures.after(stage, step) == [f"{name}.png" for name in shown]
        for text, expected in zip(texts, shown.values(), strict=True):
            assert expected in text
        assert min((tmp_path / f"{name}.png").stat().st_size for name in shown) > 10_000
    monkeypatch.setattr(pictures, "NODE", "other")
    with pytest.raises(LabError, match="/console/nodes/other/timeline: expected 200; found 404"):
        pictures.after(stage, "recover")
