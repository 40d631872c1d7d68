"""Fake runs that report an end. Their effect on the host is recorded in the model only.

They replace ansible-runner behind the real worker: launched once, observed from outside.
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
from tests.unit.reconciler import wipes
from tests.unit.reconciler.faults.site_model import BUILDING, MACHINE, WIPING, Run, SiteModel

ABSENCE = {"absent": True, "checks": {}}
REFUSED = "unreachable: ssh: connect to host n1 port 22: Connection refused"
CUT = "unreachable: Timeout, server 10.0.2.15 not responding."
# Reported ends. "lie" reports success without proof, for runs that wipe only.
ENDS = ("ok", "ok", "ok", "silent", "cut", "lost", "canceled", "before", "after", "lie")


class FakeRuns:
    """Fake runs by run id. documents: the healthy discovery of each host."""

    def __init__(self, model: SiteModel, documents: Mapping[str, dict[str, Any]]) -> None:
        self.by_id: dict[str, Run] = {}
        self._model, self._documents = model, documents

    def launch(self, _site: object, spec: RunSpec) -> Path:
        if spec.run_id not in self.by_id:
            run = _run_of(spec)
            self.by_id[spec.run_id] = run
            self._model.begin(run)
        return run_directory(Path("unused"), spec.run_id)

    def observe(self, directory: Path) -> RunState:
        run = self.by_id.get(directory.name)
        if run is None:
            return RunState(Phase.ABSENT)
        if not run.reported:
            return RunState(Phase.ALIVE)
        phase = Phase.LOST if run.reported == "lost" else Phase.FINISHED
        return RunState(phase, _outcome(run))

    def end(self, run: Run, how: str, effect: str) -> None:
        """Report the end of a run.

        effect: its effect before contact was lost: none, all, or an effect that is still to come.
        """
        if run.kind not in WIPING and how == "lie":
            how = "ok"
        if how in ("ok", "after") and not self._model.act(run):
            # The host refused the run, or was restarted during the run.
            how = "before" if run.acting else "cut"
        elif how in ("cut", "lost", "canceled") and effect == "done":
            self._model.act(run)
        run.acting = run.acting and effect == "later" and how in ("cut", "lost")
        run.reported = how
        if how == "ok":
            run.result = self._evidence(run)
        elif how == "lie":
            run.result = self._evidence(run)
            for proof in run.result["proofs"].values():
                proof["verified"] = False

    def _evidence(self, run: Run) -> dict[str, Any]:
        """The evidence of a run that did all its work."""
        if run.kind in BUILDING:
            return {"readiness": {}, "account": "alice", "baseline": {"accounts": {"root": "1"}}}
        if run.kind in WIPING:
            proofs = {slot["slot_id"]: _proof(slot) for slot in _disks_of(run.variables)}
            return {"proofs": proofs, "absence": ABSENCE, "drift": [], "compared": True}
        if run.kind == TaskKind.SLICE_ABSENCE_VERIFY:
            left = run.key in self._model.bytes_of.values()
            return {"absence": {"absent": not left, "checks": {}}}
        host, document = self._model.hosts[run.node], self._documents[run.node]
        identity = {**document["identity"], "boot_id": host.boot}
        if run.kind == TaskKind.NODE_PARITY:
            intent = run.variables["slice_intent"]
            report = {"intent": intent, "failures": int(host.broken), "warnings": 0}
            return {"parity": {**report, **wipes.proven(document), "identity": identity}}
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
    disks: list[dict[str, Any]] = variables.get("slice_slots") or variables.get("slice_disks") or []
    return disks


def _proof(disk: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "disk": f"eui.{disk['nvme_eui']}",
        "serial": disk["nvme_serial"],
        "size_bytes": disk["nvme_size_bytes"],
        "method": "user_data_erase",
        "verified": True,
        "gpu": wipes.gpu(disk.get("gpu_pci_address", "")),
    }


def _outcome(run: Run) -> Outcome:
    document: dict[str, Any] = {"schema": 1, "playbook": "any", "step": "", "error": {}}
    if run.reported in ("ok", "lie"):
        return _ended(run, "successful", {**document, "ok": True, "evidence": run.result})
    if run.reported in ("before", "after"):
        error = {"code": run.refused or "planted", "expected": "a", "found": "b", "remedy": "c"}
        evidence = (
            {"disk_written": True, "leftovers": True} if run.reported == "after" else NOTHING_DONE
        )
        failed = {"ok": False, "step": "clone", "error": error, "evidence": dict(evidence)}
        return _ended(run, "failed", document | failed)
    if run.reported == "silent":
        return _ended(run, "failed", None, REFUSED, touched=False)
    if run.reported == "cut":
        return _ended(run, "failed", None, CUT)
    return _ended(run, run.reported, None, "process_gone")


def _ended(
    run: Run, status: str, result: dict[str, Any] | None, problem: str = "", *, touched: bool = True
) -> Outcome:
    unreachable = problem.startswith("unreachable")
    return Outcome(status, result, problem, unreachable, touched)
