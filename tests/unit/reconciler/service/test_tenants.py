"""Tenants of the crash tests: they stop waiting without an answer, and hide no failure."""

from __future__ import annotations

import pytest

from tests.unit.reconciler.service import tenants

NOBODY = "http://127.0.0.1:1"


def test_without_an_answer_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "LIMIT_S", 0.1)
    wait = pytest.raises(TimeoutError, match=r"POST .*: no answer in 0.1 s, last ConnectError")
    with wait, tenants.Tenants(NOBODY, "token"):
        pass


def test_what_failed_before_is_what_is_seen() -> None:
    """And at once: within the limit, if the service were waited for, this would take a minute."""
    failed, waits = pytest.raises(ValueError, match="the first"), tenants.Tenants(NOBODY, "token")
    with failed, waits:
        waits.launched["key"] = "never asked again"
        raise ValueError("the first")
