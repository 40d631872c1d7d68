"""Whole-machine tenancy: no action turns the machine into a slice host meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _gpu_services,
    _kernel_arguments,
    _slice_mode,
    _vfio_bind,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy
from ansible_collections.gpuaas.slice.plugins.modules import kernel_arguments, vfio_bind

pytestmark = pytest.mark.covers("HOST-4", "HOST-15")

TENANT = "23bd713b-6073-4ef7-8a51-2897e902365d"
SERVICE = "nvidia-persistenced.service"
SHOW = ("systemctl", "show", "--property=ActiveState,UnitFileState", "--", SERVICE)
LOUD, QUIET = "ActiveState=active\nUnitFileState=enabled\n", "ActiveState=inactive\n"
KERNEL: dict[str, Any] = {"arguments": ["iommu=pt"], "in_effect": False}
GPU = "0000:43:00.0"
BIND: dict[str, Any] = {"gpu_ids": ["10de:2335"], "pf_ids": [], "exclusive": False}


@pytest.fixture
def tenant(tree: Path) -> None:
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id=TENANT, disk_identity="")
    _ledger.mark_dirty(_ledger.MACHINE, fence=1, disk_identity="")


def refused(subject: _change.Subject, **params: Any) -> bool:
    """Return whether the action is refused with its code, and without any change."""
    for check_mode in (True, False):
        failure = _change.drive(subject, params, check_mode=check_mode).failure
        if failure is None or failure.code != "machine_leased":
            return False
        assert TENANT in failure.found and "release" in failure.remedy
    return True


def test_it_is_not_put_into_slice_mode(tree: Path, tenant: None) -> None:
    assert refused(_slice_mode.SUBJECT, profile="lab")
    assert _host.read(_host_mode.MARKER) is None


def test_a_word_for_slices_can_always_be_taken_back(tree: Path) -> None:
    """A leftover mark would block the tenant's release, because baremetal_lease refuses a slice
    host."""
    _host.write(_host_mode.MARKER, '{"mode": "slice"}\n')
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id=TENANT, disk_identity="")
    outcome = _change.drive(_slice_mode.SUBJECT, {"state": "absent"}, check_mode=False)
    assert (outcome.failure, _host.read(_host_mode.MARKER)) == (None, None)


def test_a_word_that_cannot_be_read_is_there(tree: Path) -> None:
    (tree / _host_mode.MARKER.lstrip("/")).mkdir(parents=True)
    with pytest.raises(_host.Refusal, match="file_unreadable"):
        _change.drive(_slice_mode.SUBJECT, {"state": "absent"}, check_mode=False)


def test_its_gpu_services_are_its_own(tenant: None, script: Any) -> None:
    script.on(*SHOW, out=LOUD)
    assert refused(_gpu_services.SUBJECT, services=[SERVICE])
    assert {call[1] for call in script.calls} == {"show"}


def test_quiet_services_are_no_leave_to_go_on(tenant: None, script: Any) -> None:
    script.on(*SHOW, out=QUIET)
    assert refused(_gpu_services.SUBJECT, services=[SERVICE])


def test_services_are_not_given_back_under_a_tenant(tree: Path, script: Any) -> None:
    script.on(*SHOW, out=LOUD).on(*SHOW, out=QUIET)
    script.on("systemctl", "disable", "--runtime", "--", SERVICE)
    for verb in ("disable", "stop", "mask"):
        script.on("systemctl", verb, "--", SERVICE)
    quiesced = _change.drive(_gpu_services.SUBJECT, {"services": [SERVICE]}, check_mode=False)
    assert quiesced.failure is None and SERVICE in quiesced.facts["before"]
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id=TENANT, disk_identity="")
    assert refused(_gpu_services.SUBJECT, services=[], state="restored")


def test_nothing_to_give_back_is_no_refusal(tenant: None, script: Any) -> None:
    params = {"services": [], "state": "restored"}
    assert _change.drive(_gpu_services.SUBJECT, params, check_mode=False).failure is None


def test_its_boot_stays_as_it_is(tree: Path, tenant: None, script: Any) -> None:
    assert refused(kernel_arguments.SUBJECT, state="present", **KERNEL)
    _host.write(_kernel_arguments.DROP_IN, 'GRUB_CMDLINE_LINUX="iommu=pt"\n')
    assert refused(kernel_arguments.SUBJECT, state="absent", **KERNEL)
    assert _host.read(_kernel_arguments.DROP_IN) is not None and script.calls == []


def test_a_refusal_does_not_tell_what_a_boot_would_have_come_to(
    tree: Path, tenant: None, script: Any
) -> None:
    _host.write("/proc/sys/kernel/random/boot_id", "this\n")
    for check_mode in (True, False):
        params = {"state": "present", **KERNEL}
        refusal = _change.drive(kernel_arguments.SUBJECT, params, check_mode=check_mode)
        assert refusal.facts["reboot_reasons"] == ["not booted with iommu=pt"]


@pytest.mark.covers("HOST-8")
def test_its_devices_keep_their_drivers(
    tree: Path, pci: Any, tenant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    (tree / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    _host.write(_host_mode.MARKER, '{"mode": "slice"}')
    silent = _boot_service.Service(active=False, enabled=False, started_at=0)
    monkeypatch.setattr(_boot_service, "services", lambda names: dict.fromkeys(names, silent))
    assert refused(vfio_bind.SUBJECT, addresses=[GPU], state="bound", **BIND)
    # The service of an earlier slice host, at a boot under the tenant.
    _host.write(_vfio_bind.SETTINGS, f'{{"devices": {{"{GPU}": "10de:2335"}}}}')
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) == 1
    assert pci.driver(GPU) == "nouveau"


def test_a_mark_without_a_name_counts(tree: Path, tenant: None) -> None:
    """The tenant was root, and may have removed its name from the ledger."""
    _ledger.release(_ledger.MACHINE, fence=1)
    outcome = _change.drive(_slice_mode.SUBJECT, {"profile": "lab"}, check_mode=False)
    assert outcome.failure.code == "machine_leased"


def test_without_a_tenant_nothing_is_in_the_way(tree: Path) -> None:
    assert _change.drive(_slice_mode.SUBJECT, {"profile": "lab"}, check_mode=False).done


def test_what_puts_back_what_was_done_is_kept(tree: Path) -> None:
    """A guard changes observation and refusal, and nothing else of its subject."""

    def fails(_params: _change.Params, _step: _change.Step) -> None:
        raise _host.Refusal("no", expected="", found="", remedy="")

    def recover(_params: Any, _done: Any, _failed: Any, refusal: _host.Refusal) -> _host.Refusal:
        return _host.Refusal("put_back", expected="", found="", remedy=refusal.code)

    plan = _change.Plan((_change.Step("do_it", "this"),))
    subject = _change.Subject(lambda _p: None, lambda _p, _s: plan, fails, recover=recover)
    guarded = _tenancy.guarded(subject, lambda _params, _plan: True)
    failure = _change.drive(guarded, {}, check_mode=False).failure
    assert failure is not None and (failure.code, failure.remedy) == ("put_back", "no")
