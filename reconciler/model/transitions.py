"""Transition table of every entity, and the time limits of unstable states. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.model.pools import PoolState
from reconciler.model.states import (
    AllocationState,
    AppStatus,
    ClaimState,
    Described,
    IngressState,
    MemberStatus,
    NodeMode,
    NodeState,
    OperationStatus,
    RecoveryState,
    SlotState,
    TaskState,
)

N, M, S, A, C, T = NodeState, NodeMode, SlotState, AllocationState, ClaimState, TaskState
P, B, W = AppStatus, MemberStatus, OperationStatus
R, G, L = RecoveryState, IngressState, PoolState


@dataclass(frozen=True)
class Transition:
    """`event` takes an `entity` from `source` to `target`."""

    entity: str
    source: str
    event: str
    target: str


@dataclass(frozen=True)
class Deadline:
    """Longest duration of a state. `event` is applied when it has passed ("" = only a warning)."""

    seconds: int
    event: str


ENTITIES: dict[str, type[Described]] = {
    "node": NodeState,
    "node_mode": NodeMode,
    "slot": SlotState,
    "allocation": AllocationState,
    "claim": ClaimState,
    "task": TaskState,
    "app_instance": AppStatus,
    "app_member": MemberStatus,
    "app_operation": OperationStatus,
    "recovery_case": RecoveryState,
    "ingress_rule": IngressState,
    "pool": PoolState,
}


def _rows(entity: str, *rows: tuple[str | tuple[str, ...], str, str]) -> tuple[Transition, ...]:
    """Transitions of an entity. Several sources of a row have the same event and target."""
    return tuple(
        Transition(entity, source, event, target)
        for sources, event, target in rows
        for source in ((sources,) if isinstance(sources, str) else sources)
    )


TABLE: tuple[Transition, ...] = (
    *_rows(
        "node",
        (N.ENROLLING, "enrol", N.BOOTSTRAPPING),
        (N.BOOTSTRAPPING, "bootstrap", N.READY),
        # A reimage or a new host key invalidates the earlier bootstrap.
        ((N.READY, N.DRAINING, N.MAINTENANCE, N.UNREACHABLE), "enrol", N.BOOTSTRAPPING),
        (N.READY, "drain", N.DRAINING),
        (N.DRAINING, "resume", N.READY),
        ((N.DRAINING, N.BOOTSTRAPPING), "maintain", N.MAINTENANCE),
        (N.MAINTENANCE, "resume", N.READY),
        ((N.BOOTSTRAPPING, N.READY, N.DRAINING, N.MAINTENANCE), "lose", N.UNREACHABLE),
        (N.UNREACHABLE, "regain_bootstrapping", N.BOOTSTRAPPING),
        (N.UNREACHABLE, "regain_ready", N.READY),
        (N.UNREACHABLE, "regain_draining", N.DRAINING),
        (N.UNREACHABLE, "regain_maintenance", N.MAINTENANCE),
        ((N.ENROLLING, N.MAINTENANCE), "retire", N.RETIRED),
        # The host will not answer again; everything on it is given up with it.
        (N.UNREACHABLE, "retire", N.RETIRED),
    ),
    *_rows(
        "node_mode",
        # A conversion that cannot end is turned round.
        ((M.BAREMETAL, M.CONVERTING_TO_BAREMETAL), "to_slice", M.CONVERTING_TO_SLICE),
        (M.CONVERTING_TO_SLICE, "converted", M.SLICE),
        ((M.SLICE, M.CONVERTING_TO_SLICE), "to_baremetal", M.CONVERTING_TO_BAREMETAL),
        (M.CONVERTING_TO_BAREMETAL, "converted", M.BAREMETAL),
    ),
    *_rows(
        "slot",
        (S.DISABLED, "enable", S.AVAILABLE),
        (S.AVAILABLE, "disable", S.DISABLED),
        (S.AVAILABLE, "reserve", S.RESERVED),
        (S.RESERVED, "provision", S.PROVISIONING),
        (S.PROVISIONING, "activate", S.ACTIVE),
        (S.ACTIVE, "release", S.RELEASING),
        # The host's ledger shows that nothing was written and nothing is left.
        ((S.RESERVED, S.PROVISIONING), "return", S.AVAILABLE),
        ((S.RESERVED, S.PROVISIONING), "park", S.DISABLED),
        # Proven clean: available, or parked when the node's gate is closed.
        (S.RELEASING, "return", S.AVAILABLE),
        (S.RELEASING, "park", S.DISABLED),
        (S.CLEANUP, "return", S.AVAILABLE),
        (S.CLEANUP, "park", S.DISABLED),
        (S.CLEANUP_BLOCKED, "return", S.AVAILABLE),
        (S.CLEANUP_BLOCKED, "park", S.DISABLED),
        (S.CLEANUP_BLOCKED, "clean", S.CLEANUP),
        # A device of the slot has died, so evidence cannot come and the slot is given up.
        (S.CLEANUP_BLOCKED, "withdraw", S.DISABLED),
        ((S.RESERVED, S.PROVISIONING, S.RELEASING), "clean", S.CLEANUP),
        # No allocation has the slot, but its host still has traces of the last tenant.
        (
            (S.DISABLED, S.AVAILABLE, S.RESERVED, S.PROVISIONING, S.ACTIVE, S.RELEASING, S.CLEANUP),
            "block",
            S.CLEANUP_BLOCKED,
        ),
    ),
    *_rows(
        "allocation",
        (A.REQUESTED, "provision", A.PROVISIONING),
        (A.REQUESTED, "withdraw", A.RELEASED),
        (A.REQUESTED, "fail", A.FAILED),
        (A.PROVISIONING, "activate", A.ACTIVE),
        (A.PROVISIONING, "fail", A.FAILED),
        (A.ACTIVE, "release", A.RELEASING),
        (A.RELEASING, "finish", A.RELEASED),
        # The run failed: its traces are cleaned up while the release goes on.
        (A.RELEASING, "strand", A.RELEASING),
        (A.RELEASING, "fail", A.FAILED),
        # The host does not answer. Use and billing end, and the slots stay blocked.
        ((A.ACTIVE, A.RELEASING), "force_release", A.RELEASED),
    ),
    *_rows(
        "claim",
        (C.RESERVED, "provision", C.PROVISIONING),
        (C.RESERVED, "finish", C.RELEASED),
        (C.RESERVED, "fail", C.FAILED),
        (C.PROVISIONING, "activate", C.ACTIVE),
        (C.PROVISIONING, "fail", C.FAILED),
        (C.ACTIVE, "release", C.RELEASING),
        ((C.ACTIVE, C.RELEASING), "finish", C.RELEASED),
        (C.RELEASING, "fail", C.FAILED),
    ),
    *_rows(
        "task",
        ((T.QUEUED, T.WAITING), "lease", T.RUNNING),
        # The worker's lease expired: another worker attaches to its run.
        (T.RUNNING, "lease", T.RUNNING),
        (T.RUNNING, "wait", T.WAITING),
        (T.RUNNING, "retry", T.QUEUED),
        (T.RUNNING, "succeed", T.SUCCEEDED),
        (T.RUNNING, "fail", T.FAILED),
        (T.RUNNING, "lose", T.LOST),
        ((T.RUNNING, T.QUEUED, T.WAITING), "cancel", T.CANCELED),
    ),
    *_rows(
        "app_instance",
        (P.DEPLOYING, "run", P.RUNNING),
        ((P.DEPLOYING, P.RUNNING), "fail", P.FAILED),
        ((P.DEPLOYING, P.RUNNING, P.FAILED), "stop", P.STOPPED),
    ),
    *_rows(
        "app_member",
        (B.RECONCILING, "prepare", B.READY),
        ((B.RECONCILING, B.READY), "fail", B.FAILED),
        (B.FAILED, "reconcile", B.RECONCILING),
    ),
    *_rows(
        "app_operation",
        (W.ACCEPTED, "begin", W.RUNNING),
        (W.ACCEPTED, "fail", W.FAILED),
        (W.RUNNING, "succeed", W.SUCCEEDED),
        (W.RUNNING, "fail", W.FAILED),
    ),
    *_rows(
        "recovery_case",
        (R.OPENED, "verify", R.VERIFYING),
        (R.VERIFYING, "clean", R.CLEANING),
        # Only after traces were left on the host, or after a forced release.
        (R.CLEANING, "verify", R.CONFIRMING),
        ((R.CLEANING, R.CONFIRMING), "recover", R.RECOVERED),
        ((R.OPENED, R.VERIFYING, R.CLEANING, R.CONFIRMING), "fail", R.FAILED),
        # The case cannot go on yet; the reason of the transition says why.
        (R.OPENED, "wait", R.OPENED),
        (R.VERIFYING, "wait", R.VERIFYING),
        (R.CLEANING, "wait", R.CLEANING),
        (R.CONFIRMING, "wait", R.CONFIRMING),
        # A person takes over a case that the policy opened or that another person held back.
        (R.OPENED, "adopt", R.OPENED),
        (R.VERIFYING, "adopt", R.VERIFYING),
        (R.CLEANING, "adopt", R.CLEANING),
        (R.CONFIRMING, "adopt", R.CONFIRMING),
    ),
    *_rows(
        "ingress_rule",
        (G.REQUESTED, "apply", G.APPLIED),
        # Both only with proof, or without a run: the host does not forward.
        (G.REQUESTED, "fail", G.FAILED),
        (G.REQUESTED, "withdraw", G.REMOVED),
        ((G.REQUESTED, G.APPLIED), "remove", G.REMOVING),
        (G.REMOVING, "finish", G.REMOVED),
    ),
    *_rows(
        "pool",
        (L.REQUESTED, "begin", L.STARTING),
        # No process exists yet.
        (L.REQUESTED, "stopped", L.STOPPED),
        (L.REQUESTED, "evicted", L.EVICTED),
        (L.REQUESTED, "failed", L.FAILED),
        (L.STARTING, "ready", L.RUNNING),
        ((L.STARTING, L.RUNNING), "drain", L.DRAINING),
        ((L.STARTING, L.RUNNING, L.DRAINING), "end", L.STOPPING),
        # Only with proof that none of its processes is left.
        ((L.DRAINING, L.STOPPING), "stopped", L.STOPPED),
        (L.STOPPING, "evicted", L.EVICTED),
        (L.STOPPING, "failed", L.FAILED),
    ),
)

# A lower limit reports a slow boot as a failure; a higher limit hides a stuck slot for longer.
DEADLINES: dict[tuple[str, str], Deadline] = {
    ("node", N.ENROLLING): Deadline(86_400, ""),
    ("node", N.BOOTSTRAPPING): Deadline(7_200, "maintain"),
    ("node", N.DRAINING): Deadline(7 * 86_400, ""),
    ("node", N.UNREACHABLE): Deadline(3_600, ""),
    ("node_mode", M.CONVERTING_TO_SLICE): Deadline(14_400, ""),
    ("node_mode", M.CONVERTING_TO_BAREMETAL): Deadline(14_400, ""),
    ("slot", S.RESERVED): Deadline(3_600, "block"),
    ("slot", S.PROVISIONING): Deadline(7_200, "block"),
    ("slot", S.RELEASING): Deadline(14_400, "block"),
    ("slot", S.CLEANUP): Deadline(14_400, "block"),
    ("slot", S.CLEANUP_BLOCKED): Deadline(86_400, ""),
    ("allocation", A.REQUESTED): Deadline(3_600, "fail"),
    ("allocation", A.PROVISIONING): Deadline(7_200, "fail"),
    ("allocation", A.RELEASING): Deadline(14_400, ""),
    # Claims follow their allocation.
    ("claim", C.RESERVED): Deadline(3_600, ""),
    ("claim", C.PROVISIONING): Deadline(7_200, ""),
    ("claim", C.RELEASING): Deadline(14_400, ""),
    ("task", T.QUEUED): Deadline(86_400, "cancel"),
    ("task", T.WAITING): Deadline(86_400, "cancel"),
    ("task", T.RUNNING): Deadline(14_400, "lose"),
    ("app_instance", P.DEPLOYING): Deadline(3_600, ""),
    ("app_member", B.RECONCILING): Deadline(3_600, ""),
    # Operations end with their task, which has its own limit.
    ("app_operation", W.ACCEPTED): Deadline(90_000, ""),
    ("app_operation", W.RUNNING): Deadline(14_400, ""),
    ("recovery_case", R.OPENED): Deadline(86_400, "fail"),
    # Longer than the verification task may wait and run: the task ends first, with its own error.
    ("recovery_case", R.VERIFYING): Deadline(115_200, "fail"),
    ("recovery_case", R.CONFIRMING): Deadline(115_200, "fail"),
    # The case ends with its slots, which have their own limits: some disks are wiped for hours.
    ("recovery_case", R.CLEANING): Deadline(86_400, ""),
    # Rules end with their task, which has its own limit, or with their allocation.
    ("ingress_rule", G.REQUESTED): Deadline(90_000, ""),
    ("ingress_rule", G.REMOVING): Deadline(3_600, ""),
    ("pool", L.REQUESTED): Deadline(60, "failed"),
    ("pool", L.STARTING): Deadline(900, "end"),
    # As long as the pool's own drain_s and grace_s say. A process that cannot be killed keeps its
    # devices, so the end of a pool is only waited for.
    ("pool", L.DRAINING): Deadline(600, "end"),
    ("pool", L.STOPPING): Deadline(90, ""),
}

_TARGETS = {(row.entity, row.source, row.event): row.target for row in TABLE}


def target(entity: str, source: str, event: str) -> str | None:
    """State that `event` leads to; None when the event is not possible in `source`."""
    return _TARGETS.get((entity, source, event))


def events(entity: str, source: str) -> tuple[str, ...]:
    """Events that are possible for an entity in this state."""
    return tuple(row.event for row in TABLE if row.entity == entity and row.source == source)
