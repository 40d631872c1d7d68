"""Guard of a machine that one tenant holds as a whole against becoming a slice host.

The reconciler does not ask for that; a person with a shell, AWX or cloud-init may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

Params = _change.Params


@dataclass(frozen=True)
class State:
    """found: of the subject that is guarded. taken: why it must not be touched."""

    found: Any
    taken: tuple[Refusal, ...]


def refusals() -> list[Refusal]:
    """Why nothing may be taken from under somebody: an allocation has all of this machine."""
    return _ledger.machine_taken("")


def guarded(
    subject: _change.Subject, concerns: Callable[[Params, _change.Plan], bool]
) -> _change.Subject:
    """`subject`, refused while a tenant has the whole machine.

    concerns: which calls. Those that take something for slices do, also when nothing is left to do:
    whoever asked would go on from there. Those that give back do when they would act.
    """

    def observe(params: Params) -> State:
        return State(subject.observe(params), tuple(refusals()))

    def plan(params: Params, state: State) -> _change.Plan:
        whole = subject.plan(params, state.found)
        taken = state.taken if concerns(params, whole) else ()
        return _change.Plan(whole.steps, (*taken, *whole.blockers))

    def facts(params: Params, state: State) -> dict[str, Any]:
        return subject.facts(params, state.found)

    def forecast(params: Params, state: State) -> State:
        return replace(state, found=subject.forecast(params, state.found))

    return replace(subject, observe=observe, plan=plan, facts=facts, forecast=forecast)
