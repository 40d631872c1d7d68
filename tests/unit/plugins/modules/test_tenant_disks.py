"""Whatever a tenant made of the disks is undone without force, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.modules import tenant_disks as module

pytestmark = pytest.mark.covers("CTRL-15")

EUI = "5e0000000000a000"
DISK = {
    "slot_id": f"disk-{EUI}",
    "nvme_device": f"/dev/disk/by-id/nvme-eui.{EUI}",
    "nvme_serial": "LABNVME0",
    "nvme_eui": EUI,
    "nvme_size_bytes": 48 << 20,
}
SUBJECT = _change.Subject(module.observe, module.plan, module.apply, module.facts)
MIB = 1 << 20


@pytest.fixture
def host(bench, monkeypatch: pytest.MonkeyPatch):
    """A disk with a partition, and the programs that take it out of use."""
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.calls = []

    def run(argv: Any, **_named: Any) -> Any:
        bench.calls.append(" ".join(argv))
        if argv[0] == "umount":
            bench.unmount(argv[-1])
        elif argv[0] == "swapoff":
            bench.swaps = []
            bench._tables()
        elif argv[0] in ("mdadm", "dmsetup"):
            name = {"data-vol": "dm-0"}.get(argv[-1], argv[-1].rpartition("/")[2])
            for link in bench.root.glob(f"sys/class/block/*/holders/{name}"):
                link.rmdir()
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", run)
    return bench


def free(**more: Any) -> _change.Outcome:
    return _change.drive(SUBJECT, {"fence": 1, "disks": [DISK], **more}, check_mode=False)


def test_a_free_disk_is_left_alone(host) -> None:
    assert free().changed is False and host.calls == []


def test_mounts_swap_and_fstab(host) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    host.mount("259:2", "/home/alice/data", "/dev/nvme1n1p1")
    host.swap("/dev/nvme1n1")
    before = "UUID=1 / ext4 defaults 0 1\n"
    _host.write("/etc/fstab", f"{before}/dev/nvme1n1p1 /data ext4 defaults 0 2\n")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == [
        "umount -- /home/alice/data", "umount -- /data", "swapoff -- /dev/nvme1n1",
        "systemctl daemon-reload",
    ]  # fmt: skip
    # To the byte: the baseline is compared next.
    assert _host.path("/etc/fstab").read_text() == before
    assert done.facts["used"] == {f"disk-{EUI}": []}
    assert free().changed is False


def test_a_volume_on_an_array_comes_apart_from_the_top(host) -> None:
    host.hold("nvme1n1p1", "md127")
    host.hold("md127", "dm-0", uuid="LVM-x")
    (host.root / "sys/class/block/dm-0/dm/name").write_text("data-vol\n")
    host.mount("253:4", "/data", "/dev/mapper/data-vol")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == [
        "umount -- /data",
        "dmsetup remove -- data-vol",
        "mdadm --stop /dev/md127",
    ]


def test_the_system_disk_is_refused(host) -> None:
    host.mount("259:2", "/boot", "/dev/nvme1n1p1")
    outcome = free()
    assert outcome.failure is not None and outcome.failure.code == "os_disk"
    assert host.calls == []


def test_a_disk_of_another_identity_is_refused(host) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    outcome = free(disks=[{**DISK, "nvme_serial": "OTHER"}])
    assert outcome.failure is not None and outcome.failure.code == "identity_mismatch"
    assert host.calls == []
