"""Record of the repairs on a host, as its guardians write it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _host,
    _repairs,
)

pytestmark = pytest.mark.covers("SLICE-8")


class Over(Exception):
    """The end of a guardian, which otherwise never ends."""


def guard(*rounds: list[str]) -> None:
    """A guardian that needs these steps in its rounds."""

    def restore(_settings: dict[str, Any], turn: int) -> Iterator[str]:
        if turn == len(rounds):
            raise Over
        yield from rounds[turn]

    with pytest.raises(Over):
        _boot_service.watch("/settings", restore, trouble="", sleep=lambda _s: None)


def test_a_guardians_repairs_are_counted_with_their_times(tree: Path) -> None:
    guard(["add_nat nat rule"], [], ["forward_ipv4 x", "add_nat nat rule"])
    first, second = _repairs.read()
    assert (first["step"], first["times"]) == ("forward_ipv4 x", 1)
    assert (second["step"], second["times"]) == ("add_nat nat rule", 2)
    assert second["first_at"] < first["last_at"] < second["last_at"]


def test_the_record_is_bounded_and_keeps_the_latest(tree: Path) -> None:
    _repairs.note([f"step {number}" for number in range(60)])
    assert [row["step"] for row in _repairs.read()] == [f"step {n}" for n in range(10, 60)]


@pytest.mark.parametrize("text", ["{", "[1]", '[{"step": "x"}]', "7"])
def test_a_damaged_record_is_written_anew(tree: Path, text: str) -> None:
    _host.write(_repairs.RECORD, text)
    assert _repairs.read() == []
    _repairs.note(["add_nat nat rule"])
    assert len(_repairs.read()) == 1


def test_a_record_that_cannot_be_written_stops_no_repair(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_host, "write", full)
    guard(["add_nat nat rule"], ["add_nat nat rule"])
