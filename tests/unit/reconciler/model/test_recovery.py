"""Judgement of recovery: every move of a case, and that the policy tries nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.model.recovery import Blocked, Move, Policy, Progress, next_move, policy_move
from reconciler.model.states import OPEN_CASES, RecoveryState

pytestmark = pytest.mark.covers("CTRL-7")

ON = Policy(enabled=True)
OPENED, VERIFYING, CLEANING, CONFIRMING = OPEN_CASES


@pytest.mark.parametrize(
    ("seen", "move", "why"),
    [
        ({}, Move.LOOK, "blocked"),
        ({"busy": True}, Move.WAIT, "has not ended"),
        ({"node_begun": 1}, Move.WAIT, "on the node"),
        ({"site_begun": 4}, Move.WAIT, "on the site"),
        ({"node_begun": 1, "site_begun": 4, "by_tenant": True}, Move.LOOK, "blocked"),
        ({"tried": True, "by_tenant": True}, Move.STOP, "come back: disk gone"),
        ({"kept": "admin:alice: why"}, Move.WAIT, "kept for inspection: admin:alice: why"),
        ({"case": "verifying", "tried": True}, Move.WAIT, "is verifying"),
        ({"tried": True}, Move.STOP, "come back: disk gone"),
        ({"tried": True, "kept": "alice: why"}, Move.WAIT, "kept for inspection"),
    ],
)
def test_moves_of_the_policy(seen: dict[str, Any], move: Move, why: str) -> None:
    chosen, reason = policy_move(ON, Blocked(**{"reason": "disk gone"} | seen))
    assert (chosen, why in reason) == (move, True), reason


@pytest.mark.parametrize(
    ("state", "seen", "move", "why"),
    [
        (OPENED, {}, Move.LOOK, "asked"),
        (VERIFYING, {"look_open": True}, Move.WAIT, "has not answered"),
        # Also while an older report says something.
        (VERIFYING, {"look_open": True, "absent": True}, Move.WAIT, "has not answered"),
        (VERIFYING, {}, Move.STOP, "did not say"),
        (VERIFYING, {"absent": True}, Move.CLEAN, "nothing of it is left"),
        (VERIFYING, {"absent": False}, Move.STOP, "still holds"),
        (VERIFYING, {"absent": False, "remove_leftovers": True}, Move.CLEAN, "is removed"),
        (CLEANING, {"cleaning": True, "stuck": "disk gone"}, Move.WAIT, "wiped"),
        (CLEANING, {"confirm": True}, Move.LOOK, "again"),
        (CLEANING, {"stuck": "disk gone"}, Move.STOP, "come back: disk gone"),
        (CLEANING, {}, Move.FINISH, "proven clean"),
        (CONFIRMING, {"look_open": True}, Move.WAIT, "has not answered"),
        (CONFIRMING, {}, Move.STOP, "did not say"),
        (CONFIRMING, {"absent": True, "stuck": "disk gone"}, Move.STOP, "come back"),
        (CONFIRMING, {"absent": True}, Move.FINISH, "proven clean"),
        (CONFIRMING, {"absent": False}, Move.STOP, "still holds"),
        (CONFIRMING, {"absent": False, "stuck": "disk gone"}, Move.STOP, "come back"),
        # It may have spoken of the machine of another allocation.
        (CONFIRMING, {"absent": False, "resold": True}, Move.FINISH, "proven clean"),
    ],
)
def test_moves_of_a_case(state: RecoveryState, seen: dict[str, Any], move: Move, why: str) -> None:
    chosen, reason = next_move(Progress(state=state, **seen))
    assert (chosen, why in reason) == (move, True), reason


def test_it_is_off_by_default() -> None:
    assert not Policy().enabled
    assert Policy().tenant_failures, "their clean-up is that of a release"
    assert not Policy().remove_leftovers
