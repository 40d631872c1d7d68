"""The steps of the recovery runbook, each with its state and its evidence, as a page shows them."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.console.visit import Document
from reconciler.model.states import RecoveryState

# Title, explanation, and the names under which the case records the step's evidence.
_STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Record what is blocked",
        "The allocation, and the state of its slots and disks.",
        ("allocation", "inventory"),
    ),
    (
        "Ask the host what is left",
        "A run that may still be alive is ended before.",
        ("run_canceled", "runtime_absence", "disk_evidence"),
    ),
    (
        "Clean up",
        "What is left is removed, and the disks are wiped and verified.",
        ("force_cleanup", "repair"),
    ),
    (
        "Ask the host again",
        "Only when the clean-up began without the host's word that nothing was left.",
        ("runtime_absence_after",),
    ),
    (
        "Prove the slots clean",
        "The state of each slot, the proof of its disk, and why a clean slot is not on sale.",
        ("inventory_after", "disk_evidence_after", "audit", "not_on_sale"),
    ),
)
_ASK, _CLEAN, _ASK_AGAIN = 1, 2, 3
# The step that a case plays in each of its states.
_PLAYED = {
    RecoveryState.OPENED: _ASK,
    RecoveryState.VERIFYING: _ASK,
    RecoveryState.CLEANING: _CLEAN,
    RecoveryState.CONFIRMING: _ASK_AGAIN,
    RecoveryState.RECOVERED: len(_STEPS),
}


@dataclass(frozen=True)
class Step:
    """A step of the runbook. state: done, running, failed, to come, not reached or not needed."""

    title: str
    text: str
    state: str
    evidence: list[Document]


def steps(case: Document | None) -> list[Step]:
    """All steps of the runbook, for the answer of the API about a case; None before the first."""
    recorded = case["steps"] if case else []
    evidence = [[row for row in recorded if row["step"] in names] for _, _, names in _STEPS]
    states = _states(case, evidence) if case else ["to come"] * len(_STEPS)
    return [
        Step(title, text, state, rows)
        for (title, text, _), state, rows in zip(_STEPS, states, evidence, strict=True)
    ]


def _states(case: Document, evidence: list[list[Document]]) -> list[str]:
    failed_in = case["failed_in"]
    played = _PLAYED[failed_in or case["state"]]
    # The host has answered, so that the case failed by what comes next.
    if failed_in and played in (_ASK, _ASK_AGAIN) and evidence[played]:
        played += 1
    now = "failed" if failed_in else "running"
    if case["state"] == RecoveryState.OPENED:
        now = "to come"
    states = []
    for number, rows in enumerate(evidence):
        if number < played:
            state = "done"
        elif number == played:
            state = now
        elif failed_in:
            # The last step is also recorded for slots that did not come back.
            state = "failed" if rows else "not reached"
        else:
            state = "to come"
        states.append(state)
    cleaned = {row["step"] for row in evidence[_CLEAN]}
    if cleaned and "repair" not in cleaned:
        states[_ASK_AGAIN] = "not needed"
    return states
