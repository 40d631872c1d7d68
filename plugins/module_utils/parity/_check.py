"""Parity check with its verdict, its remedy and the report line of its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._report_line import report_line

Facts = TypeVar("Facts")

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"

# Longest detail in characters, so that a host that answers with megabytes cannot fill a record.
_LONGEST = 2000


@dataclass(frozen=True)
class Verdict:
    status: str
    detail: str


def passed(detail: str) -> Verdict:
    return Verdict(PASS, detail)


def warned(detail: str) -> Verdict:
    return Verdict(WARN, detail)


def failed(detail: str) -> Verdict:
    return Verdict(FAIL, detail)


def verdict(problems: Sequence[str], fine: str, doubts: Sequence[str] = ()) -> Verdict:
    """FAIL with all problems, WARN when there are only doubts, otherwise PASS with `fine`."""
    if problems or doubts:
        return Verdict(FAIL if problems else WARN, "; ".join([*problems, *doubts]))
    return passed(fine)


@dataclass(frozen=True)
class Remedy:
    """Remedy for a failed condition.

    playbook: the playbook to run, or "" when a person must act. role: the role that the parity
    playbook may run by itself (`slice_remediate`), or "" when approval, a firmware setting or the
    reconciler is needed.
    """

    text: str
    playbook: str = ""
    role: str = ""


@dataclass(frozen=True)
class Check(Generic[Facts]):
    """One target condition of a host.

    examine: the condition on a slice host. baremetal: the condition on a bare-metal host; None when
    it does not matter there. restore: the remedy on bare metal; None when it is the same. soft: a
    failure is a warning. begin: starts in the background what `examine` waits for. Checks that
    see what it changes have the same one.
    """

    name: str
    examine: Callable[[Facts], Verdict]
    remedy: Remedy
    baremetal: Callable[[Facts], Verdict] | None = None
    restore: Remedy | None = None
    soft: bool = False
    begin: Callable[[Facts], None] | None = None


def evaluate(
    checks: Sequence[Check[Facts]], facts: Facts, *, intent: str, not_applicable: Sequence[str]
) -> list[dict[str, str]]:
    """Run every check once. A check that cannot read the host fails; it never passes by
    accident.

    One after the other, beside what `begin` starts. Threads for more of them would not end sooner
    on a host with two processors, and the checks need not mind each other.
    """
    outcomes, waiting = {}, []
    for check in checks:
        if check.begin and intent == "slice" and check.name not in not_applicable:
            check.begin(facts)
            waiting.append(check)
    for check in (*(check for check in checks if check not in waiting), *waiting):
        outcomes[check.name] = _outcome(check, facts, intent, check.name in not_applicable)
    return [outcomes[check.name] for check in checks]


def _outcome(check: Check[Facts], facts: Facts, intent: str, exempt: bool) -> dict[str, str]:
    examine = check.examine if intent == "slice" else check.baremetal
    remedy = check.remedy if intent == "slice" else check.restore or check.remedy
    if exempt:
        result = passed("not_applicable")
    elif examine is None:
        result = passed("not_required_for_baremetal")
    else:
        result = _look(examine, facts)
    if check.soft and result.status == FAIL:
        result = warned(result.detail)
    if result.status == PASS:
        remedy = Remedy("")
    return {
        "check": check.name,
        "status": result.status,
        "detail": result.detail[:_LONGEST],
        "remediation": remedy.text,
        "playbook": remedy.playbook,
        "role": remedy.role,
    }


def _look(examine: Callable[[Facts], Verdict], facts: Facts) -> Verdict:
    try:
        return examine(facts)
    except Refusal as refusal:
        return failed(f"{refusal.code}: {refusal.found}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        return failed(f"the check could not look: {type(problem).__name__}: {problem}")


def report(outcomes: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Counts and report lines; the last line is the summary."""
    failures = sum(outcome["status"] == FAIL for outcome in outcomes)
    warnings = sum(outcome["status"] == WARN for outcome in outcomes)
    status = FAIL if failures else WARN if warnings else PASS
    summary = (
        f"GPUAAS_SLICE_PARITY_SUMMARY status={status} checks={len(outcomes)} "
        f"failures={failures} warnings={warnings}"
    )
    return {
        "failures": failures,
        "warnings": warnings,
        "checks": list(outcomes),
        "lines": [*(line(outcome) for outcome in outcomes), summary],
        "summary": summary,
    }


def line(outcome: dict[str, str]) -> str:
    """Report line of one check: always exactly one line, whatever the host returns."""
    fields = {key: outcome[key] for key in ("status", "check", "detail")}
    if outcome["remediation"]:
        fields["remediation"] = outcome["remediation"]
    return report_line("GPUAAS_SLICE_PARITY", **fields)
