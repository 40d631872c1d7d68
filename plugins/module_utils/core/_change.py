"""Driver of every module: observe, plan, apply, verify.

`check_mode` is evaluated only here in the whole collection. *changed*, *diff* and the actions come
from the same plan, so they cannot disagree.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

State = TypeVar("State")
Params = Mapping[str, Any]
# Environment variable in which playbooks pass the node id of the run, and its value in a run by
# hand on a host without a record.
RUN_NODE = "GPUAAS_RUN_NODE"
_BY_HAND = "by-hand"


@dataclass(frozen=True)
class Step:
    """An action of a plan.

    name: stable verb_noun, for example `stop_domain`; a step must be safe to do twice. subject: the
    object of the action; the key of its entry in the diff. before, after: JSON values for the diff.
    destroys: identity of the data that is lost when the step runs, or None. soft: an optional step,
    whose failure is reported as a doubt and does not fail the run. Soft steps come last, so that no
    other step waits for them.
    """

    name: str
    subject: str
    before: Any = None
    after: Any = None
    destroys: str | None = None
    soft: bool = False

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "before": self.before,
            "after": self.after,
            "destroys": self.destroys,
        }


@dataclass(frozen=True)
class Plan:
    """Planned steps. With a blocker no step runs: a blocker is never a warning.

    doubts: missing optional parts that no step can provide.
    """

    steps: tuple[Step, ...] = ()
    blockers: tuple[Refusal, ...] = ()
    doubts: tuple[Refusal, ...] = ()


@dataclass
class Outcome:
    """Result of a drive; `failure` is None when every step is done and verified.

    doubts: reasons for missing optional parts; they cause no failure. failed_part: name of the part
    that failed, if several subjects were driven.
    """

    plan: Plan
    changed: bool = False
    steps_done: list[Step] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: Refusal | None = None
    failed_step: str | None = None
    doubts: list[Refusal] = field(default_factory=list)
    failed_part: str | None = None

    @property
    def done(self) -> list[str]:
        """Names of the completed steps, in order."""
        return [step.name for step in self.steps_done]

    def document(self) -> dict[str, Any]:
        steps = self.plan.steps
        return {
            "changed": self.changed,
            "plan": [step.document() for step in steps],
            "done": self.done,
            "evidence": self.evidence,
            "diff": {
                "before": {step.subject: step.before for step in steps},
                "after": {step.subject: step.after for step in steps},
            },
            **self.facts,
        }


@dataclass(frozen=True)
class Subject:
    """A module's functions; `plan` is pure over parameters and state.

    apply returns evidence (a JSON object) for its step or None. facts turns the last observed state
    into return values of the module. forecast predicts that state after the plan, for the facts of
    check mode. exclusive is a lock on this host from the first read to the last, for plans that two
    runs must not make from the same state. Check mode takes no lock, because it changes nothing.
    recover undoes the completed steps when a later step is refused. It returns the refusal with the
    restored and the lost parts.
    """

    observe: Callable[[Params], Any]
    plan: Callable[[Params, Any], Plan]
    apply: Callable[[Params, Step], dict[str, Any] | None]
    facts: Callable[[Params, Any], dict[str, Any]] = lambda _params, _state: {}
    forecast: Callable[[Params, Any], Any] = lambda _params, state: state
    exclusive: Callable[[Params], AbstractContextManager[object]] = lambda _params: (
        contextlib.nullcontext()
    )
    recover: Callable[[Params, Sequence[Step], Step, Refusal], Refusal] = (
        lambda _params, _done, _failed, refusal: refusal
    )


@dataclass(frozen=True)
class Part:
    """A subject that a module brings to its state, in the order of its parts.

    name: stable verb_noun, by which its failure is reported. params: its own parameters, from those
    of the module and the facts of the parts before it.
    """

    name: str
    subject: Subject
    params: Callable[[Params, Mapping[str, Any]], Params]


def drive_parts(parts: Sequence[Part], params: Params, *, check_mode: bool) -> Outcome:
    """Drive each part to its end, and none after a part that fails.

    Each part observes, checks its fences and verifies as in a module of its own. Completed parts
    stay, as the completed tasks of a playbook do.
    """
    whole = Outcome(plan=Plan())
    for part in parts:
        try:
            given = part.params(params, whole.facts)
            outcome = drive(part.subject, given, check_mode=check_mode)
        except (Refusal, OSError, ValueError) as problem:
            outcome = Outcome(plan=Plan(), failure=_as_refusal(part.name, problem))
        whole = Outcome(
            plan=Plan((*whole.plan.steps, *outcome.plan.steps), outcome.plan.blockers),
            changed=whole.changed or outcome.changed,
            steps_done=[*whole.steps_done, *outcome.steps_done],
            evidence={**whole.evidence, **outcome.evidence},
            facts={**whole.facts, **outcome.facts},
            failure=outcome.failure,
            failed_step=outcome.failed_step,
            doubts=[*whole.doubts, *outcome.doubts],
            failed_part=part.name if outcome.failure else None,
        )
        if outcome.failure is not None:
            break
    return whole


def drive(subject: Subject, params: Params, *, check_mode: bool) -> Outcome:
    """Bring the host to the state in `params`, or return the reason why not."""
    with contextlib.nullcontext() if check_mode else subject.exclusive(params):
        return _drive(subject, params, check_mode=check_mode)


def _drive(subject: Subject, params: Params, *, check_mode: bool) -> Outcome:
    state = subject.observe(params)
    outcome = Outcome(plan=subject.plan(params, state))
    outcome.doubts = list(outcome.plan.doubts)
    foretold = check_mode and not outcome.plan.blockers
    shown = subject.forecast(params, state) if foretold else state
    outcome.facts = subject.facts(params, shown)
    if outcome.plan.blockers:
        outcome.failure = outcome.plan.blockers[0]
        return outcome
    outcome.changed = bool(outcome.plan.steps)
    if check_mode or not outcome.plan.steps:
        return outcome

    outcome.changed = False
    reported: list[Refusal] = []
    for step in outcome.plan.steps:
        try:
            evidence = subject.apply(params, step)
        except (Refusal, OSError, ValueError) as problem:
            refusal = _as_refusal(f"{step.name} of {step.subject}", problem)
            # The step may have acted before it failed, so the host counts as changed.
            outcome.changed = True
            if step.soft:
                reported.append(refusal)
                continue
            outcome.failure = subject.recover(params, outcome.steps_done, step, refusal)
            outcome.failed_step = step.name
            # The state read before the first action is no longer valid; it is kept only if a new
            # read fails.
            with contextlib.suppress(Refusal, OSError, ValueError):
                outcome.facts = subject.facts(params, subject.observe(params))
            return outcome
        outcome.changed = True
        outcome.steps_done.append(step)
        if evidence is not None:
            outcome.evidence[step.name] = evidence
    try:
        _verify(subject, params, outcome, reported)
    except (Refusal, OSError, ValueError) as problem:
        outcome.failure, outcome.failed_step = _as_refusal("the second read", problem), "verify"
        # The steps are done. What was read before them is no fact any more.
        outcome.facts = {}
        outcome.doubts = [*reported, *outcome.doubts]
    return outcome


def _as_refusal(about: str, problem: Exception) -> Refusal:
    """A system error as a refusal, so that completed steps are restored after it too."""
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, PermissionError) and os.geteuid() != 0:
        return _root_required(problem)
    frames = traceback.extract_tb(problem.__traceback__)
    plugin_frames = [frame for frame in frames if "/plugins/" in frame.filename] or frames
    where = f"{plugin_frames[-1].filename.rpartition('/')[2]}:{plugin_frames[-1].lineno}"
    return Refusal(
        "system_error",
        expected=f"{about} to be done",
        found=f"{type(problem).__name__}: {problem} ({where})",
        remedy="repair the cause that the system names, then run again",
    )


def _verify(subject: Subject, params: Params, outcome: Outcome, reported: list[Refusal]) -> None:
    """A change counts only when a second read leaves no open step."""
    state = subject.observe(params)
    outcome.facts = subject.facts(params, state)
    rest = subject.plan(params, state)
    if rest.blockers:
        outcome.failure, outcome.failed_step = rest.blockers[0], "verify"
    elif left := [step for step in rest.steps if not step.soft]:
        outcome.failure, outcome.failed_step = _still_open(left), "verify"
    # A soft step's own message is not repeated.
    doubts = [
        *reported,
        *(doubt for doubt in rest.doubts if doubt.code not in {d.code for d in reported}),
    ]
    soft = [step for step in rest.steps if step.soft]
    outcome.doubts = doubts or ([_still_open(soft)] if soft else [])


def _still_open(steps: Sequence[Step]) -> Refusal:
    left = ", ".join(f"{step.name}({step.subject})" for step in steps)
    return Refusal(
        "verify_failed",
        expected="nothing left to do after the change",
        found=f"still open: {left}",
        remedy="read the evidence of the steps; the host did not take the change",
    )


# Of what modules create.
UMASK = 0o022


def run(module: Any, subject: Subject) -> None:
    """Drive `subject` for an AnsibleModule and leave through exit_json or fail_json."""
    _run(module, lambda: drive(subject, module.params, check_mode=module.check_mode))


def run_parts(module: Any, parts: Sequence[Part]) -> None:
    """As `run`, for several parts; a failure names its part."""
    _run(module, lambda: drive_parts(parts, module.params, check_mode=module.check_mode))


def _run(module: Any, work: Callable[[], Outcome]) -> None:
    # A host may give root's logins a narrower one, by which services could not read our folders.
    os.umask(UMASK)
    try:
        with _as_root():
            answered_by = refuse_wrong_node()
            outcome = work()
    except Refusal as refusal:
        module.fail_json(msg=str(refusal), error=refusal.document(), changed=False)
        return
    document = {**outcome.document(), **answered_by}
    for doubt in outcome.doubts:
        module.warn(str(doubt))
    if outcome.failure is None:
        module.exit_json(**document)
        return
    module.fail_json(
        msg=str(outcome.failure),
        error=outcome.failure.document(),
        blockers=[blocker.document() for blocker in outcome.plan.blockers],
        failed_step=outcome.failed_step,
        **({"part": outcome.failed_part} if outcome.failed_part else {}),
        **document,
    )


@contextlib.contextmanager
def _as_root() -> Iterator[None]:
    """Name the reason where a file is closed to a user who is not root."""
    try:
        yield
    except PermissionError as denied:
        if os.geteuid() == 0:
            raise
        raise _root_required(denied) from denied


def _root_required(denied: PermissionError) -> Refusal:
    return Refusal(
        "root_required",
        expected="root on the host",
        found=f"user {os.geteuid()}: {denied}",
        remedy="pass -b, or set ansible_become in the inventory",
    )


def refuse_wrong_node() -> dict[str, str]:
    """Refuse a run that names another node than the one this host enrolled as.

    Returns the node id for the module's answer, in which the reconciler looks for another node. A
    host that never enrolled has none and refuses nothing; nor does it refuse a run by hand.
    """
    node_id, enrolled = os.environ.get(RUN_NODE, ""), _host.node_id()
    if enrolled and node_id not in ("", _BY_HAND, enrolled):
        raise Refusal(
            "wrong_node",
            expected=f"a run for {enrolled}, as which this host enrolled",
            found=f"a run for {node_id}",
            remedy="compare the node's address in the records with this host; nothing was done",
        )
    return {"answered_by": enrolled} if enrolled else {}


def inform(module: Any, look: Callable[[Params], dict[str, Any]]) -> None:
    """Run a read-only module: `look` returns its values."""
    attend(module, lambda params, _once: (look(params), None))


def attend(
    module: Any, watch: Callable[[Params, bool], tuple[dict[str, Any], Refusal | None]]
) -> None:
    """Run a read-only module that waits for a condition; in check mode `watch` reads once.

    watch returns the module's values, and the refusal if the condition is not met, or None. A
    failure returns the values too, because they are its evidence.
    """
    try:
        with _as_root():
            answered_by = refuse_wrong_node()
            facts, refusal = watch(module.params, module.check_mode)
        facts = {**facts, **answered_by}
    except Refusal as invalid:
        facts, refusal = {}, invalid
    if refusal is None:
        module.exit_json(changed=False, **facts)
        return
    module.fail_json(msg=str(refusal), error=refusal.document(), changed=False, **facts)
