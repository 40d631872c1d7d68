"""The console in a real browser: accessibility, the keyboard, refreshes, life without scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright

from reconciler.api.app import create_app
from reconciler.console import stream
from reconciler.console.app import OPERATORS, SHARED, mount
from reconciler.db.engine import transaction
from reconciler.db.schema import allocations, nodes, slots, terminal_recordings
from reconciler.lifecycle import host
from reconciler.records import terminals
from reconciler.service.process import adopt
from reconciler.trust import ca
from tests.unit.reconciler.api.conftest import Saved
from tests.unit.reconciler.api.stack import ACT, KEY, NODE, Stack, listening, stack_in
from tests.unit.reconciler.api.test_canaries import fail
from tests.unit.reconciler.api.test_follow import running, say
from tests.unit.reconciler.api.test_jobs import bury, with_model
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.api.test_terminals import recorded
from tests.unit.reconciler.console.full_site import full_site
from tests.unit.reconciler.console.test_pages import HARMLESS, HOST, REASON, address, launch_review

pytestmark = pytest.mark.covers("CTRL-13")

ROOT = Path(__file__).parents[4]
AXE = ROOT / "tests" / "data" / "browser" / "axe-4.14.1.min.js"
SHOTS = ROOT / "build" / "console"
CHROMIUM = shutil.which("chromium")
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
# Half of axe's time is for the selectors of passing rules.
JUDGE = """rules => axe.run({
    runOnly: rules, resultTypes: ["violations"], selectors: false, preload: false
})"""
DETAILS = "document.querySelectorAll('details')"
STANDARDS = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
COLOURS = {"type": "rule", "values": ["color-contrast"]}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The distribution's Chromium; root has no sandbox."""
    assert CHROMIUM, "scripts/setup --tests installs chromium"
    # A busy machine may take long for a page.
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def examined() -> list[dict[str, str]]:
    """Findings of `gpuaas doctor`."""
    todo = {"expected": "at least 10 GiB", "remedy": "delete runs, or give the folder more room"}
    return [
        {"status": "ok", "check": "clock", "found": "equal", "expected": "", "remedy": ""},
        {"status": "fail", "check": "disk_space", "found": "/var/lib/gpuaas: 1 MiB free", **todo},
    ]


@pytest.fixture
def site(console: FastAPI) -> Iterator[str]:
    """The address of the console on a site with two free slots."""
    with listening(console, access_log=False) as url:
        yield url


class Watched:
    """A browser's window. Console errors, failed answers and foreign requests are collected."""

    def __init__(self, context: BrowserContext, site: str) -> None:
        self.context, self.site, self.faults = context, site, []  # type: tuple[Any, str, list[str]]
        self.page = context.new_page()
        self.page.on("console", self._message)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("response", self._response)
        self.page.on("request", self._request)

    def _message(self, message: Any) -> None:
        if message.type == "error":
            self.faults.append(message.text)

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status} {response.url}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self.site):
            self.faults.append(f"foreign: {request.url}")

    def open(self, path: str) -> Page:
        self.page.goto(f"{self.site}{path}")
        return self.page

    def log_in(self, token: str) -> None:
        self.open("/console/login")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url(re.compile(r"/console/(fleet|projects)"))


Open = Callable[..., Any]


def windows(chromium: Browser, site: str, stack: Stack) -> Open:
    """Open a window that is logged in, "" for none; it has met no fault when it closes."""

    @contextmanager
    def opened(who: str, **options: Any) -> Iterator[Watched]:
        with chromium.new_context(viewport=options.pop("viewport", DESKTOP), **options) as context:
            watched = Watched(context, site)
            if who:
                watched.log_in(stack.secrets[who])
            yield watched
        assert watched.faults == []

    return opened


@pytest.fixture
def window(chromium: Browser, site: str, selling: Stack) -> Open:
    return windows(chromium, site, selling)


@dataclass
class Full:
    """The full site, on which no test changes anything. pages: of each role, by a name."""

    stack: Stack
    names: dict[str, str]
    window: Open
    pages: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def full(
    chromium: Browser, databases: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Full]:
    stack = stack_in(tmp_path_factory.mktemp("full"), *databases["selling"])
    names = full_site(stack, tmp_path_factory.mktemp("profiles"))
    app = mount(create_app(stack.settings, stack.engine), examined)
    with listening(app, access_log=False) as url:
        yield Full(stack, names, windows(chromium, url, stack), pages(stack, names))
    stack.engine.dispose()


def pages(stack: Stack, names: dict[str, str]) -> dict[str, dict[str, str]]:
    """The pages of each role, by a name for their picture."""

    def named(patterns: dict[str, Any]) -> dict[str, str]:
        return {
            re.sub(r"\W+", "-", pattern).strip("-"): address(pattern, names)
            for pattern in patterns
            if pattern != "/"
        }

    shared = named(SHARED)
    # Operators see nothing else there.
    member = dict(shared)
    for step in ("region", "image", "access", "review"):
        member[f"launch-{step}"] = launch_review(stack, step=step)
    for state in ("stuck", "waiting", "metal"):
        member[f"allocation-{state}"] = f"/console/projects/demo/allocations/{names[state]}"
    operators = named(OPERATORS)
    for state in ("stuck", "failed", "waiting", "metal"):
        operators[f"operator-{state}"] = f"/console/allocations/{names[state]}"
        operators[f"recovery-{state}"] = f"/console/allocations/{names[state]}/recovery"
    for node in ("rack-2", "silent", "draining", "ordered", "metal"):
        operators[f"node-{node}"] = f"/console/nodes/{node}"
    for part in ("discovery", "parity"):
        operators[f"{part}-rack-2"] = f"/console/nodes/rack-2/{part}"
    operators["health-examined"] = "/console/health?examine=yes"
    return {"member": member, "admin": shared | operators}


def judge(page: Page, rules: dict[str, Any]) -> list[str]:
    """Violations of the rules on a page, as axe sees them."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    result = page.evaluate(JUDGE, rules)
    return [
        f"{page.url}: {each['id']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in result["violations"]
    ]


def examine(page: Page, name: str) -> list[str]:
    """Judge a page in light and dark at desktop and phone width, with all its forms open.

    The window must have light colours and desktop width. With SLICE_TEST_PICTURES=1 the page's four
    pictures are in build/console.
    """
    problems: list[str] = []

    def look(width: str, scheme: str, rules: dict[str, Any]) -> None:
        if os.environ.get("SLICE_TEST_PICTURES") == "1":
            page.evaluate(f"{DETAILS}.forEach(each => each.open = false)")
            # A picture of the whole page takes twice as long; its colours show in a part of it.
            picture = SHOTS / f"{name}-{width}-{scheme}.png"
            page.screenshot(path=picture, full_page=scheme == "light")
        # Forms behind a summary are judged, too, and must fit the window.
        page.evaluate(f"{DETAILS}.forEach(each => each.open = true)")
        problems.extend(judge(page, rules))
        if page.evaluate(WIDER):
            problems.append(f"{page.url}: the page scrolls sideways at {width} width")

    # The width decides the layout, the scheme only the colours.
    look("desktop", "light", STANDARDS)
    page.emulate_media(color_scheme="dark")
    look("desktop", "dark", COLOURS)
    page.set_viewport_size(PHONE)
    look("phone", "dark", STANDARDS)
    page.emulate_media(color_scheme="light")
    look("phone", "light", COLOURS)
    for words, size, style in STRETCHED:
        page.set_viewport_size(size)
        wider, clipped = page.evaluate(STRETCH, style)
        if clipped or wider:
            problems.append(f"{page.url}: does not fit {words}: {clipped[:3]}")
    return problems


# Colours change at once, so that no picture is taken between two of them.
STILL = {"color_scheme": "light", "reduced_motion": "reduce"}
LINKS = "[...document.querySelectorAll('a[href]')].map(each => each.href.split('#')[0])"
# WCAG 1.4.4, 1.4.10 and 1.4.12: the width that is left at 400 %, letters of twice their size, and
# the distances that a reader may set.
SPACED = (
    "* { line-height: 1.5 !important; letter-spacing: 0.12em !important;"
    " word-spacing: 0.16em !important } p { margin-bottom: 2em !important }"
)
STRETCHED: list[tuple[str, ViewportSize, str]] = [
    ("320 pixels", {"width": 320, "height": 256}, ""),
    ("320 pixels with wider text", {"width": 320, "height": 256}, SPACED),
    ("a desktop with wider text", DESKTOP, SPACED),
    ("a desktop with text of twice its size", DESKTOP, "html { font-size: 200% }"),
]
WIDER = "document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"
# Whether the page scrolls sideways in this style, and elements whose text is wider than they are.
# The page's policy forbids a style element.
STRETCH = f"""css => {{
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(css);
    document.adoptedStyleSheets = [sheet];
    return [{WIDER}, [...document.querySelectorAll(
        "a, button, dd, dt, h1, h2, label, legend, li, p, summary, td, th, .state, .slot"
    )].filter(each => each.clientWidth && each.scrollWidth > each.clientWidth + 1)
        .map(each => each.outerHTML.slice(0, 160))];
}}"""


@pytest.mark.parametrize("who", ["admin", "member"])
def test_pages_are_accessible_and_fit_a_phone(full: Full, who: str) -> None:
    """And every link of them leads to a page without a fault."""
    shown = full.pages[who]
    problems: list[str] = []
    with full.window(who, **STILL) as watched:
        links: set[str] = set()
        titles: dict[str, set[str]] = {}
        for name, path in shown.items():
            page = watched.open(path)
            titles.setdefault(page.title(), set()).add(path.partition("?")[0])
            links |= set(page.evaluate(LINKS))
            problems += examine(page, f"{who}-{name}")
            page.set_viewport_size(DESKTOP)
            # Buttons that only ask for another view.
            harmless = page.locator("form[method=get] button:enabled")
            for number in range(harmless.count()):
                watched.open(path)
                harmless.nth(number).click()
        rest = sorted(links - {f"{watched.site}{path}" for path in shown.values()})
        assert rest
        # Other objects or views of the same pages: the browser shows none of them again.
        for address in rest:
            answer = watched.context.request.get(address)
            problems += [] if answer.ok else [f"{address}: {answer.status}"]
    assert problems == []
    assert [each for each in titles.items() if len(each[1]) > 1] == [], "a title names one page"


def test_pages_without_a_session_are_accessible_and_fit_a_phone(full: Full) -> None:
    with full.window("", **STILL) as watched:
        page = watched.open("/console/login")
        # A password manager may fill it in, and it may be pasted.
        expect(page.get_by_label("Token")).to_have_attribute("autocomplete", "current-password")
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('input'), {id: 'source'}))"
        )
        page.locator("#source").fill("copied")
        page.keyboard.press("Control+A")
        page.keyboard.press("Control+C")
        page.evaluate("document.getElementById('source').remove()")
        page.get_by_label("Token").fill("before ")
        page.keyboard.press("End")
        page.keyboard.press("Control+V")
        expect(page.get_by_label("Token")).to_have_value("before copied")
        problems = examine(page, "login")
        unknown = "/console/nowhere"
        page.set_viewport_size(DESKTOP)
        problems += examine(watched.open(unknown), "unknown")
        # The answer itself, and the browser's line about it.
        assert [fault for fault in watched.faults if "404" not in fault] == []
        assert f"404 {watched.site}{unknown}" in watched.faults
        watched.faults.clear()
    assert problems == []


def test_names_and_reasons_without_a_space_fit_a_phone(selling: Stack, window: Open) -> None:
    made = launch(selling, hostname="h" * 63).json()["id"]
    activate(selling, made)
    reason = {"state_reason": "r" * 500}
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(name="n" * 200, **reason))
        conn.execute(sa.update(allocations).values(**reason))
        conn.execute(sa.update(slots).values(status_reason="s" * 500))
    slot = selling.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"][0]
    with window("admin", viewport=PHONE) as watched:
        for path in (
            "/fleet",
            f"/nodes/{NODE}",
            f"/nodes/{NODE}/discovery",
            f"/nodes/{NODE}/slots/{slot['id']}",
            f"/allocations/{made}",
            f"/allocations/{made}/recovery",
            f"/projects/demo/allocations/{made}",
            f"/projects/demo/allocations/{made}/terminal",
        ):
            page = watched.open(f"/console{path}")
            page.evaluate(f"{DETAILS}.forEach(each => each.open = true)")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path


# Elements that Tab reaches: no disabled controls, and a single button of a radio group.
REACHABLE = """() => {
    window.stops = [...document.querySelectorAll(
        "a[href], button:enabled, input:enabled:not([type=hidden]), select, textarea, summary,"
        + " [tabindex='0']"
    )].filter(each => each.checkVisibility());
    return window.stops.filter(each => each.type !== "radio").map(each => stops.indexOf(each));
}"""
# Keeps for each Tab the number of the element with the focus, whether it is in the window with
# nothing before it, and whether it has a ring.
FOCUS = """() => {
    window.focused = [];
    document.addEventListener("keyup", () => {
        const focused = document.activeElement, style = getComputedStyle(focused);
        const box = focused.getBoundingClientRect();
        const x = Math.max(box.left, 0) + 3, y = Math.max(box.top, 0) + 3;
        const on_top = document.elementFromPoint(x, y);
        window.focused.push([
            stops.indexOf(focused),
            focused.contains(on_top) || on_top?.contains(focused) || false,
            style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2,
        ]);
    });
}"""


DEMO = "/console/projects/demo"
MINE = f"{DEMO}/allocations/MINE"
# Harmless forms of a member's pages: page, label of the button, typed values, and text shown then.
HARMLESS_OF_MEMBER: list[tuple[str, str, dict[str, str], str | re.Pattern[str]]] = [
    (MINE, "Stop", {}, "stop under way"),
    (MINE, "Restart", {}, "restart under way"),
    (MINE, "Reset", {}, "reset under way"),
    (f"{MINE}/terminal", "Let the machine accept terminals", {}, "Tell the machine"),
    (f"{MINE}/terminal", "Accept terminals no longer", {}, "Tell the machine"),
    ("/console/account", "Make the token", {"name": "nightly"}, "Token of nightly, shown once"),
    ("/console/account", "Revoke nightly", {}, re.compile("nightly.*revoked")),
    (f"{DEMO}/ssh", "Register a key", {"public_key": KEY}, "Registered by"),
    (f"{DEMO}/ssh", "Revoke KEY", {}, "revoked"),
    (f"{DEMO}/ssh", "Record terminals", {}, "What terminals show is recorded"),
    (f"{DEMO}/ssh", "Record no longer", {}, "Nothing is recorded."),
    (f"{DEMO}/jobs", "Queue the sample", {}, "Jobs that have not ended now 1"),
    (f"{DEMO}/jobs", "Cancel these jobs", {}, "Jobs that have not ended now 0"),
    (
        f"{DEMO}/apps",
        "Deploy",
        {"name": "slurm", "controller_allocation_id": "MINE", "managed_key": KEY},
        "Work on the members",
    ),
    (f"{DEMO}/apps/APP", "Install the key again", {}, "deploying"),
    (f"{DEMO}/apps/APP", "Stop slurm", {}, "It has ended."),
]
# Not pressed here, with the reason.
OTHERS_OF_MEMBER = {
    "Log out": "test_sessions.py",
    "Revoke member": "it ends this session",
    "Open a terminal": "test_terminal_page.py, with a gateway",
    "Open a port": "test_a_port_is_opened_and_removed_on_the_page; it needs public addresses",
    "Release slice-1": "test_power_and_release_by_keyboard_alone; no way leads back",
    "Give them up": "test_dead_letters_have_their_reasons_...; it is not harmless",
    "Revoke any key": "as the button beside the key",
}
BUTTONS = """[...document.querySelectorAll("form[method=post] button:enabled")]
    .map(each => each.ariaLabel || each.textContent.trim())"""
# Text shown after an operator's forms that queue no task.
SHOWN = {"Enrolment token": "shown once", "Drain": "draining", "Resume": "ready"} | {
    power: f"{power.lower()} under way" for power in ("Stop", "Restart", "Reset")
}
# First and last, because a node that drains or reboots offers less.
ORDER = {"Drain": 0, "Resume": 1, "Reboot the host": 3}


def press(page: Page, label: str, typed: dict[str, str]) -> None:
    """Fill in the form with this button, and press it."""
    page.evaluate(f"{DETAILS}.forEach(each => each.open = true)")
    button = page.get_by_role("button", name=label, exact=True).first
    form = page.locator("form").filter(has=button)
    for name, value in typed.items():
        control = form.locator(f'[name="{name.replace("__", ":")}"]')
        kind = control.evaluate("each => each.type")
        if kind == "checkbox":
            form.locator(f'[value="{value}"]').check()
        elif kind == "select-one":
            control.select_option(value)
        else:
            control.fill(value)
    button.click()


def cancel_tasks(stack: Stack) -> list[str]:
    """Cancel the tasks that a form has queued, so that the next finds the site as it was. Returns
    their kinds; the end of some queues others.
    """
    admin = stack.client("admin")
    batches: list[list[Any]] = []
    while rows := admin.get("admin/tasks", params={"state": "queued"}).json()["items"]:
        batches.append(rows)
        for task in rows:
            answer = admin.post(f"admin/tasks/{task['id']}/cancel", json=REASON)
            assert answer.status_code == 200, answer.text
    return [task["kind"] for task in batches[0]] if batches else []


def test_harmless_buttons_of_an_operator(selling: Stack, window: Open) -> None:
    """Each with the text on its page then. test_a_harmless_form_... asserts the effects."""
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    signed = ca.certify_host(ca.open_trust(selling.settings.state_dir), KEY, NODE)
    with transaction(selling.engine) as conn:
        host.record_certificate(conn, NODE, ACT, certificate=signed, public_key=KEY)
    values = {"MINE": mine, "IMAGE": selling.client("admin").get("images").json()["items"][0]["id"]}
    resume = (HOST, "Resume", REASON, "")
    forms = sorted([*HARMLESS, resume], key=lambda each: ORDER.get(each[1], 2))
    with window("admin") as watched:
        for path, label, typed, kind in forms:
            page = watched.open(path.replace("MINE", mine))
            press(page, label, {name: values.get(each, each) for name, each in typed.items()})
            # Either the page of the task, or a page that lists it.
            words = SHOWN.get(label) or re.compile(rf"{re.escape(kind)}\s*queued")
            expect(page.get_by_role("main")).to_contain_text(words)
            assert cancel_tasks(selling) == [kind] * bool(kind), label


def test_harmless_buttons_of_a_member(selling: Stack, console: FastAPI, window: Open) -> None:
    """With the text on their pages then. A revoked key does not come back."""
    gateway = {"member_address": "gate.example"}
    console.state.settings = selling.settings = selling.settings.model_copy(update=gateway)
    adopt(selling.settings, selling.engine)
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    connection = {"username": "tenant", "host_keys": [KEY], "node": NODE}
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(allocations).values(connection=connection))
    with_model(selling)
    bury(selling)
    member = selling.client("member")
    values = {"MINE": mine}
    pressed, offered = set(), set()

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    with window("member") as watched:
        for path, label, typed, words in HARMLESS_OF_MEMBER:
            page = watched.open(filled(path))
            offered |= set(page.evaluate(BUTTONS))
            pressed.add(filled(label))
            press(page, filled(label), {name: filled(value) for name, value in typed.items()})
            expect(page.get_by_role("main")).to_contain_text(words)
            if label == "Register a key":
                (key,) = member.get("projects/demo/ssh-keys").json()["items"]
                values["KEY"] = key["name"] or key["fingerprint"][-6:]
            elif label == "Deploy":
                values["APP"] = page.url.rpartition("/")[2]
            cancel_tasks(selling)
    assert offered - pressed == set(OTHERS_OF_MEMBER)
    (key,) = member.get("projects/demo/ssh-keys").json()["items"]
    assert key["revoked_at"]
    again = member.post("projects/demo/ssh-keys", json={"public_key": KEY})
    assert again.status_code == 409, again.text


MAIN = (
    *("fleet", "nodes-node", "nodes-node-discovery", "tokens", "images"),
    *(f"projects-project{part}" for part in ("", "-launch", "-usage", "-allocations-allocation")),
    "projects-project-allocations-allocation-terminal",
)


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_tab_reaches_all_in_the_order_of_the_page(full: Full, size: ViewportSize) -> None:
    """And where the focus is can be seen, beginning with the link to the content. Forms behind a
    summary are open. At phone width the main pages, because each layout is used by several.
    """
    paths = list(dict.fromkeys(full.pages["admin"].values()))
    if size == PHONE:
        paths = [full.pages["admin"][name] for name in MAIN]
    faults: list[tuple[str, Any]] = []
    with full.window("admin", viewport=size) as watched:
        # Without htmx, so that no part of the page is exchanged meanwhile.
        watched.page.route("**/static/h*.js", lambda route: route.fulfill(body=""))
        for path in paths:
            page = watched.open(path)
            page.evaluate(f"{DETAILS}.forEach(each => each.open = true)")
            expected = page.evaluate(REACHABLE)
            page.evaluate(FOCUS)
            page.keyboard.press("Tab")
            expect(page.get_by_role("link", name="Skip to the content")).to_be_in_viewport()
            stops = page.evaluate("focused")
            # After the last element the focus leaves the page, or begins again.
            while len(stops) < 2 or stops[-1][0] not in (-1, 0):
                # At least all others.
                for _ in range(max(len(expected) - len(stops), 1)):
                    page.keyboard.press("Tab")
                stops = page.evaluate("focused")
            numbers = [number for number, _, _ in stops[:-1]]
            wrong = set(expected) - set(numbers) if numbers == sorted(numbers) else numbers
            faults += [(path, wrong)] if wrong else []
            faults += [(path, stop) for stop in stops[:-1] if not all(stop[1:])]
        assert faults == []
        page.reload()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()


def test_power_and_release_by_keyboard_alone(selling: Stack, window: Open) -> None:
    """The results are announced."""
    made = launch(selling).json()["id"]
    activate(selling, made)
    with window("member") as watched:
        page = watched.open(f"/console/projects/demo/allocations/{made}")
        tab_to(page, "Restart")
        page.keyboard.press("Enter")
        status = page.get_by_role("status")
        expect(status.filter(has_text="restart under way")).to_be_visible()
        tab_to(page, "Release")
        page.keyboard.press("Enter")
        tab_to_kind(page, "text")
        page.keyboard.type("no more")
        page.keyboard.press("Enter")
        expect(status.filter(has_text="releasing")).to_be_visible()


def test_a_refused_field_is_named_beside_it(selling: Stack, window: Open) -> None:
    """The typed values are kept, as in the steps of a launch."""
    with window("admin") as watched:
        page = watched.open("/console/nodes/new")
        page.get_by_label("Address", exact=True).fill("not an address!")
        page.get_by_label("Region").fill("north")
        page.get_by_role("button", name="Add the node").click()
        wrong = page.get_by_label("Address", exact=True)
        expect(wrong).to_be_focused()
        expect(wrong).to_have_accessible_description(re.compile("should match"))
        expect(wrong).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_role("alert")).to_contain_text("body.address")
        expect(page.get_by_label("Region")).to_have_value("north")
        expect(page).to_have_title(re.compile("^Refused: Add a node"))
        assert judge(page, STANDARDS) == []
        assert [fault for fault in watched.faults if "422" not in fault] == []
        watched.faults.clear()


@pytest.mark.parametrize("scripts", [True, False])
def test_launch_by_keyboard_alone(selling: Stack, window: Open, scripts: bool) -> None:
    with window("member", java_script_enabled=scripts) as watched:
        page = watched.open("/console/projects/demo")
        keys = page.keyboard
        tab_to(page, "Launch")
        keys.press("Enter")
        for step in ("Shape", "Region", "Image and disk"):
            expect(page.get_by_role("heading", name=step)).to_be_visible()
            tab_to_kind(page, "radio")
            keys.press("Space")
            tab_to(page, "Continue")
            keys.press("Enter")
        expect(page.get_by_role("heading", name="Network and SSH")).to_be_visible()
        tab_to_kind(page, "text")
        keys.type("by-keyboard")
        tab_to_kind(page, "textarea")
        keys.type(KEY)
        tab_to(page, "Continue")
        keys.press("Enter")
        expect(page.get_by_role("heading", name="Review")).to_be_visible()
        tab_to(page, "Launch")
        keys.press("Enter")
        expect(page.get_by_role("heading", name="by-keyboard")).to_be_visible()


def test_a_page_refreshes_itself(selling: Stack, window: Open) -> None:
    made = launch(selling).json()["id"]
    with window("member") as watched:
        # The extension for streams loads later than htmx, as it may on a slow line.
        watched.page.route("**/hx-sse-*", lambda route: (time.sleep(1), route.continue_()))
        # The page's own requests every few seconds have no answer, so that only the stream is left,
        # however slow the machine of the test is.
        watched.page.route(
            f"**/allocations/{made}",
            lambda route: (
                route.fulfill(status=204)
                if "hx-request" in route.request.headers
                else route.continue_()
            ),
        )
        page = watched.open(f"/console/projects/demo/allocations/{made}")
        expect(page.get_by_text("Waits", exact=True)).to_be_visible()
        page.get_by_text("Release", exact=True).click()
        reason = page.locator("#actions").get_by_label("Reason")
        reason.fill("no more")
        activate(selling, made)
        expect(page.get_by_text("gate.example")).to_be_visible()
        status = page.get_by_role("status")
        expect(status.get_by_text("active", exact=True)).to_be_visible()
        # The answers to the page's own requests bring the actions that are possible now. Opened
        # forms and typed text stay.
        watched.page.unroute(f"**/allocations/{made}")
        expect(page.get_by_role("button", name="Restart")).to_be_visible()
        expect(page.get_by_text("Open a port").first).to_be_visible()
        expect(page.get_by_role("button", name=re.compile("Release"))).to_be_visible()
        expect(reason).to_have_value("no more")


def test_a_refresh_turns_no_form_into_another(selling: Stack, window: Open) -> None:
    """Neither an open form, nor a tick in a form that is closed again."""
    admin, path = selling.client("admin"), f"admin/nodes/{NODE}"
    gone = launch(selling, hostname="alice").json()["id"]
    activate(selling, gone)
    with window("admin") as watched:
        page = watched.open(f"/console/nodes/{NODE}")
        reboot = page.locator("details", has=page.get_by_text("Reboot the host", exact=True))
        reboot.locator("summary").click()
        reboot.get_by_label("alice of demo").check()
        reboot.locator("summary").click()
        for label in ("Take off sale", "Drain"):
            page.locator("summary", has_text=label).click()
        sale, drain = (
            page.locator("form", has=page.locator(f"[name=_call][value$='/{name}']"))
            for name in ("scheduling", "drain")
        )
        sale.get_by_label("Reason").fill("GPU 3 drops off the bus")
        drain.get_by_label("Reason").fill("a new board")
        with transaction(selling.engine) as conn:
            conn.execute(sa.update(allocations).values(state="released"))
        other = launch(selling, "other", hostname="carol").json()["id"]
        activate(selling, other)
        guard = {"If-Match": f'"{admin.get(path).json()["generation"]}"'}
        assert admin.put(f"{path}/scheduling", json={"enabled": False}, headers=guard).is_success
        boxes = page.locator("[name='allocations:list']")
        expect(boxes).to_have_value(other)
        expect(boxes).not_to_be_checked()
        # The opposite is offered now, closed and without the reason for the other.
        expect(page.locator("summary", has_text="Put on sale")).to_be_visible()
        expect(sale.get_by_label("Reason")).to_have_value("")
        expect(sale.get_by_label("Reason")).not_to_be_visible()
        drain.get_by_role("button").click()
        expect(page.get_by_role("alert")).to_contain_text("generation")
        expect(drain.get_by_label("Reason")).to_have_value("a new board")
        watched.faults.clear()
    assert admin.get(path).json()["state"] == "ready"


def test_a_broken_stream_goes_on_and_a_revoked_session_ends_it(
    selling: Stack, window: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stream._events

    async def cut(*arguments: Any) -> Any:
        """Every connection breaks after an event."""
        async for event in whole(*arguments):
            yield event
            if "Your session" not in event:
                return

    monkeypatch.setattr(stream, "_events", cut)
    monkeypatch.setattr(stream, "_EVERY_S", 0.1)
    task = running(selling)
    with window("admin") as watched:
        places: list[str] = []
        watched.page.on(
            "request", lambda request: places.append(request.headers.get("last-event-id", ""))
        )
        page = watched.open(f"/console/tasks/{task.id}")
        for name in ("measure", "compare", "report"):
            say(selling, task, name)
            expect(page.get_by_text(name, exact=True)).to_have_count(1)
        assert len(set(filter(None, places))) >= 2
        rows = selling.client("admin").get("admin/tokens").json()["items"]
        (token,) = [row["id"] for row in rows if row["name"] == "admin"]
        selling.client("admin").delete(f"admin/tokens/{token}")
        page.get_by_role("link", name="Log in again").click()
        expect(page.get_by_label("Token")).to_be_visible()


@pytest.mark.parametrize("scripts", [True, False])
def test_recovery_with_and_without_scripts(selling: Stack, window: Open, scripts: bool) -> None:
    stuck = launch(selling).json()["id"]
    fail(selling, stuck)
    with window("admin", java_script_enabled=scripts) as watched:
        page = watched.open("/console/fleet")
        page.get_by_role("link", name="Recover").click()
        page.get_by_label("Reason").fill("the guest never answered")
        page.get_by_role("button", name="Recover").click()
        expect(page.get_by_role("button", name="Recover")).to_be_disabled()
        expect(page.get_by_text("the guest never answered")).to_be_visible()


def test_recovery_by_keyboard_alone(selling: Stack, window: Open) -> None:
    stuck = launch(selling).json()["id"]
    fail(selling, stuck)
    with window("admin") as watched:
        page = watched.open("/console/fleet")
        tab_to(page, "Recover")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Runbook")).to_be_visible()
        tab_to_kind(page, "text")
        page.keyboard.type("the guest never answered")
        tab_to(page, "Recover")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Recover")).to_be_disabled()
        expect(page.get_by_text("the guest never answered")).to_be_visible()
    case = selling.client("admin").get(f"admin/allocations/{stuck}/recovery").json()
    assert case["reason"] == "the guest never answered"


def test_a_hostile_recording_is_replayed_by_keyboard(selling: Stack, window: Open) -> None:
    mine = recorded(selling, launch(selling).json()["id"])
    link = "\x1b]8;;https://elsewhere.example\x07click\x1b]8;;\x07"
    lines: list[Any] = [
        {"version": 2, "width": 60, "height": 10},
        [0.5, "o", f"<img src=https://elsewhere.example> {link}\r\n"],
        [0.6, "r", "1000000x1000000"],
        [0.7, "i", "typed"],
        [9000.0, "o", "\x1b[c\x1b]52;c;eA==\x07the end"],
    ]
    cast = "\n".join(["</pre><script>alert(1)</script>", *map(json.dumps, lines)])
    with transaction(selling.engine) as conn:
        conn.execute(sa.delete(terminal_recordings))
        terminals.append(conn, mine, "demo", cast)
        terminals.finish(conn, mine, "d" * 64)
    with window("admin", **STILL) as watched:
        page = watched.open("/console/projects/demo/ssh")
        page.get_by_role("link", name="recorded").click()
        page.get_by_label("Reason").fill("incident 7")
        page.keyboard.press("Enter")
        screen = page.locator(".xterm-rows")
        position = page.get_by_label("Position in seconds")
        play = page.get_by_role("button", name="Play")
        expect(play).to_be_enabled()
        play.focus()
        page.keyboard.press("Space")
        # The silence of two hours is not waited for.
        expect(screen).to_contain_text("the end")
        expect(play).to_be_focused()
        text = screen.inner_text()
        assert "<img src=https://elsewhere.example> click" in text and "typed" not in text
        page.on("dialog", lambda dialog: watched.faults.append(dialog.message) or dialog.dismiss())
        screen.get_by_text("click").hover(force=True)
        screen.get_by_text("click").click(force=True)
        position.focus()
        page.keyboard.press("Home")
        expect(screen).not_to_contain_text("the end")
        page.keyboard.press("End")
        expect(screen).to_contain_text("the end")
        assert examine(page, "admin-sessions-replay") == []
        assert len(watched.context.pages) == 1


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_another_origin_cannot_send_a_form(selling: Stack, window: Open, name: str) -> None:
    """To another port the cookie is sent, whatever SameSite says; to another name it is not."""
    with window("admin") as watched:
        page = watched.page
        form = (
            f'<form method="post" action="{watched.site}/console/fleet">'
            '<input name="_call" value="PUT /admin/settings/slice-scheduling">'
            '<input name="enabled:bool" value="false"><input name="reason" value="evil">'
            "<button>go</button></form>"
        )
        port = int(watched.site.rsplit(":", 1)[1]) - 1
        other = f"http://{name}:{port}/"
        page.route(other, lambda route: route.fulfill(body=form, content_type="text/html"))
        page.goto(other)
        page.get_by_role("button").click()
        expect(page.get_by_text("origin_refused")).to_be_visible()
        watched.faults.clear()
    on = selling.client("admin").get("admin/settings/slice-scheduling").json()
    assert on == {"enabled": True}


def tab_to(page: Page, text: str) -> None:
    """Press Tab until an element with this text has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == text:
            return
    raise AssertionError(f"no way to {text} by the keyboard")


def tab_to_kind(page: Page, kind: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") == kind:
            return
    raise AssertionError(f"no way to a field of the kind {kind} by the keyboard")
