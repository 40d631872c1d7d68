"""Every state, with one sentence each, and the kinds of task."""

from __future__ import annotations

from enum import StrEnum


class Described(StrEnum):
    """A string enum whose members carry the sentence that explains them."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Described:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class NodeMode(Described):
    """What a node is sold as."""

    BAREMETAL = "baremetal", "The whole machine is sold; it carries no slices."
    CONVERTING_TO_SLICE = "converting_to_slice", "It is being made a slice host; nothing is sold."
    SLICE = "slice", "Its slots are sold; it takes no bare-metal claim."
    CONVERTING_TO_BAREMETAL = (
        "converting_to_baremetal",
        "Slice services are being removed; nothing is sold.",
    )

    @property
    def purpose(self) -> str:
        """What its host is to prove: that of the mode, or of the one that it is converted to."""
        return "slice" if self in (self.SLICE, self.CONVERTING_TO_SLICE) else "baremetal"


class NodeState(Described):
    """Whether work can be done on a node."""

    ENROLLING = "enrolling", "Known by name; its host key is not certified yet."
    BOOTSTRAPPING = "bootstrapping", "Certified; the host is being prepared."
    READY = "ready", "Prepared and reachable."
    DRAINING = "draining", "Takes nothing new; what runs on it ends by itself."
    MAINTENANCE = "maintenance", "Empty or held by an operator; takes nothing."
    UNREACHABLE = "unreachable", "Lost contact; what happens on it is unknown and frees nothing."
    RETIRED = "retired", "Gone for good; kept for the record."


class SlotState(Described):
    """Whether a slot can be given to a tenant."""

    DISABLED = "disabled", "Approved, and not sold: switched off, or its gate is closed."
    AVAILABLE = "available", "Proven clean and ready for a tenant."
    RESERVED = "reserved", "Claimed; nothing has happened on the host."
    PROVISIONING = "provisioning", "A run is building the tenant's machine."
    ACTIVE = "active", "The tenant's machine is running."
    RELEASING = "releasing", "A run is removing the tenant's machine and wiping the disk."
    CLEANUP = "cleanup", "A run removes what a failure left and wipes the disk."
    CLEANUP_BLOCKED = "cleanup_blocked", "Something may be left; it waits for evidence."


class HealthState(Described):
    """How a slot or a node is doing."""

    UNKNOWN = "unknown", "Nothing has been proven yet."
    HEALTHY = "healthy", "The last evidence showed nothing wrong."
    DEGRADED = "degraded", "It works, with a named difference from what is expected."
    FAILED = "failed", "It does not work; the detail names why."


class AllocationState(Described):
    """The life of what a tenant asked for."""

    REQUESTED = "requested", "Placed and claimed; no run has started."
    PROVISIONING = "provisioning", "A run is building it."
    ACTIVE = "active", "The tenant can use it."
    RELEASING = "releasing", "The tenant gave it back; its slots are being proven clean."
    RELEASED = "released", "Ended; nothing of it holds capacity by claim."
    FAILED = "failed", "Never became usable, or its release was forced to an end."


class ClaimState(Described):
    """The life of an allocation's hold on one slot or one whole node."""

    RESERVED = "reserved", "Holds its resources; no run has started."
    PROVISIONING = "provisioning", "Holds its resources while a run builds."
    ACTIVE = "active", "Holds its resources for a running tenant."
    RELEASING = "releasing", "Holds its resources until the wipe is proven."
    RELEASED = "released", "Ended in order."
    FAILED = "failed", "Ended by a failure; the slot carries what is left to do."


LIVE_CLAIMS = (
    ClaimState.RESERVED,
    ClaimState.PROVISIONING,
    ClaimState.ACTIVE,
    ClaimState.RELEASING,
)


class TaskState(Described):
    """The life of one piece of work on one node."""

    QUEUED = "queued", "Nobody has taken it yet."
    RUNNING = "running", "A worker holds its lease."
    WAITING = "waiting", "Cannot go on now; it says what it waits for."
    SUCCEEDED = "succeeded", "Its run ended well and its outcome is recorded."
    FAILED = "failed", "Its run ended badly; the error says where and what to do."
    CANCELED = "canceled", "Ended by request."
    LOST = "lost", "No outcome of its run was ever seen: the effect on the host is unknown."


class RecoveryState(Described):
    """The life of a recovery case: one attempt to bring back the slots of one allocation."""

    OPENED = "opened", "Recorded; the leader has not begun with it."
    VERIFYING = "verifying", "Its host is asked what is left of the allocation."
    CLEANING = "cleaning", "Its slots are wiped and verified."
    CONFIRMING = "confirming", "Its host is asked again, because something was left before."
    RECOVERED = "recovered", "Every slot is proven clean."
    FAILED = "failed", "Stopped; its failure says why and what a person does next."


OPEN_CASES = (
    RecoveryState.OPENED,
    RecoveryState.VERIFYING,
    RecoveryState.CLEANING,
    RecoveryState.CONFIRMING,
)


class CapacityShape(Described):
    """What an allocation is made of; the public contract has no other value."""

    BAREMETAL = "baremetal", "One whole machine."
    GPU_SLICE = "gpu_slice", "Whole GPUs of one machine, in a virtual machine."


class ClaimKind(Described):
    """What a claim holds."""

    SLICE = "slice", "One slot of a node."
    NODE_EXCLUSIVE = "node_exclusive", "The whole node."


class ProofKind(Described):
    """Why a disk counts as clean."""

    TRANSITION = "transition", "Taken over from its former use and wiped, with a manifest."
    WIPE = "wipe", "Wiped after a tenant and read back."
    UNTOUCHED = "untouched", "The host's ledger shows that the failed run wrote nothing on it."


class SharingMechanism(Described):
    """How a slot's accelerator is cut; only whole devices can be scheduled."""

    EXCLUSIVE_DEVICE = "exclusive_device", "The whole GPU."
    MIG_PARTITION = "mig_partition", "A MIG partition; not schedulable."
    MDEV_VGPU = "mdev_vgpu", "A mediated vGPU; not schedulable."
    TIME_SLICED = "time_sliced", "A share of the GPU's time; not schedulable."
    MPS = "mps", "A share through MPS; not schedulable."
    SOFTWARE_SHARED = "software_shared", "A share through other software; not schedulable."


class AppStatus(Described):
    """The life of an application that runs on a project's allocations."""

    DEPLOYING = "deploying", "Its members are being prepared; it says what it waits for."
    RUNNING = "running", "Every member is ready."
    FAILED = "failed", "It lost its controller; stop it and make another."
    STOPPED = "stopped", "Ended by request; its keys are removed or have ended."


class MemberStatus(Described):
    """Whether an allocation is ready to work for the application that it belongs to."""

    RECONCILING = "reconciling", "It is being made ready."
    READY = "ready", "The application's controller says that it works."
    FAILED = "failed", "It cannot work; its reason names why."


class OperationStatus(Described):
    """The life of one piece of work on a member."""

    ACCEPTED = "accepted", "Recorded; its task has not begun."
    RUNNING = "running", "Its task has a run on the host."
    SUCCEEDED = "succeeded", "Done, as the host says."
    FAILED = "failed", "Not done; its failure has a code."


class AppSlug(Described):
    """Which application an instance is of."""

    SLURM_REFERENCE = "slurm-reference", "Slurm, with one controller and any number of workers."


class MemberRole(Described):
    """What a member does for its application."""

    CONTROLLER = "controller", "Runs the application's own control; each instance has one."
    WORKER = "worker", "Does the work."


class OperationKind(Described):
    """What is done with a member."""

    MEMBER_ADD = "member_add", "It joins: the managed key is put on it for the first time."
    BOOTSTRAP_SSH_RECONCILE = (
        "bootstrap_ssh_reconcile",
        "The managed key is put there again, with a later end.",
    )
    BOOTSTRAP_SSH_REMOVE = "bootstrap_ssh_remove", "The managed key is taken away."


class Role(Described):
    """Who a token speaks for."""

    PLATFORM_ADMIN = "platform-admin", "Runs the platform."
    PROJECT_MEMBER = "project-member", "Uses what belongs to one project."
    NODE = "node", "A machine speaking about itself."


class TaskKind(StrEnum):
    """One handler in reconciler/work/kinds belongs to each kind."""

    SLICE_TOPOLOGY_DISCOVER = "slice.topology_discover"
    SLICE_VM_PROVISION = "slice.vm_provision"
    SLICE_VM_RELEASE = "slice.vm_release"
    SLICE_ABSENCE_VERIFY = "slice.absence_verify"
    SLICE_WIPE = "slice.wipe"
    SLICE_DRIFT_RECONCILE = "slice.drift_reconcile"
    NODE_ENROL = "node.enrol"
    NODE_BOOTSTRAP = "node.bootstrap"
    NODE_PARITY = "node.parity"
    NODE_BIND_TOPOLOGY = "node.bind_topology"
    NODE_STORAGE_TRANSITION = "node.storage_transition"
    NODE_IMAGE_CACHE = "node.image_cache"
    NODE_CONVERT = "node.convert"
    BAREMETAL_PROVISION = "baremetal.provision"
    BAREMETAL_RELEASE = "baremetal.release"
    ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY = "allocation.reconcile_managed_authorized_key"
    TERMINAL_OPEN = "terminal.open"

    @property
    def exclusive(self) -> bool:
        """True when it changes the host itself: nothing else may run on that node meanwhile."""
        return self in _EXCLUSIVE

    @property
    def attempts(self) -> int:
        """How many attempts a task has for failures that may pass (reconciler/work/retry.py)."""
        return _ATTEMPTS if self in _REPEATABLE else 1


# Too many, and whoever waits for the failure learns of it late.
_ATTEMPTS = 3
# They look, or put in place what is the same the second time; their failure changes no record. What
# the failure of all others means is decided by its outcome, and somebody asks for the work anew.
_REPEATABLE = frozenset(
    {
        TaskKind.SLICE_TOPOLOGY_DISCOVER,
        TaskKind.SLICE_DRIFT_RECONCILE,
        TaskKind.NODE_ENROL,
        TaskKind.NODE_PARITY,
        TaskKind.NODE_IMAGE_CACHE,
    }
)
_EXCLUSIVE = frozenset(
    {
        TaskKind.NODE_BOOTSTRAP,
        TaskKind.NODE_BIND_TOPOLOGY,
        TaskKind.NODE_STORAGE_TRANSITION,
        TaskKind.NODE_CONVERT,
        TaskKind.BAREMETAL_PROVISION,
        TaskKind.BAREMETAL_RELEASE,
    }
)
