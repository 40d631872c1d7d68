"""Release verifier of MAAS: each disk of a slot reads as zeros, or the release fails by name."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _disk
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _release_check

from scripts import standalone

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]

pytestmark = pytest.mark.covers("ECO-3")

MIB = 1 << 20
SUMMARY = "GPUAAS_SLICE_RELEASE_SUMMARY"


def verify(capsys: pytest.CaptureFixture[str], **settings: str) -> tuple[int, list[str]]:
    """Exit code and lines of the program."""
    names = {f"GPUAAS_SLICE_{name}": text for name, text in settings.items()}
    code = _release_check.main(["--root", str(_host.ROOT)], names)
    return code, capsys.readouterr().out.splitlines()


def test_disks_of_zeros_pass_and_the_operating_systems_disk_is_not_read(
    bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.disk(size=64 * MIB)
    bench.disk("nvme2n1", size=64 * MIB, minor=2, eui="5e0000000000a002")
    bench.disk("nvme0n1", minor=3, eui="5e0000000000b055", model="Dell BOSS-N1")
    bench.write("nvme0n1", 0, b"an operating system")
    code, lines = verify(capsys, GPU_EXPECTED="2")
    assert code == 0
    assert lines[-1] == f"{SUMMARY} status=PASS disks=2 failures=0"
    assert [line.split()[1] for line in lines[:-1]] == ["status=PASS", "status=PASS", "status=SKIP"]
    code, lines = verify(capsys, NVME_EXCLUDE="QEMU")
    # Without any disk of a slot nothing is shown.
    assert (code, lines[-1]) == (1, f"{SUMMARY} status=FAIL disks=0 failures=1")


@pytest.mark.parametrize("place", [0, 20 * MIB, 64 * MIB - 1])
def test_bytes_that_a_tenant_left_fail(
    bench, capsys: pytest.CaptureFixture[str], place: int
) -> None:
    bench.disk(size=64 * MIB)
    # In the middle 5 % are left, which include one of the 64 sampled places.
    bench.write("nvme1n1", place, b"x" * (4 * MIB if place == 20 * MIB else 1))
    code, lines = verify(capsys)
    assert code == 1 and lines[-1] == f"{SUMMARY} status=FAIL disks=1 failures=1"
    assert "bytes\\ at" in lines[0] and "disk=eui.5e0000000000a000" in lines[0]


def test_a_disk_that_is_missing_or_does_not_answer_fails(
    bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.disk(size=64 * MIB)
    code, lines = verify(capsys, GPU_EXPECTED="8")
    assert code == 1 and "expected=at\\ least\\ 8\\ disks" in lines[-2]
    identified = _disk._identified

    def silent(name: str) -> _disk.Disk:
        if name == "nvme2n1":
            raise OSError("no answer")
        return identified(name)

    bench.disk("nvme2n1", size=64 * MIB, minor=2, eui="5e0000000000a002")
    monkeypatch.setattr(_disk, "_identified", silent)
    code, lines = verify(capsys)
    assert (code, lines[-1]) == (1, f"{SUMMARY} status=FAIL disks=2 failures=1")
    monkeypatch.setattr(_disk, "_identified", identified)
    (Path(bench.root) / "dev/nvme1n1").unlink()
    assert verify(capsys)[0] == 1


def test_a_setting_that_is_no_number_is_refused(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(capsys, GPU_EXPECTED="all") == (2, [])


def test_the_program_for_maas_has_the_values_of_its_profile(tmp_path: Path) -> None:
    """On a machine that shows no disks the eight of the profile are missing."""
    file = tmp_path / standalone.RELEASE.path
    standalone.write(tmp_path)
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        ["sh", file, "--root", tmp_path / "empty"],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert "at\\ least\\ 8\\ disks" in done.stdout and "disks\\ unknown" in done.stdout
