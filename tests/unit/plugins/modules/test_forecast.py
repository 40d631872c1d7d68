"""Check mode of the modules: an apply does exactly the steps that check mode announced.

In each case the module has something to do on the host; its programs come from the module's own
tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _gpu_services,
    _host_packages,
    _host_tuning,
    _kernel_arguments,
    _libvirt_host,
    _module_cache,
    _slice_mode,
    _tuning_profiles,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _fstab_entries,
    _image_cache,
    _takeover,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _ipoib_address, _sriov_vfs
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _api_names,
    _ovs_nat,
    _ovs_nat_removal,
    _slice_network,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq, _reservation
from ansible_collections.gpuaas.slice.plugins.modules import (
    fstab_entries,
    image_cache,
    kernel_arguments,
    tenant_disks,
)

from tests.unit.plugins.module_utils.boot.test_gpu_services import Systemd
from tests.unit.plugins.module_utils.boot.test_host_tuning import Kernel
from tests.unit.plugins.module_utils.boot.test_kernel_arguments import Machine as Boot
from tests.unit.plugins.module_utils.fabric.test_ipoib_address import PARAMS as ADDRESS
from tests.unit.plugins.module_utils.fabric.test_ipoib_address import Fabric
from tests.unit.plugins.module_utils.fabric.test_virtual_functions import PF, Card
from tests.unit.plugins.module_utils.network.test_ovs_nat_removal import PARAMS as NETWORK
from tests.unit.plugins.module_utils.network.test_ovs_nat_removal import Host

pytestmark = pytest.mark.covers("HOST-4", "HOST-5", "HOST-6", "HOST-7", "HOST-15")

Case = tuple[_change.Subject, dict[str, Any]]
MIB = 1 << 20


class Site:
    """Host of a case: its root, and pytest's means to replace programs."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.ask = request.getfixturevalue
        self.tree: Path = self.ask("tree")
        self.patch: pytest.MonkeyPatch = self.ask("monkeypatch")

    def runs(self, run: Callable[[Sequence[str]], str]) -> None:
        """Define programs by their answers."""

        def answer(argv: Sequence[str], **_more: Any) -> _command.Result:
            return _command.Result(0, run(argv), "")

        self.patch.setattr(_command, "run", answer)


class Units:
    """systemctl of a host: enabled and active units."""

    def __init__(self) -> None:
        self.enabled: set[str] = set()
        self.active: set[str] = set()

    def run(self, argv: Sequence[str]) -> str:
        name, verb = argv[-1], argv[1]
        if verb == "show":
            return "\n\n".join(map(self._shown, argv[argv.index("--") + 1 :]))
        if verb == "enable":
            self.enabled.add(name)
        if verb in ("restart", "start") or "--now" in argv:
            self.active.add(name)
        if verb == "disable":
            self.enabled -= set(argv)
            self.active -= set(argv)
        return ""

    def _shown(self, name: str) -> str:
        active = "active" if name in self.active else "inactive"
        enabled = "enabled" if name in self.enabled else "disabled"
        return f"ActiveState={active}\nUnitFileState={enabled}\nActiveEnterTimestamp=@9999999999"


def subject_of(module: Any) -> _change.Subject:
    return _change.Subject(module.observe, module.plan, module.apply, module.facts)


def ovs_nat(site: Site) -> Case:
    Host(site.tree, site.patch)
    return subject_of(_ovs_nat), NETWORK


def ovs_nat_absent(site: Site) -> Case:
    assert _change.drive(*ovs_nat(site), check_mode=False).failure is None
    return _ovs_nat_removal.SUBJECT, NETWORK


def sriov_vfs(site: Site) -> Case:
    pci, units = site.ask("pci"), Units()
    pci.add(PF, "8086:10c9", class_code="020000", driver="igb", totalvfs=7, interface="ens30")
    card = Card(pci, site.patch)
    site.runs(lambda argv: units.run(argv) if argv[0] == "systemctl" else card.run(list(argv)).out)
    return _sriov_vfs.SUBJECT, {
        "pfs": [],
        "pf_ids": ["8086:10c9"],
        "link": "ethernet",
        "count": 2,
        "macs": {},
        "idle_vlan": 0,
    }


def sriov_vfs_none(site: Site) -> Case:
    subject, params = sriov_vfs(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    return subject, {**params, "count": 0}


def host_tuning(site: Site) -> Case:
    Kernel(site.tree, site.patch)
    return _host_tuning.SUBJECT, {"profiles": [_tuning_profiles.NETWORK]}


def host_tuning_off(site: Site) -> Case:
    subject, params = host_tuning(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    return subject, {"profiles": []}


def libvirt_host(site: Site) -> Case:
    (site.tree / "var/lib/libvirt").mkdir(parents=True, mode=0o700)
    site.runs(Units().run)
    return _libvirt_host.SUBJECT, {"directory": "/var/lib/libvirt", "state": "present"}


def libvirt_host_absent(site: Site) -> Case:
    subject, params = libvirt_host(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    return subject, {**params, "state": "absent"}


def ipoib_address(site: Site) -> Case:
    Fabric(site.patch)
    return _ipoib_address.SUBJECT, {**ADDRESS, "state": "present"}


def reservation_present(site: Site) -> Case:
    site.runs(lambda _argv: "")
    site.patch.setattr(_slice_network, "dnsmasq_pid", lambda: 77)
    site.patch.setattr(_dnsmasq, "reload", lambda: None)
    return _reservation.SUBJECT, {
        "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d",
        "mac": "52:54:00:64:00:0d",
        "ip": "10.100.0.13",
        "bridge": "ovsbr0",
        "state": "present",
    }


def reservation_absent(site: Site) -> Case:
    subject, params = reservation_present(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    _host.write(_dnsmasq.LEASES, "1700000000 52:54:00:64:00:0d 10.100.0.13 trainer *\n")
    tracked = ["tcp 6"]

    def run(argv: Sequence[str]) -> str:
        if argv[:2] == ["conntrack", "-D"]:
            tracked.clear()
        return "".join(f"{line}\n" for line in tracked if argv[:2] == ["conntrack", "-L"])

    def release(_interface: str, _lease: _dnsmasq.Lease) -> str:
        _host.write(_dnsmasq.LEASES, "")
        return "released"

    site.runs(run)
    site.patch.setattr(_dnsmasq, "release", release)
    return subject, {**params, "state": "absent"}


def tenant_disks_used(site: Site) -> Case:
    bench = site.ask("bench")
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.mount("259:2", "/data", "/dev/nvme1n1p1")
    bench.swap("/dev/nvme1n1")
    _host.write(
        "/etc/fstab", "UUID=1 / ext4 defaults 0 1\n/dev/nvme1n1p1 /data ext4 defaults 0 2\n"
    )

    def run(argv: Sequence[str]) -> str:
        if argv[0] == "umount":
            bench.unmount(argv[-1])
        elif argv[0] == "swapoff":
            bench.swaps = []
            bench._tables()
        return ""

    site.runs(run)
    # The backup's name contains the time.
    site.patch.setattr(_takeover, "stamp", lambda: "20260417152532")
    eui = "5e0000000000a000"
    disk = {
        "slot_id": f"disk-{eui}",
        "nvme_device": f"/dev/disk/by-id/nvme-eui.{eui}",
        "nvme_serial": "LABNVME0",
        "nvme_eui": eui,
        "nvme_size_bytes": 48 * MIB,
    }
    return subject_of(tenant_disks), {"fence": 1, "disks": [disk]}


def host_packages(site: Site) -> Case:
    installed = {"zstd"}

    def run(argv: Sequence[str]) -> str:
        if argv[0] == "dpkg-query":
            return "".join(f"installed {name}\n" for name in argv if name in installed)
        if "install" in argv:
            installed.update(argv[argv.index("--") + 1 :])
        return ""

    site.runs(run)
    return _host_packages.SUBJECT, {"packages": ["ovmf", "zstd", "dnsmasq"]}


def fstab_back(site: Site) -> Case:
    line = "/dev/nvme1n1p1 /share ext4 defaults 0 2"
    _host.write(_fstab_entries.FILE, f"UUID=root / ext4 defaults 0 1\n{line}\n")
    _fstab_entries.disable([line], backup="/etc/fstab.before")
    (site.tree / "sys/class/block/nvme1n1p1").mkdir(parents=True)
    return subject_of(fstab_entries), {}


def image_present(site: Site) -> Case:
    content = b"image" + bytes(MIB - 5)
    (site.tree / "images").mkdir()
    (site.tree / "images/slice.raw").write_bytes(content)
    return image_cache.SUBJECT, {
        "name": "slice",
        "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "size_bytes": len(content),
        "url": "file:///images/slice.raw",
        "compression": "none",
        "state": "present",
    }


def image_absent(site: Site) -> Case:
    subject, params = image_present(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    assert _image_cache.verified(_image_cache.path_of(params["digest"])) is not None
    return subject, {**params, "state": "absent"}


def kernel_arguments_new(site: Site) -> Case:
    Boot(site.tree, site.patch)
    return kernel_arguments.SUBJECT, {
        "arguments": ["intel_iommu=on", "iommu=pt"],
        "state": "present",
        "in_effect": False,
    }


def kernel_arguments_amd(site: Site) -> Case:
    subject, params = kernel_arguments_new(site)
    (site.tree / "sys/firmware/acpi/tables/DMAR").rename(
        site.tree / "sys/firmware/acpi/tables/IVRS"
    )
    return subject, params


def kernel_arguments_booted(site: Site) -> Case:
    subject, params = kernel_arguments_new(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    _host.write("/proc/cmdline", "root=UUID=x ro intel_iommu=on iommu=pt\n")
    _host.write("/proc/sys/kernel/random/boot_id", "the next\n")
    return subject, params


def kernel_arguments_edited(site: Site) -> Case:
    subject, params = kernel_arguments_booted(site)
    # Initramfs and menu come from other inputs, and a module was taken out.
    _host.write(_kernel_arguments.INITRAMFS_RECORD, "{}\n")
    _host.write("/boot/grub/grub.cfg", "\tlinux\t/boot/vmlinuz-6.1 root=UUID=x ro quiet\n")
    (site.tree / "sys/module/vfio").rmdir()
    return subject, params


def kernel_arguments_absent(site: Site) -> Case:
    subject, params = kernel_arguments_booted(site)
    return subject, {**params, "state": "absent"}


def gpu_services(site: Site) -> Case:
    Systemd(site.patch, a="active/enabled", b="failed/enabled-runtime", c="active/static")
    names = ["a.service", "b.service", "c.service", "d.service"]
    return _gpu_services.SUBJECT, {"services": names, "state": "quiesced"}


def gpu_services_restored(site: Site) -> Case:
    subject, params = gpu_services(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    return subject, {"services": [], "state": "restored"}


def slice_mode(_site: Site) -> Case:
    return _slice_mode.SUBJECT, {"profile": "lab", "state": "present"}


def slice_mode_other(site: Site) -> Case:
    assert _change.drive(*slice_mode(site), check_mode=False).failure is None
    return _slice_mode.SUBJECT, {"profile": "xe9680l-h200", "state": "present"}


def slice_mode_absent(site: Site) -> Case:
    assert _change.drive(*slice_mode(site), check_mode=False).failure is None
    return _slice_mode.SUBJECT, {"profile": None, "state": "absent"}


def module_cache(_site: Site) -> Case:
    return _module_cache.SUBJECT, {"state": "present"}


def module_cache_absent(site: Site) -> Case:
    assert _change.drive(*module_cache(site), check_mode=False).failure is None
    return _module_cache.SUBJECT, {"state": "absent"}


def api_names(_site: Site) -> Case:
    _host.write(_api_names.HOSTS, "# manage_etc_hosts\n127.0.0.1 localhost\n")
    _host.write(_api_names.TEMPLATE, "## template:jinja\n127.0.0.1 localhost")
    return _api_names.SUBJECT, {"names": {"api.gpuaas.invalid": "192.0.2.20"}}


def api_names_edited(site: Site) -> Case:
    subject, params = api_names(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    hosts, template = _host.path(_api_names.HOSTS), _host.path(_api_names.TEMPLATE)
    # hosts: half a block, followed by a line of the site. template: the block twice.
    end = "# gpuaas.slice: end\n"
    hosts.write_text(hosts.read_text().replace(end, "192.0.2.7 site\n"))
    template.write_text(template.read_text() * 2)
    return subject, params


def api_names_none(site: Site) -> Case:
    subject, params = api_names(site)
    assert _change.drive(subject, params, check_mode=False).failure is None
    return subject, {"names": {}}


CASES = [
    ovs_nat, ovs_nat_absent, sriov_vfs, sriov_vfs_none, host_tuning, host_tuning_off, libvirt_host,
    libvirt_host_absent, ipoib_address, reservation_present, reservation_absent,
    tenant_disks_used, host_packages, fstab_back, image_present, image_absent,
    kernel_arguments_new, kernel_arguments_amd, kernel_arguments_edited, kernel_arguments_absent,
    gpu_services, gpu_services_restored, slice_mode, slice_mode_other, slice_mode_absent, api_names,
    api_names_edited, api_names_none, module_cache, module_cache_absent,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_an_apply_does_what_check_mode_said(
    request: pytest.FixtureRequest, case: Callable[[Site], Case]
) -> None:
    site = Site(request)
    subject, params = case(site)
    before = files(site.tree)
    forecast = _change.drive(subject, params, check_mode=True)
    assert (forecast.failure, forecast.changed, forecast.done) == (None, True, [])
    assert files(site.tree) == before
    # A program with an effect would change the second forecast.
    assert forecast_of(_change.drive(subject, params, check_mode=True)) == forecast_of(forecast)

    outcome = _change.drive(subject, params, check_mode=False)
    assert outcome.failure is None, outcome.failure
    assert forecast_of(outcome) == forecast_of(forecast)
    assert outcome.done == [step.name for step in forecast.plan.steps]
    # The file then has the content that the diff shows.
    for step in forecast.plan.steps:
        if step.name == "write_file":
            assert _host.kept(step.subject) == (step.after and step.after.strip())
    # Check mode also says whether a reboot must follow.
    assert reboot(forecast) == reboot(outcome)

    again = _change.drive(subject, params, check_mode=True)
    assert (again.failure, again.changed, forecast_of(again)["plan"]) == (None, False, [])


def forecast_of(outcome: _change.Outcome) -> dict[str, Any]:
    document = outcome.document()
    return {key: document[key] for key in ("changed", "plan", "diff")}


def reboot(outcome: _change.Outcome) -> dict[str, Any]:
    return {key: value for key, value in outcome.facts.items() if key.startswith("reboot_")}


def files(tree: Path) -> dict[str, tuple[int, bytes | str]]:
    """Return everything below a root: kind and content."""
    snapshot: dict[str, tuple[int, bytes | str]] = {}
    for path in tree.rglob("*"):
        content: bytes | str = ""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        snapshot[str(path.relative_to(tree))] = (path.lstat().st_mode, content)
    return snapshot
