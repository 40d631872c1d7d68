"""The page of the terminal in a real browser, before the real service, gateway code and guest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, WebSocketRoute, expect

from tests.unit.reconciler.console.test_browser import (
    DESKTOP,
    PHONE,
    STANDARDS,
    STILL,
    Watched,
    chromium,
    examine,
    judge,
)
from tests.unit.reconciler.gateway.conftest import World
from tests.unit.reconciler.gateway.test_gateway import end_allocation
from tests.unit.reconciler.gateway.test_terminal import Site, site
from tests.unit.reconciler.service.service import until

__all__ = ["chromium", "site"]
pytestmark = [pytest.mark.covers("SLICE-10", "CTRL-13"), pytest.mark.slow]
Open = Callable[..., AbstractContextManager[Watched]]
ROW = ".xterm-rows > div"


@pytest.fixture
def terminal() -> bool:
    return True


@pytest.fixture
def window(chromium: Browser, site: Site) -> Open:
    @contextmanager
    def opened(**options: Any) -> Iterator[Watched]:
        with chromium.new_context(viewport=DESKTOP, **options) as context:
            watched = Watched(context, site.base)
            watched.log_in(site.world.stack.secrets["member"])
            watched.open(f"/console/projects/demo/allocations/{site.world.allocation}")
            watched.page.get_by_role("link", name="Terminal").click()
            yield watched
        assert watched.faults == []

    return opened


def test_type_resize_and_be_cut_by_a_release(world: World, window: Open) -> None:
    with window(**STILL) as watched:
        page = watched.page
        assert judge(page, STANDARDS) == []
        page.get_by_role("button", name="Open a terminal").click()
        expect(page.get_by_text("Connected.")).to_be_visible()
        until_columns(page, "-gt 100")
        assert examine(page, "member-terminal-open") == []
        page.set_viewport_size(PHONE)
        until_columns(page, "-lt 60")
        # A scroll bar that appears takes room from the terminal, and none from the window.
        page.evaluate("document.getElementById('terminal').style.width = '200px'")
        until_columns(page, "-lt 30")
        page.keyboard.press("Control+F6")
        expect(page.get_by_role("link", name="Back to the machine")).to_be_focused()
        end_allocation(world)
        expect(page.get_by_text("Closed. The machine was released.")).to_be_visible()
        expect(page.get_by_role("button", name="Open another terminal")).to_be_visible()


def test_a_window_that_changes_while_it_opens(window: Open) -> None:
    held: list[tuple[WebSocketRoute, str | bytes]] = []

    def hold(socket: WebSocketRoute) -> None:
        def pass_on(message: str | bytes) -> None:
            if isinstance(message, str) and "session_ready" in message:
                held.append((socket, message))
            else:
                socket.send(message)

        socket.connect_to_server().on_message(pass_on)

    with window() as watched:
        page = watched.page
        page.route_web_socket(re.compile("/terminal$"), hold)
        page.get_by_role("button", name="Open a terminal").click()
        # Playwright hands the frames over while it waits for the page.
        until(lambda: page.wait_for_timeout(100) or bool(held), 60)
        rows = page.locator(ROW).count()
        page.set_viewport_size(PHONE)
        expect(page.locator(ROW)).not_to_have_count(rows)
        socket, message = held[0]
        socket.send(message)
        expect(page.get_by_text("Connected.")).to_be_visible()
        until_columns(page, "-lt 60")


def until_columns(page: Page, condition: str) -> None:
    """Let the guest's shell wait until its terminal has such a number of columns, and say so.

    The screen also shows numbers that are no size, such as the time of the last login.
    """
    test = f"[ $(stty size | cut -d ' ' -f 2) {condition} ]"
    page.keyboard.type(f"until {test}; do sleep 0.1; done; echo $((40 + 2)){condition}\n")
    expect(page.locator(".xterm-rows")).to_contain_text(f"42{condition}")


def test_the_page_says_why_it_cannot(world: World, site: Site, window: Open) -> None:
    with window() as watched:
        page = watched.page
        world.seed["/etc/ssh/gpuaas-terminal-ca.pub"].unlink()
        page.get_by_role("button", name="Open a terminal").click()
        words = re.compile("Closed. The machine does not accept .* was removed. Use `gpuaas ssh`")
        expect(page.get_by_text(words)).to_be_visible()
        site.app.state.settings = site.app.state.settings.model_copy(update={"member_address": ""})
        page.reload()
        watched.open(f"/console/projects/demo/allocations/{world.allocation}/terminal")
        expect(page.get_by_role("button", name="Open a terminal")).to_be_disabled()
        expect(page.get_by_text("The site has no gateway.")).to_be_visible()
        # The reload sent the form again, whose ticket is shown once.
        watched.faults = [each for each in watched.faults if "409" not in each]


def test_the_page_says_that_the_service_restarts(window: Open) -> None:
    """The server closes the socket without an event."""
    with window() as watched:
        page = watched.page
        page.route_web_socket(re.compile("/terminal$"), lambda socket: socket.close(code=1012))
        page.get_by_role("button", name="Open a terminal").click()
        expect(page.get_by_text("Closed. The service restarts.")).to_be_visible()


def test_without_scripts_the_page_names_another_way(world: World, window: Open) -> None:
    with window(java_script_enabled=False) as watched:
        expect(watched.page.get_by_text(f"gpuaas ssh {world.allocation}")).to_be_visible()


def test_a_page_of_another_port_opens_no_terminal(site: Site, window: Open) -> None:
    """The browser sends the cookie with its WebSocket, whatever SameSite says."""
    with window() as watched:
        page = watched.page
        script = (
            f"const s = new WebSocket('ws://127.0.0.1:{site.port}/terminal',"
            " 'gpuaas.terminal.v1'); s.onopen = () => document.title = 'open';"
            " s.onclose = () => document.title = 'closed';"
        )
        other = f"http://127.0.0.1:{site.port - 1}/"
        body = f"<script>{script}</script>"
        page.route(other, lambda route: route.fulfill(body=body, content_type="text/html"))
        page.goto(other)
        expect(page).to_have_title("closed")
        watched.faults.clear()
