"""States of every entity, each with its sentence, and the kinds of task."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Described(StrEnum):
    """A string enum whose members carry the sentence that explains them."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Described:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class NodeMode(Described):
    """Whether a node is sold as a whole machine or as slices."""

    BAREMETAL = "baremetal", "The whole machine is sold; it carries no slices."
    CONVERTING_TO_SLICE = "converting_to_slice", "It is being made a slice host; nothing is sold."
    SLICE = "slice", "Its slots are sold; it takes no bare-metal claim."
    CONVERTING_TO_BAREMETAL = (
        "converting_to_baremetal",
        "Slice services are being removed; nothing is sold.",
    )

    @property
    def purpose(self) -> str:
        """The form that parity checks the host for: of this mode, or of the conversion's target."""
        return "slice" if self in (self.SLICE, self.CONVERTING_TO_SLICE) else "baremetal"

    @classmethod
    def of_new(cls, purpose: str) -> NodeMode:
        """The mode of a new node that is to be sold in this form."""
        return cls.BAREMETAL if purpose == "baremetal" else cls.CONVERTING_TO_SLICE


class NodeState(Described):
    """Whether a node can take work."""

    ENROLLING = "enrolling", "Known by name; its host key is not certified yet."
    BOOTSTRAPPING = "bootstrapping", "Certified; the host is being prepared."
    READY = "ready", "Prepared and reachable."
    DRAINING = "draining", "Takes nothing new; what runs on it ends by itself."
    MAINTENANCE = "maintenance", "Empty or held by an operator; takes nothing."
    UNREACHABLE = "unreachable", "Lost contact; what happens on it is unknown and frees nothing."
    RETIRED = "retired", "Gone for good; kept for the record."


# A prepared host that answers.
ANSWERING_NODES = (NodeState.READY, NodeState.DRAINING, NodeState.MAINTENANCE)


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


# No run is at work on it and no tenant has it; and what a tenant left is still to be proven gone.
IDLE_SLOTS = (SlotState.AVAILABLE, SlotState.DISABLED)
UNCLEAN_SLOTS = (SlotState.CLEANUP, SlotState.CLEANUP_BLOCKED)
# Not for sale, and no tenant uses it: an operator may withdraw it, or have a machine removed.
UNUSED_SLOTS = (SlotState.DISABLED, SlotState.CLEANUP_BLOCKED)


class HealthState(Described):
    """Health of a slot or a node."""

    UNKNOWN = "unknown", "Nothing has been proven yet."
    HEALTHY = "healthy", "The last evidence showed nothing wrong."
    DEGRADED = "degraded", "It works, with a named difference from what is expected."
    FAILED = "failed", "It does not work; the detail names why."


class AllocationState(Described):
    """Lifecycle of an allocation, from request to end."""

    REQUESTED = "requested", "Placed and claimed; no run has started."
    PROVISIONING = "provisioning", "A run is building it."
    ACTIVE = "active", "The tenant can use it."
    RELEASING = "releasing", "The tenant gave it back; its slots are being proven clean."
    RELEASED = "released", "Ended; nothing of it holds capacity by claim."
    FAILED = "failed", "Never became usable, or its release was forced to an end."


ENDED_ALLOCATIONS = (AllocationState.RELEASED, AllocationState.FAILED)
# In the order in which an allocation has them.
LIVE_ALLOCATIONS = (
    AllocationState.REQUESTED,
    AllocationState.PROVISIONING,
    AllocationState.ACTIVE,
    AllocationState.RELEASING,
)


class ClaimState(Described):
    """Lifecycle of a claim, with which an allocation reserves a slot or a whole node."""

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
    """Lifecycle of a task: a piece of work on a node."""

    QUEUED = "queued", "Nobody has taken it yet."
    RUNNING = "running", "A worker holds its lease."
    WAITING = "waiting", "Cannot go on now; it says what it waits for."
    SUCCEEDED = "succeeded", "Its run ended well and its outcome is recorded."
    FAILED = "failed", "Its run ended badly; the error says where and what to do."
    CANCELED = "canceled", "Ended by request."
    LOST = "lost", "No outcome of its run was ever seen: the effect on the host is unknown."


ENDED_TASKS = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELED, TaskState.LOST)


class RecoveryState(Described):
    """Lifecycle of a recovery case: an attempt to bring back the slots of an allocation."""

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
    """Capacity of an allocation; the public contract has no other value."""

    BAREMETAL = "baremetal", "One whole machine."
    GPU_SLICE = "gpu_slice", "Whole GPUs of one machine, in a virtual machine."


class ClaimKind(Described):
    """Whether a claim covers a slot or the whole node."""

    SLICE = "slice", "One slot of a node."
    NODE_EXCLUSIVE = "node_exclusive", "The whole node."


class PowerAction(Described):
    """Power action on a slice that its project asks for."""

    START = "start", "Start the stopped machine."
    STOP = "stop", "Shut the machine down; its slots and its disk stay."
    RESTART = "restart", "Shut the machine down and start it."
    RESET = "reset", "Take the power away and start it; for a guest that does not answer."


class ProofKind(Described):
    """Evidence by which a disk counts as clean."""

    TRANSITION = "transition", "Taken over from its former use and wiped, with a manifest."
    WIPE = "wipe", "Wiped after a tenant and read back."
    UNTOUCHED = "untouched", "The host's ledger shows that the failed run wrote nothing on it."


class SharingMechanism(Described):
    """How a slot's accelerator is divided. Only whole devices can be scheduled."""

    EXCLUSIVE_DEVICE = "exclusive_device", "The whole GPU."
    MIG_PARTITION = "mig_partition", "A MIG partition; not schedulable."
    MDEV_VGPU = "mdev_vgpu", "A mediated vGPU; not schedulable."
    TIME_SLICED = "time_sliced", "A share of the GPU's time; not schedulable."
    MPS = "mps", "A share through MPS; not schedulable."
    SOFTWARE_SHARED = "software_shared", "A share through other software; not schedulable."


class AppStatus(Described):
    """Lifecycle of an application that runs on a project's allocations."""

    DEPLOYING = "deploying", "Its members are being prepared; it says what it waits for."
    RUNNING = "running", "Every member is ready."
    FAILED = "failed", "It lost its controller; stop it and make another."
    STOPPED = "stopped", "Ended by request; its keys are removed or have ended."


class MemberStatus(Described):
    """Whether an allocation is ready to work for its application."""

    RECONCILING = "reconciling", "It is being made ready."
    READY = "ready", "The application's controller says that it works."
    FAILED = "failed", "It cannot work; its reason names why."


class OperationStatus(Described):
    """Lifecycle of an operation on a member of an application."""

    ACCEPTED = "accepted", "Recorded; its task has not begun."
    RUNNING = "running", "Its task has a run on the host."
    SUCCEEDED = "succeeded", "Done, as the host says."
    FAILED = "failed", "Not done; its failure has a code."


class AppSlug(Described):
    """Application that an instance runs."""

    SLURM_REFERENCE = "slurm-reference", "Slurm, with one controller and any number of workers."


class MemberRole(Described):
    """Role of a member in its application."""

    CONTROLLER = "controller", "Runs the application's own control; each instance has one."
    WORKER = "worker", "Does the work."


class OperationKind(Described):
    """Kind of an operation on a member."""

    MEMBER_ADD = "member_add", "It joins: the managed key is put on it for the first time."
    BOOTSTRAP_SSH_RECONCILE = (
        "bootstrap_ssh_reconcile",
        "The managed key is put there again, with a later end.",
    )
    BOOTSTRAP_SSH_REMOVE = "bootstrap_ssh_remove", "The managed key is taken away."


class IngressState(Described):
    """Lifecycle of a rule of public ingress."""

    REQUESTED = "requested", "Recorded; the host does not forward yet."
    APPLIED = "applied", "The guest's port has answered, and the host forwards to it."
    REMOVING = "removing", "The host may still forward; the public port stays taken."
    REMOVED = "removed", "The host does not forward any more."
    FAILED = "failed", "The host refused it and does not forward; its failure has a code."


# States in which a rule has its public port.
LIVE_INGRESS = (IngressState.REQUESTED, IngressState.APPLIED, IngressState.REMOVING)


class IngressProtocol(Described):
    """Protocol of a rule of public ingress. A UDP port cannot be proven to answer."""

    TCP = "tcp", "Connections of TCP."


class Role(Described):
    """Role of a token: the party that it speaks for."""

    PLATFORM_ADMIN = "platform-admin", "Runs the platform."
    PROJECT_MEMBER = "project-member", "Uses what belongs to one project."
    NODE = "node", "A machine speaking about itself."


# More attempts would report a permanent failure later.
_ATTEMPTS = 3


class TaskKind(StrEnum):
    """Kind of a task; each kind has its handler in reconciler/work/kinds."""

    # exclusive: the task changes the host itself, so that no other task may run on the node.
    # repeatable: the task only reads, or is idempotent, and its failure changes no record. The
    # failure of any other task is decided by its outcome; a person requests it again.
    exclusive: bool
    attempts: int

    def __new__(cls, value: str, nature: Literal["exclusive", "repeatable", ""] = "") -> TaskKind:
        member = str.__new__(cls, value)
        member._value_ = value
        member.exclusive = nature == "exclusive"
        member.attempts = _ATTEMPTS if nature == "repeatable" else 1
        return member

    SLICE_TOPOLOGY_DISCOVER = "slice.topology_discover", "repeatable"
    SLICE_VM_PROVISION = "slice.vm_provision"
    SLICE_VM_POWER = "slice.vm_power"
    SLICE_VM_RELEASE = "slice.vm_release"
    SLICE_ABSENCE_VERIFY = "slice.absence_verify"
    SLICE_WIPE = "slice.wipe"
    SLICE_DRIFT_RECONCILE = "slice.drift_reconcile", "repeatable"
    SLICE_INGRESS_APPLY = "slice.ingress_apply"
    NODE_ENROL = "node.enrol", "repeatable"
    NODE_BOOTSTRAP = "node.bootstrap", "exclusive"
    NODE_PARITY = "node.parity", "repeatable"
    NODE_BIND_TOPOLOGY = "node.bind_topology", "exclusive"
    NODE_STORAGE_TRANSITION = "node.storage_transition", "exclusive"
    NODE_IMAGE_CACHE = "node.image_cache", "repeatable"
    NODE_CONVERT = "node.convert", "exclusive"
    NODE_REBOOT = "node.reboot", "exclusive"
    NODE_FIRMWARE = "node.firmware", "exclusive"
    NODE_DEPLOY = "node.deploy", "exclusive"
    NODE_RELEASE = "node.release", "exclusive"
    BAREMETAL_PROVISION = "baremetal.provision", "exclusive"
    BAREMETAL_RELEASE = "baremetal.release", "exclusive"
    ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY = "allocation.reconcile_managed_authorized_key"
    TERMINAL_OPEN = "terminal.open"


# Kinds that MAAS carries out, without a run on the host. Between two looks at MAAS such a task
# waits, and its node is busy.
BY_MAAS = (TaskKind.NODE_DEPLOY, TaskKind.NODE_RELEASE)
