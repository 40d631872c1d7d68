"""The recovery policy's judgement: every move, and that nothing is tried twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reconciler.model.recovery import Move, Policy, Seen, next_move

pytestmark = pytest.mark.covers("CTRL-7")

ON = Policy(enabled=True)
LOOKED: dict[str, Any] = {
    "blocked_since": 10.0,
    "begun_at": 20.0,
    "absent": True,
    "observed_at": 30.0,
}


@pytest.mark.parametrize(
    ("seen", "move", "why"),
    [
        ({}, Move.LOOK, "blocked"),
        ({"busy": True}, Move.WAIT, "has not ended"),
        ({"node_begun": 1}, Move.WAIT, "on the node"),
        ({"site_begun": 4}, Move.WAIT, "on the site"),
        ({"begun_at": 20.0, "busy": True}, Move.WAIT, "has not ended"),
        ({"begun_at": 20.0}, Move.STOP, "did not say"),
        # What the host said before is about another time.
        (LOOKED | {"observed_at": 19.0}, Move.STOP, "did not say"),
        (LOOKED | {"node_begun": 1}, Move.CLEAN, "nothing of it is left"),
        (LOOKED | {"absent": False}, Move.STOP, "still holds"),
        (LOOKED | {"blocked_since": 25.0}, Move.STOP, "come back: disk gone"),
    ],
)
def test_moves(seen: dict[str, Any], move: Move, why: str) -> None:
    given: dict[str, Any] = {"blocked_since": 10.0, "reason": "disk gone"} | seen
    found, told = next_move(ON, Seen(**given))
    assert (found, why in told) == (move, True), told


def test_leftovers_only_where_the_site_says_so() -> None:
    left = replace(Seen(**LOOKED, reason=""), absent=False)
    assert next_move(Policy(enabled=True, remove_leftovers=True), left)[0] == Move.CLEAN


def test_it_is_off_by_default() -> None:
    assert not Policy().enabled
    assert not Policy().remove_leftovers
