"""Command gate, through which every program is run."""

from __future__ import annotations

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


@pytest.mark.covers("HOST-9")
def test_what_a_refusal_says_of_a_call_can_be_written_down_anywhere() -> None:
    with pytest.raises(Refusal) as caught:
        _command.run(["false", "/d\udce9"])
    assert caught.value.expected == "`false /d\\xe9` to exit with 0"
