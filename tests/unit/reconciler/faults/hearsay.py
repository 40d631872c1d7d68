"""Runs that only say how they ended; what they did meanwhile is theirs and the host's to know.

Stands where ansible-runner does, behind the real worker: launched once, observed from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reconciler.model.proof import NOTHING_DONE
from reconciler.model.states import TaskKind
from reconciler.runs.collect import Outcome, Phase, RunState
from reconciler.runs.paths import run_directory
from reconciler.runs.spec import RunSpec
from tests.unit.reconciler.faults.truth import BUILDING, MACHINE, WIPING, Run, Truth

ABSENCE = {"absent": True, "checks": {}}
REFUSED = "unreachable: ssh: connect to host n1 port 22: Connection refused"
CUT = "unreachable: Timeout, server 10.0.2.15 not responding."
# What can be said of every kind of run, and what only of those that change something.
ENDS = ("ok", "ok", "ok", "silent", "cut", "lost", "canceled", "before", "after", "lie")


class Runs:
    """By run id. documents: the healthy discovery of each host."""

    def __init__(self, truth: Truth, documents: Mapping[str, dict[str, Any]]) -> None:
        self.known: dict[str, Run] = {}
        self._truth, self._documents = truth, documents

    def launch(self, _site: object, spec: RunSpec) -> Path:
        if spec.run_id not in self.known:
            run = _run_of(spec)
            self.known[spec.run_id] = run
            self._truth.begin(run)
        return run_directory(Path("unused"), spec.run_id)

    def observe(self, directory: Path) -> RunState:
        run = self.known.get(directory.name)
        if run is None:
            return RunState(Phase.ABSENT)
        if not run.told:
            return RunState(Phase.ALIVE)
        phase = Phase.LOST if run.told == "lost" else Phase.FINISHED
        return RunState(phase, _outcome(run))

    def end(self, run: Run, how: str, effect: str) -> None:
        """The run is over, or so it is said.

        effect: what it did before contact was lost: nothing, all, or what it has yet to do.
        """
        if run.kind not in WIPING and how == "lie":
            how = "ok"
        if how in ("ok", "after") and not self._truth.act(run):
            # The host let it do nothing; or it was restarted under the run.
            how = "before" if run.acting else "cut"
        elif how in ("cut", "lost", "canceled") and effect == "done":
            self._truth.act(run)
        run.acting = run.acting and effect == "later" and how in ("cut", "lost")
        run.told = how
        if how == "ok":
            run.result = self._evidence(run)
        elif how == "lie":
            run.result = self._evidence(run)
            for proof in run.result["proofs"].values():
                proof["verified"] = False

    def _evidence(self, run: Run) -> dict[str, Any]:
        """What a host says that did all it was told."""
        if run.kind in BUILDING:
            return {"readiness": {}, "account": "alice", "baseline": {"accounts": {"root": "1"}}}
        if run.kind in WIPING:
            proofs = {slot["slot_id"]: _proof(slot) for slot in _disks_of(run.variables)}
            return {"proofs": proofs, "absence": ABSENCE, "drift": [], "compared": True}
        if run.kind == TaskKind.SLICE_ABSENCE_VERIFY:
            left = run.key in self._truth.bytes_of.values()
            return {"absence": {"absent": not left, "checks": {}}}
        host, document = self._truth.hosts[run.node], self._documents[run.node]
        identity = {**document["identity"], "boot_id": host.boot}
        if run.kind == TaskKind.NODE_PARITY:
            intent = run.variables["slice_intent"]
            report = {"intent": intent, "failures": int(host.broken), "warnings": 0}
            return {"parity": {**report, "identity": identity}}
        seen = [disk for disk in document["nvme"] if disk["identity"] not in host.hidden]
        return {"discovery": {**document, "identity": identity, "nvme": seen}}


def _run_of(spec: RunSpec) -> Run:
    given, about = spec.variables, spec.variables["slice_run"]
    disks = _disks_of(given) if about["kind"] in (*BUILDING, *WIPING) else []
    fences = {slot["slot_id"]: slot["fence"] for slot in given.get("slice_slots", ()) if disks}
    if "slice_fence" in given:
        fences = {MACHINE: given["slice_fence"]}
    return Run(
        id=spec.run_id,
        task=about["task_id"],
        kind=about["kind"],
        node=about["node_id"],
        key=given.get("slice_allocation", {}).get("id", ""),
        disks=tuple(f"eui.{disk['nvme_eui']}" for disk in disks),
        slots=tuple(name for name in fences if name != MACHINE),
        fences=fences,
        boot=given.get("boot_id", ""),
        variables=given,
    )


def _disks_of(variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = variables.get("slice_slots") or variables.get("slice_disks") or []
    return found


def _proof(disk: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "disk": f"eui.{disk['nvme_eui']}",
        "serial": disk["nvme_serial"],
        "size_bytes": disk["nvme_size_bytes"],
        "method": "user_data_erase",
        "verified": True,
    }


def _outcome(run: Run) -> Outcome:
    document: dict[str, Any] = {"schema": 1, "playbook": "any", "step": "", "error": {}}
    if run.told in ("ok", "lie"):
        return _ended(run, "successful", {**document, "ok": True, "evidence": run.result})
    if run.told in ("before", "after"):
        error = {"code": run.refused or "planted", "expected": "a", "found": "b", "remedy": "c"}
        told = {"disk_written": True, "leftovers": True} if run.told == "after" else NOTHING_DONE
        failed = {"ok": False, "step": "clone", "error": error, "evidence": dict(told)}
        return _ended(run, "failed", document | failed)
    if run.told == "silent":
        return _ended(run, "failed", None, REFUSED, touched=False)
    if run.told == "cut":
        return _ended(run, "failed", None, CUT)
    return _ended(run, run.told, None, "process_gone")


def _ended(
    run: Run,
    status: str,
    result: dict[str, Any] | None,
    problem: str = "",
    *,
    touched: bool = True,
) -> Outcome:
    unreachable = problem.startswith("unreachable")
    return Outcome(status, result, problem, unreachable, touched)
