"""Hardware of the virtual slice host as QEMU's argument list. Pure: no input or output."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

USERDATA_PORT = "gpuaas.userdata"
MANAGEMENT_MAC = "52:54:00:00:00:01"
FABRIC_MAC = "52:54:00:00:fa:01"
# Addresses of QEMU's user network, as the host sees them.
GATEWAY = "10.0.2.2"

# The GPU stand-in reaches all memory, as a GPU does; the device's default is 28 bits.
EDU_DMA_MASK = (1 << 48) - 1

OS_EUI = 0x5E000000000000FF
DATA_EUI = 0x5E0000000000A000


@dataclass(frozen=True)
class DataDisk:
    """An NVMe data disk. `shared` disks carry a file system that the fresh host has mounted."""

    index: int
    node: int
    multipath: bool = False
    shared: bool = False

    @property
    def serial(self) -> str:
        """Serial number as `nvme id-ctrl` shows it."""
        return f"LABNVME{self.index}"

    @property
    def eui64(self) -> int:
        """EUI-64 as `nvme id-ns` shows it."""
        return DATA_EUI + self.index


GPU_NODES = (0, 0, 1, 1)
DATA_DISKS = (
    DataDisk(0, 0, shared=True),
    DataDisk(1, 0),
    DataDisk(2, 1, shared=True),
    DataDisk(3, 1, multipath=True),
)
DATA_DISK_MIB = 4096


@dataclass(frozen=True)
class Machine:
    """A lab host: its files, ports and size. Lost GPUs, by index, are not there at this boot."""

    folder: Path
    firmware_code: Path
    accel: str
    ssh_port: int
    cpus_per_node: int = 1
    memory_mib: int = 6144
    lost_gpus: frozenset[int] = frozenset()
    extra: list[str] = field(default_factory=list)

    @property
    def qmp(self) -> Path:
        """Control socket."""
        return self.folder / "qmp.sock"

    @property
    def userdata(self) -> Path:
        """The trusted channel's socket."""
        return self.folder / "userdata.sock"

    @property
    def pid_file(self) -> Path:
        """Pid file; QEMU writes it, and removes it at an orderly end."""
        return self.folder / "qemu.pid"

    @property
    def os_disk(self) -> Path:
        """OS disk, an overlay over the cached image."""
        return self.folder / "os.qcow2"

    @property
    def firmware_variables(self) -> Path:
        """This lab's copy of the UEFI variables."""
        return self.folder / "vars.fd"

    def data_disk(self, disk: DataDisk) -> Path:
        """Return the file behind a data disk."""
        return self.folder / f"nvme{disk.index}.raw"


def arguments(machine: Machine) -> list[str]:
    """Return all of QEMU's arguments for this machine."""
    return [
        # No screen, DVD drive or floppy: each costs time at boot.
        "-nodefaults",
        "-display",
        "none",
        *_processor(machine),
        *_firmware(machine),
        *_bridges(),
        *_os_disk(machine),
        *_data_disks(machine),
        *_gpus(machine),
        *_fabric(),
        *_management(machine),
        *_channels(machine),
        *machine.extra,
    ]


def _processor(machine: Machine) -> list[str]:
    count = machine.cpus_per_node
    # With either CPU the host gets an IOMMU and a /dev/kvm that can nest. When a device is switched
    # on or off, QEMU's emulation may send a processor's access to another device (seen in 11.1).
    # The registers of an x2APIC, which are accessed most, are not in memory.
    cpu = ["host"] if machine.accel == "kvm" else ["EPYC,+svm,+x2apic"]
    # With one thread for all processors, two guests get in each other's way and do not come up.
    accel = "kvm" if machine.accel == "kvm" else "tcg,thread=multi"
    words = ["-machine", "q35,kernel-irqchip=split", "-accel", accel, "-cpu", *cpu]
    words += ["-smp", f"{2 * count},sockets=2,cores={count},threads=1"]
    words += ["-m", f"{machine.memory_mib}M"]
    for node in (0, 1):
        words += ["-object", f"memory-backend-ram,id=mem{node},size={machine.memory_mib // 2}M"]
        first, last = node * count, node * count + count - 1
        words += ["-numa", f"node,nodeid={node},memdev=mem{node},cpus={first}-{last}"]
    words += ["-device", "intel-iommu,intremap=on,eim=on,caching-mode=on"]
    # The registers at each reset go to QEMU's log. A triple fault shows its cause only there.
    return [*words, "-d", "cpu_reset"]


def _firmware(machine: Machine) -> list[str]:
    flash = "if=pflash,format=raw"
    return [
        "-drive", f"{flash},unit=0,readonly=on,file={machine.firmware_code}",
        "-drive", f"{flash},unit=1,file={machine.firmware_variables}",
    ]  # fmt: skip


def _bridges() -> list[str]:
    """Add a PCIe host bridge per NUMA node. The OS disk sits apart from both, like a boot card.

    Pin interrupts from below these bridges do not arrive in Linux, because QEMU's ACPI tables name
    other lines than its q35 drives. Passed-through devices must therefore use MSI, as real GPUs do.
    """
    words = ["-device", "pcie-root-port,id=port.os,chassis=1,slot=1,bus=pcie.0"]
    for node, bus in ((0, 0x20), (1, 0x40)):
        words += ["-device", f"pxb-pcie,id=node{node},bus_nr={bus},bus=pcie.0,numa_node={node}"]
    return words


def _port(name: str, node: int, chassis: int) -> list[str]:
    # A root port per device gives each device its own IOMMU group.
    return [
        "-device",
        f"pcie-root-port,id=port.{name},chassis={chassis},slot={chassis},bus=node{node}",
    ]


def _drive(name: str, file: Path, image_format: str) -> list[str]:
    # writeback: flushed data survives a power cut, unflushed data is lost.
    return ["-drive", f"if=none,id={name},file={file},format={image_format},cache=writeback"]


def _os_disk(machine: Machine) -> list[str]:
    return [
        *_drive("os", machine.os_disk, "qcow2"),
        "-device", "nvme,id=nvme.os,serial=LABOS,bus=port.os",
        "-device", f"nvme-ns,drive=os,bus=nvme.os,eui64={OS_EUI:#x},bootindex=0",
    ]  # fmt: skip


def _data_disks(machine: Machine) -> list[str]:
    words: list[str] = []
    for disk in DATA_DISKS:
        name = f"data{disk.index}"
        subsystem = ""
        if disk.multipath:
            # With this, Linux shows the member nvme<subsystem>c<controller>n1, which must never be
            # used.
            words += ["-device", f"nvme-subsys,id=subsys.{name}"]
            subsystem = f",subsys=subsys.{name}"
        words += _port(name, disk.node, 10 + disk.index)
        words += _drive(name, machine.data_disk(disk), "raw")
        words += ["-device", f"nvme,id=nvme.{name},serial={disk.serial},bus=port.{name}{subsystem}"]
        words += ["-device", f"nvme-ns,drive={name},bus=nvme.{name},eui64={disk.eui64:#x}"]
    return words


def _gpus(machine: Machine) -> list[str]:
    words: list[str] = []
    for index, node in enumerate(GPU_NODES):
        words += _port(f"gpu{index}", node, 20 + index)
        if index in machine.lost_gpus:
            continue
        words += ["-device", f"edu,id=gpu{index},bus=port.gpu{index},dma_mask={EDU_DMA_MASK:#x}"]
    return words


def _fabric() -> list[str]:
    return [
        *_port("fabric", 0, 30),
        "-netdev", "user,id=fabric,restrict=on",
        "-device", f"igb,id=fabric0,netdev=fabric,bus=port.fabric,mac={FABRIC_MAC},romfile=",
    ]  # fmt: skip


def _management(machine: Machine) -> list[str]:
    # Without bus=pcie.0 the device lands on a NUMA bridge and QEMU refuses it.
    forward = f"hostfwd=tcp:127.0.0.1:{machine.ssh_port}-:22"
    return [
        "-netdev", f"user,id=management,{forward}",
        "-device",
        f"virtio-net-pci,bus=pcie.0,netdev=management,mac={MANAGEMENT_MAC},romfile=",
        "-device", "virtio-rng-pci,bus=pcie.0",
    ]  # fmt: skip


def _channels(machine: Machine) -> list[str]:
    folder = machine.folder
    return [
        "-device", "virtio-serial-pci,id=channels,bus=pcie.0",
        "-chardev", f"socket,id=userdata,path={machine.userdata},server=on,wait=off",
        "-device", f"virtserialport,bus=channels.0,chardev=userdata,name={USERDATA_PORT}",
        "-chardev", f"file,id=console,path={folder}/console.log,append=on",
        "-serial", "chardev:console",
        "-qmp", f"unix:{machine.qmp},server=on,wait=off",
        "-pidfile", str(machine.pid_file),
    ]  # fmt: skip
