"""The console over a prepared site, and a browser without scripts for each role."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI

from reconciler.api.app import create_app
from reconciler.api.catalog import AnswerCache
from reconciler.api.security import Rates
from reconciler.console.app import mount
from tests.unit.reconciler.api.conftest import databases, selling
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.console.browser import Browser

__all__ = ["databases", "selling"]


@pytest.fixture(scope="session")
def application() -> Iterator[list[FastAPI]]:
    """The application of all tests; building it takes time."""
    yield []


@pytest.fixture
def console(selling: Stack, application: list[FastAPI]) -> FastAPI:
    """The console on the database of this test."""
    if not application:
        application.append(mount(create_app(selling.settings, selling.engine)))
    (app,) = application
    app.state.availability, app.state.rates = AnswerCache(), Rates()
    app.state.settings, app.state.engine = selling.settings, selling.engine
    return app


@pytest.fixture
def browse(selling: Stack, console: FastAPI) -> Callable[[str], Browser]:
    """A browser that is logged in as admin, member or stranger; "" is not logged in."""

    def open_as(who: str) -> Browser:
        browser = Browser(console)
        if who:
            assert browser.log_in(selling.secrets[who]).status_code == 303
        return browser

    return open_as
