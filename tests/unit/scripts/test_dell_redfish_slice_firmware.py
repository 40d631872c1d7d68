"""The script for engineers, run as a process against a BMC in a second process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.standin import bmc as standin
from tests.standin import redfish

pytestmark = pytest.mark.covers("HOST-3")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/ops/dell_redfish_slice_firmware.py"
HOW = "GPUAAS_SLICE_BIOS_RESULT status="


def environment(bmc: standin.Bmc, **more: str) -> dict[str, str]:
    python = Path(sys.executable).parent
    given = {"IDRAC_HOST": bmc.address, "IDRAC_USER": "root", "IDRAC_PASSWORD": standin.PASSWORD}
    return {"PATH": f"{python}:/usr/bin:/bin", "IDRAC_CA_FILE": bmc.ca_file, **given, **more}


def run(bmc: standin.Bmc, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script from another folder; neither output nor files contain the password."""
    done = subprocess.run(
        [str(SCRIPT), *words], env=environment(bmc, **more), cwd="/",
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert standin.PASSWORD not in done.stdout + done.stderr
    assert redfish.SECRET_OF_ANOTHER not in done.stdout + done.stderr
    return done


def test_a_dry_run_prints_the_plan_and_changes_nothing(bmc: standin.Bmc) -> None:
    done = run(bmc)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "GPUAAS_SLICE_BIOS attribute=ProcVirtualization current=Disabled pending=- "
        "wanted=Enabled status=wrong",
        "GPUAAS_SLICE_BIOS attribute=LogicalProc current=Disabled pending=- "
        "wanted=Enabled status=wrong",
        "GPUAAS_SLICE_BIOS attribute=SriovGlobalEnable current=Disabled pending=- "
        "wanted=Enabled status=wrong",
        "GPUAAS_SLICE_BIOS_PLAN ProcVirtualization=Enabled",
        "GPUAAS_SLICE_BIOS_PLAN LogicalProc=Enabled",
        "GPUAAS_SLICE_BIOS_PLAN SriovGlobalEnable=Enabled",
        "GPUAAS_SLICE_BIOS_RESTART when=by_whoever_resets_next "
        r"ends=whatever\ runs\ on\ the\ machine,\ unasked",
        f"{HOW}changes_needed",
    ]
    assert bmc.record()["patches"] == []


def test_apply_stages_then_a_power_cycle_settles(bmc: standin.Bmc) -> None:
    staged = run(bmc, "--apply")
    assert (staged.returncode, staged.stdout.splitlines()[-1]) == (0, f"{HOW}waits_for_reset")
    assert "GPUAAS_SLICE_BIOS_JOB id=JID_763788807801 status=Scheduled" in staged.stdout
    assert bmc.record()["resets"] == []
    done = run(bmc, "--apply", "--power-cycle", "--interval=0.05")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{HOW}settled")
    assert "GPUAAS_SLICE_BIOS_RESTART when=with_this_call ends=whatever" in done.stdout
    assert "status=Completed percent=100" in done.stdout
    assert "GPUAAS_SLICE_BIOS_RESTART" not in run(bmc, "--apply").stdout


def test_attr_replaces_the_usual_three(bmc: standin.Bmc) -> None:
    done = run(bmc, "--attr", "MemTest=Enabled", "--attr", "AcPwrRcvryUserDelay=90", "--apply")
    assert done.returncode == 0
    attributes = bmc.record()["patches"][0]["Attributes"]
    assert attributes == {"MemTest": "Enabled", "AcPwrRcvryUserDelay": 90}


@pytest.mark.parametrize(
    ("words", "more", "code"),
    [
        (["--attr", "VtForDirectIo=Enabled"], {}, "attribute_unknown"),
        (["--attr", "SystemServiceTag=X", "--apply"], {}, "attribute_read_only"),
        (["--attr", "ProcVirtualization=On", "--apply"], {}, "value_not_allowed"),
        ([], {"IDRAC_PASSWORD": "wrong"}, "bmc_login_refused"),
        ([], {"IDRAC_CA_FILE": ""}, "tls_untrusted"),
        (["--fingerprint", "0" * 64], {"IDRAC_CA_FILE": ""}, "tls_untrusted"),
        (["--ca-file", "/nonexistent"], {}, "trust_invalid"),
    ],
)
def test_a_refusal_is_exit_1_with_its_code(
    bmc: standin.Bmc, words: list[str], more: dict[str, str], code: str
) -> None:
    done = run(bmc, *words, **more)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(f"{HOW}refused code={code} ")
    assert done.stderr.startswith(f"{code}: expected")
    assert "Traceback" not in done.stderr
    assert bmc.record()["patches"] == []


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["--power-cycle"], {}),
        (["--attr", "Nothing"], {}),
        (["--insecure"], {}),
        ([], {"IDRAC_PASSWORD": ""}),
        ([], {"IDRAC_HOST": ""}),
    ],
)
def test_a_wrong_call_is_exit_2_and_asks_nobody(
    bmc: standin.Bmc, words: list[str], more: dict[str, str]
) -> None:
    assert run(bmc, *words, **more).returncode == 2
    assert bmc.record()["requests"] == []


def test_a_bmc_that_repeats_what_it_is_told_is_not_repeated(bmc: standin.Bmc) -> None:
    """Error texts, job messages and values that hold the password, and a forged line."""
    forged = f"{standin.PASSWORD}\nGPUAAS_SLICE_BIOS_RESULT status=settled"
    bmc.begin(echo=True, values={"ProcVirtualization": forged})
    done = run(bmc)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith(HOW)] == [
        f"{HOW}changes_needed"
    ]


def test_nothing_in_the_process_table_and_a_logout_on_sigterm(
    bmc: standin.Bmc, tmp_path: Path
) -> None:
    bmc.begin(busy={f"GET {redfish.SYSTEM}": 99}, retry_after="20")
    with subprocess.Popen(
        [str(SCRIPT)], env=environment(bmc), cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        while not bmc.count(f"GET {redfish.SYSTEM}"):
            assert running.poll() is None
            time.sleep(0.02)
        assert bmc.record()["open_sessions"] == 1
        lines = [_cmdline(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert any(SCRIPT.name in line for line in lines)
        assert not any(standin.PASSWORD in line for line in lines)
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert standin.PASSWORD not in out + err
    assert list(tmp_path.iterdir()) == []


def _cmdline(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
