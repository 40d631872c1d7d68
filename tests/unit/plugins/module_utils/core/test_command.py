"""Command gate, through which every program is run."""

from __future__ import annotations

import gc
import time
import warnings
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


@pytest.mark.covers("HOST-9")
def test_what_a_refusal_says_of_a_call_can_be_written_down_anywhere() -> None:
    with pytest.raises(Refusal) as caught:
        _command.run(["false", "/d\udce9"])
    assert caught.value.expected == "`false /d\\xe9` to exit with 0"


def test_a_program_that_cannot_be_killed_is_left_behind_at_its_deadline(
    silent_mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead disk or file server holds a program in the kernel, which no signal reaches."""
    monkeypatch.setattr(_command, "_END_S", 0.2)
    begin, error = time.monotonic(), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            _command.run(["stat", "--", f"{silent_mount}/file"], timeout=0.5)
        except Refusal as refusal:
            error = f"{refusal.code}: {refusal.found}"
        gc.collect()
    assert time.monotonic() - begin < 30
    assert error == "command_hung: still running; it cannot be killed and its effect is unknown"


def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    pid.touch()
    # A busy machine may not get as far as the number in a short time.
    for limit_s in (0.5, 5.0, 50.0):
        with pytest.raises(Refusal) as caught:
            _command.run(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], timeout=limit_s)
        assert caught.value.found == "still running; it was killed and its effect is unknown"
        if pid.read_text():
            break
    child = Path(f"/proc/{pid.read_text().strip()}/stat")
    end = time.monotonic() + 60
    # Its new parent may not have collected it.
    while child.exists() and ") Z " not in child.read_text():
        assert time.monotonic() < end, "still running"
        time.sleep(0.02)
