"""Choice of the lab's accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import machine
from lab.command import LabError


def module(root: Path, name: str, nested: str) -> None:
    """A loaded KVM module."""
    folder = root / "sys/module" / name / "parameters"
    folder.mkdir(parents=True)
    (folder / "nested").write_text(nested + "\n")


def device(root: Path) -> None:
    """The device file, usable."""
    (root / "dev").mkdir()
    (root / "dev/kvm").touch()


def test_the_device_file_alone_means_emulation(tmp_path: Path) -> None:
    device(tmp_path)
    assert machine.choose_accelerator({}, tmp_path) == "tcg"


@pytest.mark.parametrize(("name", "nested"), [("kvm_intel", "Y"), ("kvm_amd", "1")])
def test_a_loaded_module_with_nesting_means_kvm(tmp_path: Path, name: str, nested: str) -> None:
    device(tmp_path)
    module(tmp_path, name, nested)
    assert machine.choose_accelerator({}, tmp_path) == "kvm"


def test_without_nesting_slice_vms_need_emulation(tmp_path: Path) -> None:
    device(tmp_path)
    module(tmp_path, "kvm_intel", "N")
    assert machine.choose_accelerator({}, tmp_path) == "tcg"


def test_a_module_without_the_device_means_emulation(tmp_path: Path) -> None:
    module(tmp_path, "kvm_amd", "1")
    assert machine.choose_accelerator({}, tmp_path) == "tcg"


@pytest.mark.parametrize("requested", machine.ACCELERATORS)
def test_the_override_wins(tmp_path: Path, requested: str) -> None:
    assert (
        machine.choose_accelerator({machine.ACCELERATOR_VARIABLE: requested}, tmp_path) == requested
    )


def test_an_unknown_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="xen"):
        machine.choose_accelerator({machine.ACCELERATOR_VARIABLE: "xen"}, tmp_path)
