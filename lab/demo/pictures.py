"""Pictures of the console during the demonstration, by the distribution's Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, sync_playwright

from lab.command import LabError
from lab.demo.stage import NODE, Stage

WIDTH, HEIGHT = 1280, 800
# Who looks, and the path of each page below /console by the name of its picture.
Pages = tuple[str, dict[str, str]]


def _of_tenant(stage: Stage) -> Pages:
    project, id = stage.facts["project"], stage.facts["allocation"]["id"]
    return "tenant", {"machine": f"/projects/{project}/allocations/{id}"}


def _of_blocked(stage: Stage) -> Pages:
    recovery = f"/allocations/{stage.facts['blocked']['id']}/recovery"
    return "admin", {"blocked": "/fleet", "recovery": recovery}


PAGES: dict[str, Callable[[Stage], Pages]] = {
    "parity": lambda _stage: (
        "admin",
        {"fleet": "/fleet", "node": f"/nodes/{NODE}", "parity": f"/nodes/{NODE}/parity"},
    ),
    "telemetry": _of_tenant,
    "blocked": _of_blocked,
    "recover": lambda _stage: ("admin", {"timeline": f"/nodes/{NODE}/timeline"}),
}


def after(stage: Stage, step: str) -> list[str]:
    """Save the pictures that belong after a step as `NAME.png` in the stage's folder.

    Returns:
        Names of the files.

    Raises:
        LabError: Chromium is missing, or a page is not an answer of 200.
    """
    if step not in PAGES:
        return []
    viewer, pages = PAGES[step](stage)
    with browser(stage, viewer) as (page, console):
        for name, path in pages.items():
            answer = page.goto(f"{console}{path}")
            if answer is None or answer.status != 200:
                raise LabError(f"/console{path}: expected 200; found {answer and answer.status}")
            page.screenshot(path=stage.folder / f"{name}.png", full_page=True)
    return [f"{name}.png" for name in pages]


@contextmanager
def browser(stage: Stage, viewer: str) -> Iterator[tuple[Page, str]]:
    """Log in to the console in a browser.

    Yields:
        Its page, and the console's address.
    """
    program = shutil.which("chromium")
    if program is None:
        raise LabError("pictures need chromium: `scripts/setup --demo` installs it")
    if stage.service is None:
        raise LabError("the reconciler is not started")
    console = f"{stage.service.url}/console"
    # Root has no sandbox.
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]) as chromium,
        chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT}) as context,
    ):
        page = context.new_page()
        page.goto(f"{console}/login")
        page.get_by_label("Token").fill(stage.secrets[viewer])
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(re.compile(r"/console/(fleet|projects)"))
        yield page, console
