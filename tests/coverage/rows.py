"""The rows of the requirements and the invariants, in short, and the documents that show them.

A further document is one more entry in DOCUMENTS.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """hardware: what of the row has not been run on hardware; "" when nothing of it needs any."""

    id: str
    title: str
    hardware: str


@dataclass(frozen=True)
class Document:
    """path: relative to the repository. intro: what a reader must know before the table."""

    path: str
    title: str
    intro: str
    rows: tuple[Row, ...]


HOST = Document(
    path="docs/host-coverage.md",
    title="What shows that a machine becomes a slice host",
    intro=(
        'A "yes" means that tests of `make test` show something of the row, a "long" that only'
        " `make test-long` does; its section names what. The lab host"
        " is a virtual machine with a virtual IOMMU, NVMe disks, an SR-IOV card and GPU stand-ins."
        " Nothing here has been run on a server with H200 GPUs, BlueField-3 cards and an iDRAC: the"
        " last column says what only such a server can show."
    ),
    rows=(
        Row(
            "HOST-1",
            "Firmware preflight and BIOS changes through RACADM",
            "RACADM, job queue and power cycle of an iDRAC",
        ),
        Row(
            "HOST-2",
            "RACADM from Dell's signed repository",
            "installation from Dell's own repository",
        ),
        Row("HOST-3", "The same BIOS plan through Redfish", "the Redfish service of an iDRAC"),
        Row(
            "HOST-4",
            "Bootstrap: packages, kernel arguments, VFIO, libvirt, quiet GPU services, reboot",
            "NVIDIA's services and drivers; an AMD host",
        ),
        Row("HOST-5", "Tuned profiles, off by default", "512 pages of 1 GiB; `ib_ipoib` queues"),
        Row(
            "HOST-6",
            "Network baseline, kept over reboots and repaired",
            "`tmfifo_net0` and `rshim` of a BlueField-3",
        ),
        Row(
            "HOST-7",
            "Fabric: virtual functions, IPoIB, route, QoS",
            "InfiniBand: GUIDs, IPoIB, QoS of a BlueField-3; its VF as management NIC"
            " (`vf_representor`) is not built and refused by name",
        ),
        Row(
            "HOST-8",
            "VFIO binding from the approved topology, kept and undone",
            "H200 and NVSwitch groups; reset of a GPU",
        ),
        Row(
            "HOST-9",
            "Storage transition by stable identity",
            "drives that refuse an erase method; boot RAID cards",
        ),
        Row(
            "HOST-10",
            "Parity check, with a remediation for every failure",
            "the checks of what the rows above name",
        ),
        Row(
            "HOST-11",
            "Topology discovery",
            "H200, NVSwitch and BlueField-3 functions; PCIe switches",
        ),
        Row(
            "HOST-12",
            "Benchmark capture, bare metal against VM",
            "FP64, HBM, RDMA and vLLM figures",
        ),
        Row("HOST-13", "Enrolment and certified host keys", "userdata handed out by MAAS"),
        Row("HOST-14", "Control-plane names resolve on the host", ""),
        Row(
            "HOST-15", "Conversion both ways", "a return to bare metal with NVIDIA's drivers; MAAS"
        ),
    ),
)

CONTROL = Document(
    path="docs/control-coverage.md",
    title="What shows that the reconciler can be relied on",
    intro=(
        'A "yes" means that tests of `make test` show something of the row, a "long" that only'
        ' `make test-long` does; its section names what, and "nothing yet" means that no test names'
        " the row. CTRL rows are what the reconciler does, I rows are"
        " invariants: what must hold whatever goes wrong. Databases, processes, sockets and kills"
        " are real without a lab host too; hosts are scripted there, and AWX and the OIDC provider"
        " are servers of the tests that answer like them. A run of ours on an AWX or at a provider"
        " of somebody else is nowhere."
    ),
    rows=(
        Row("CTRL-1", "OpenAPI and AsyncAPI, checked against the running service", ""),
        Row("CTRL-2", "One schema and migration history, on SQLite and PostgreSQL", ""),
        Row("CTRL-3", "Candidates, approved slots, and the gate before `available`", ""),
        Row("CTRL-4", "Claims as the source of truth, committed with all that they change", ""),
        Row("CTRL-5", "Slice scheduler: one node, best fit, explained, off until switched on", ""),
        Row("CTRL-6", "Slot states and health, every change with reason and evidence", ""),
        Row("CTRL-7", "Recovery: the runbook, as one command and as a policy", ""),
        Row("CTRL-8", "Tasks with steps, progress, timeline, waiting and cancel", ""),
        Row("CTRL-9", "Playbook runs that outlive any crash of the reconciler; AWX", ""),
        Row("CTRL-10", "Projects, roles, tokens and OIDC; no host details for users; audit", ""),
        Row("CTRL-12", "Drain and maintenance of nodes; return to bare metal", ""),
        Row("CTRL-14", "Usage records from immutable claim snapshots", ""),
        Row("CTRL-15", "Bare-metal allocations with wipe proof", "deploy and release by MAAS"),
        Row("I1", "One live claim per slot, GPU, disk, fabric VF, MAC and IP address", ""),
        Row("I2", "Whole-machine and slice claims of a node exclude each other", ""),
        Row("I3", "Claim, slot, allocation, history, audit and outbox commit together", ""),
        Row("I4", "`available` only with a wipe proof newer than the last use", ""),
        Row("I5", "The proof is checked again before the clone", ""),
        Row("I6", "A failure from the clone onwards ends in `cleanup_blocked`", ""),
        Row("I7", "Destruction only on a disk opened exclusively and identified", ""),
        Row("I8", "No forced variant of a destructive command in the repository", ""),
        Row("I9", "An old leader commits nothing", ""),
        Row("I10", "Hosts keep the highest fence; a late run is refused", ""),
        Row("I11", "Every step and every undo done twice equals once", ""),
        Row("I12", "After a crash, a stable or blocked state in time, without SQL", ""),
        Row("I13", "Timeout and lost contact mean unknown, which frees nothing", ""),
        Row("I14", "Drift reconciliation frees nothing on an old snapshot", ""),
        Row("I15", "A guest that shuts itself down keeps its claim", ""),
        Row("I16", "After a reboot nothing is schedulable until parity passes", ""),
        Row("I17", "Release leaves nothing of the slice, measured", ""),
        Row("I18", "Devices return bound to vfio-pci and answering", "reset of an H200 or a VF"),
        Row("I20", "One history row for every state change; audit is append-only", ""),
        Row("I21", "The same idempotency key, the same answer", ""),
        Row("I22", "Leases are compared on the database's clock only", ""),
    ),
)

APPS = Document(
    path="docs/apps-coverage.md",
    title="What shows that applications reach their members",
    intro=(
        'A "yes" means that tests of `make test` show something of the row. Databases, files, links'
        " and owners are real; a real sshd judges the key, and Ansible plays the playbook on a copy"
        " of the machine that tests. What the reconciler meets is a scripted run."
    ),
    rows=(
        Row("APP-4", "The managed key: put there, renewed, taken away, by a task", ""),
        Row("APP-5", "SSH dials `connection.host`; `hostname` is for people", ""),
    ),
)

DOCUMENTS = (HOST, CONTROL, APPS)
KNOWN = frozenset(row.id for document in DOCUMENTS for row in document.rows)
