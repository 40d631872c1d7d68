"""Which change of state is possible, and how long an unstable state may last. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.model.states import (
    AllocationState,
    AppStatus,
    ClaimState,
    Described,
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
R = RecoveryState


@dataclass(frozen=True)
class Transition:
    """`event` takes an `entity` from `source` to `target`."""

    entity: str
    source: str
    event: str
    target: str


@dataclass(frozen=True)
class Deadline:
    """How long a state may last; `event` is what passing it means ("" = only a warning)."""

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
}


def _rows(entity: str, *rows: tuple[str, str, str]) -> tuple[Transition, ...]:
    return tuple(Transition(entity, source, event, target) for source, event, target in rows)


TABLE: tuple[Transition, ...] = (
    *_rows(
        "node",
        (N.ENROLLING, "enrol", N.BOOTSTRAPPING),
        (N.BOOTSTRAPPING, "bootstrap", N.READY),
        # A reimage or a new host key: what was prepared counts no longer.
        (N.READY, "enrol", N.BOOTSTRAPPING),
        (N.DRAINING, "enrol", N.BOOTSTRAPPING),
        (N.MAINTENANCE, "enrol", N.BOOTSTRAPPING),
        (N.UNREACHABLE, "enrol", N.BOOTSTRAPPING),
        (N.READY, "drain", N.DRAINING),
        (N.DRAINING, "resume", N.READY),
        (N.DRAINING, "maintain", N.MAINTENANCE),
        (N.BOOTSTRAPPING, "maintain", N.MAINTENANCE),
        (N.MAINTENANCE, "resume", N.READY),
        (N.BOOTSTRAPPING, "lose", N.UNREACHABLE),
        (N.READY, "lose", N.UNREACHABLE),
        (N.DRAINING, "lose", N.UNREACHABLE),
        (N.MAINTENANCE, "lose", N.UNREACHABLE),
        (N.UNREACHABLE, "regain_bootstrapping", N.BOOTSTRAPPING),
        (N.UNREACHABLE, "regain_ready", N.READY),
        (N.UNREACHABLE, "regain_draining", N.DRAINING),
        (N.UNREACHABLE, "regain_maintenance", N.MAINTENANCE),
        (N.ENROLLING, "retire", N.RETIRED),
        (N.MAINTENANCE, "retire", N.RETIRED),
        # It will not answer any more, and what was on it goes with it.
        (N.UNREACHABLE, "retire", N.RETIRED),
    ),
    *_rows(
        "node_mode",
        (M.BAREMETAL, "to_slice", M.CONVERTING_TO_SLICE),
        (M.CONVERTING_TO_SLICE, "converted", M.SLICE),
        (M.CONVERTING_TO_SLICE, "revert", M.BAREMETAL),
        (M.SLICE, "to_baremetal", M.CONVERTING_TO_BAREMETAL),
        (M.CONVERTING_TO_BAREMETAL, "converted", M.BAREMETAL),
        (M.CONVERTING_TO_BAREMETAL, "revert", M.SLICE),
    ),
    *_rows(
        "slot",
        (S.DISABLED, "enable", S.AVAILABLE),
        (S.AVAILABLE, "disable", S.DISABLED),
        (S.AVAILABLE, "reserve", S.RESERVED),
        (S.RESERVED, "provision", S.PROVISIONING),
        (S.PROVISIONING, "activate", S.ACTIVE),
        (S.ACTIVE, "release", S.RELEASING),
        # Nothing was written and nothing is left: the host's ledger says so.
        (S.RESERVED, "return", S.AVAILABLE),
        (S.PROVISIONING, "return", S.AVAILABLE),
        (S.RESERVED, "park", S.DISABLED),
        (S.PROVISIONING, "park", S.DISABLED),
        # Proven clean: available, or parked when the node's gate is closed.
        (S.RELEASING, "return", S.AVAILABLE),
        (S.RELEASING, "park", S.DISABLED),
        (S.CLEANUP, "return", S.AVAILABLE),
        (S.CLEANUP, "park", S.DISABLED),
        (S.CLEANUP_BLOCKED, "return", S.AVAILABLE),
        (S.CLEANUP_BLOCKED, "park", S.DISABLED),
        (S.CLEANUP_BLOCKED, "clean", S.CLEANUP),
        # A device of it has died: there will be no evidence, and no slot either.
        (S.CLEANUP_BLOCKED, "withdraw", S.DISABLED),
        (S.RESERVED, "clean", S.CLEANUP),
        (S.PROVISIONING, "clean", S.CLEANUP),
        (S.RELEASING, "clean", S.CLEANUP),
        # Nobody has it, and its host still holds something of its last tenant.
        (S.DISABLED, "block", S.CLEANUP_BLOCKED),
        (S.AVAILABLE, "block", S.CLEANUP_BLOCKED),
        (S.RESERVED, "block", S.CLEANUP_BLOCKED),
        (S.PROVISIONING, "block", S.CLEANUP_BLOCKED),
        (S.ACTIVE, "block", S.CLEANUP_BLOCKED),
        (S.RELEASING, "block", S.CLEANUP_BLOCKED),
        (S.CLEANUP, "block", S.CLEANUP_BLOCKED),
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
        # The run failed: what it left is cleaned up, the allocation is still on its way out.
        (A.RELEASING, "strand", A.RELEASING),
        (A.RELEASING, "fail", A.FAILED),
        # The host does not answer: use and billing end, the slots stay blocked.
        (A.ACTIVE, "force_release", A.RELEASED),
        (A.RELEASING, "force_release", A.RELEASED),
    ),
    *_rows(
        "claim",
        (C.RESERVED, "provision", C.PROVISIONING),
        (C.RESERVED, "finish", C.RELEASED),
        (C.RESERVED, "fail", C.FAILED),
        (C.PROVISIONING, "activate", C.ACTIVE),
        (C.PROVISIONING, "fail", C.FAILED),
        (C.ACTIVE, "release", C.RELEASING),
        (C.ACTIVE, "finish", C.RELEASED),
        (C.RELEASING, "finish", C.RELEASED),
        (C.RELEASING, "fail", C.FAILED),
    ),
    *_rows(
        "task",
        (T.QUEUED, "lease", T.RUNNING),
        (T.WAITING, "lease", T.RUNNING),
        # The holder went silent: another worker attaches to the run it left.
        (T.RUNNING, "lease", T.RUNNING),
        (T.RUNNING, "wait", T.WAITING),
        (T.RUNNING, "retry", T.QUEUED),
        (T.RUNNING, "succeed", T.SUCCEEDED),
        (T.RUNNING, "fail", T.FAILED),
        (T.RUNNING, "lose", T.LOST),
        (T.RUNNING, "cancel", T.CANCELED),
        (T.QUEUED, "cancel", T.CANCELED),
        (T.WAITING, "cancel", T.CANCELED),
    ),
    *_rows(
        "app_instance",
        (P.DEPLOYING, "run", P.RUNNING),
        (P.DEPLOYING, "fail", P.FAILED),
        (P.RUNNING, "fail", P.FAILED),
        (P.DEPLOYING, "stop", P.STOPPED),
        (P.RUNNING, "stop", P.STOPPED),
        (P.FAILED, "stop", P.STOPPED),
    ),
    *_rows(
        "app_member",
        (B.RECONCILING, "prepare", B.READY),
        (B.RECONCILING, "fail", B.FAILED),
        (B.READY, "fail", B.FAILED),
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
        # Only after something was left on the host, or after a forced release.
        (R.CLEANING, "verify", R.CONFIRMING),
        (R.CLEANING, "recover", R.RECOVERED),
        (R.CONFIRMING, "recover", R.RECOVERED),
        (R.OPENED, "fail", R.FAILED),
        (R.VERIFYING, "fail", R.FAILED),
        (R.CLEANING, "fail", R.FAILED),
        (R.CONFIRMING, "fail", R.FAILED),
        # It cannot go on yet, and its reason says why.
        (R.OPENED, "wait", R.OPENED),
        (R.VERIFYING, "wait", R.VERIFYING),
        (R.CLEANING, "wait", R.CLEANING),
        (R.CONFIRMING, "wait", R.CONFIRMING),
        # A person asks for what the policy has begun, or for what another person held back.
        (R.OPENED, "adopt", R.OPENED),
        (R.VERIFYING, "adopt", R.VERIFYING),
        (R.CLEANING, "adopt", R.CLEANING),
        (R.CONFIRMING, "adopt", R.CONFIRMING),
    ),
)

# Too low, and a slow boot is called a failure; too high, and a stuck slot stays unseen.
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
    # Claims go where their allocation goes.
    ("claim", C.RESERVED): Deadline(3_600, ""),
    ("claim", C.PROVISIONING): Deadline(7_200, ""),
    ("claim", C.RELEASING): Deadline(14_400, ""),
    ("task", T.QUEUED): Deadline(86_400, "cancel"),
    ("task", T.WAITING): Deadline(86_400, "cancel"),
    ("task", T.RUNNING): Deadline(14_400, "lose"),
    ("app_instance", P.DEPLOYING): Deadline(3_600, ""),
    ("app_member", B.RECONCILING): Deadline(3_600, ""),
    # They end with their task, which has a limit of its own.
    ("app_operation", W.ACCEPTED): Deadline(90_000, ""),
    ("app_operation", W.RUNNING): Deadline(14_400, ""),
    ("recovery_case", R.OPENED): Deadline(86_400, "fail"),
    # Longer than the task that asks the host may wait and run: it ends first, with its own error.
    ("recovery_case", R.VERIFYING): Deadline(115_200, "fail"),
    ("recovery_case", R.CONFIRMING): Deadline(115_200, "fail"),
    # It ends with its slots, which have limits of their own: some disks are wiped for hours.
    ("recovery_case", R.CLEANING): Deadline(86_400, ""),
}

_TARGETS = {(row.entity, row.source, row.event): row.target for row in TABLE}


def target(entity: str, source: str, event: str) -> str | None:
    """Where `event` leads; None when it is not possible now."""
    return _TARGETS.get((entity, source, event))


def events(entity: str, source: str) -> tuple[str, ...]:
    """What can happen to an entity in this state."""
    return tuple(row.event for row in TABLE if row.entity == entity and row.source == source)
