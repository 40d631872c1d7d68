"""Guard against turning a machine into a slice host while a tenant holds it as a whole.

The reconciler never requests that, but a person with a shell, AWX or cloud-init may.
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
    """inner: state of the guarded subject. taken: reasons against a change."""

    inner: Any
    taken: tuple[Refusal, ...]


def refusals() -> list[Refusal]:
    """Reasons against taking devices from a tenant: an allocation holds the whole machine."""
    return _ledger.machine_taken("")


def guarded(
    subject: _change.Subject, concerns: Callable[[Params, _change.Plan], bool]
) -> _change.Subject:
    """`subject`, refused while a tenant has the whole machine.

    concerns: selects the guarded calls. Calls that take devices for slices are guarded even without
    an open step, because the caller would continue from there. Calls that give devices back are
    guarded when they would act.
    """

    def observe(params: Params) -> State:
        return State(subject.observe(params), tuple(refusals()))

    def plan(params: Params, state: State) -> _change.Plan:
        whole = subject.plan(params, state.inner)
        taken = state.taken if concerns(params, whole) else ()
        return replace(whole, blockers=(*taken, *whole.blockers))

    def facts(params: Params, state: State) -> dict[str, Any]:
        return subject.facts(params, state.inner)

    def forecast(params: Params, state: State) -> State:
        return replace(state, inner=subject.forecast(params, state.inner))

    return replace(subject, observe=observe, plan=plan, facts=facts, forecast=forecast)
