"""Stand-in for Open vSwitch, nft and iptables (tests/standin/switch.py) behind `_command.run`."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

from tests.standin.switch import PROGRAMS, Switch

__all__ = ["PROGRAMS", "FakeSwitch"]


class FakeSwitch(Switch):
    """`run` takes the place of `_command.run` for PROGRAMS."""

    def add_bridge(self, name: str = "ovsbr0") -> None:
        """A slice bridge without any flow, which forwards nothing."""
        self.run(["ovs-vsctl", "add-br", name, "--", "set-fail-mode", name, "secure"])

    def run(
        self,
        argv: Sequence[str],
        *,
        ok: Sequence[int] = (0,),
        stdin: str | None = None,
        timeout: float = 60,
    ) -> _command.Result:
        result = _command.Result(*self.answer(argv, stdin))
        if result.rc not in ok:
            found = f"exit {result.rc}: {result.err.strip()}"
            raise Refusal("command_failed", expected=f"exit {ok}", found=found, remedy="")
        return result
