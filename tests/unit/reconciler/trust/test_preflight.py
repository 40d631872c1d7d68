"""The first boot's firmware preflight: the enrolment script runs it once, and it only reads."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _preflight_command

from reconciler.settings import PROJECT
from reconciler.trust import ca, preflight
from reconciler.trust.enrolment import EnrolmentRequest, answer, userdata
from scripts import standalone
from tests.unit.reconciler.trust.conftest import TOKEN, Api, Host

pytestmark = pytest.mark.covers("HOST-1", "HOST-13")

PROFILES = sorted((PROJECT / "profiles").glob("*.yml"))
LOG = "log/gpuaas-slice-firmware.log"
SHOWS = """\
echo "GPUAAS_SLICE_GPU ids=$GPUAAS_SLICE_GPU_IDS apply=$GPUAAS_SLICE_APPLY_BIOS root=${ROOT:-}"
echo 'GPUAAS_SLICE_FIRMWARE_SUMMARY status=FAIL checks=8 failures=1 warnings=0'
exit 1
"""


def enrol(host: Host, api: Api, trust: ca.Trust, document: dict[str, Any] | None) -> list[str]:
    """The output of the enrolment, which is a success whatever the preflight does."""
    api.reply = lambda body: (200, answer(trust, EnrolmentRequest.parse(body), preflight=document))
    done = host.run(userdata(api.url, "node-1", TOKEN))
    assert done.returncode == 0, done
    return done.stdout.splitlines()


def document_of(script: str, **environment: str) -> dict[str, Any]:
    return {"script": script, "environment": environment}


def test_the_report_of_the_first_boot_stays(host: Host, api: Api, trust: ca.Trust) -> None:
    output = enrol(host, api, trust, document_of(SHOWS, GPUAAS_SLICE_GPU_IDS="10de:2335"))
    assert "gpuaas-enrol: node certificate enrolled" in output
    assert output[-1].startswith("gpuaas-enrol: firmware preflight: GPUAAS_SLICE_FIRMWARE_SUMMARY")
    report = host.text(LOG)
    assert report.splitlines()[0] == "GPUAAS_SLICE_GPU ids=10de:2335 apply=0 root="
    assert (host.root / LOG).stat().st_mode & 0o777 == 0o600
    # Enrolled again, with a fresh token and another profile: the first boot was only once.
    again = enrol(host, api, trust, document_of("echo again", GPUAAS_SLICE_GPU_IDS="x"))
    assert again == ["gpuaas-enrol: node certificate enrolled"]
    assert host.text(LOG) == report


def test_whatever_the_answer_says_the_firmware_is_only_read(
    host: Host, api: Api, trust: ca.Trust
) -> None:
    enrol(
        host,
        api,
        trust,
        document_of(SHOWS, GPUAAS_SLICE_APPLY_BIOS="1", ROOT="/tmp", PATH="/nowhere"),
    )
    assert " apply=0 root=" in host.text(LOG)
    assert "root=/tmp" not in host.text(LOG)


@pytest.mark.parametrize(
    ("document", "output"),
    [
        (None, []),
        ({"script": 1, "environment": {}}, ["firmware preflight did not end: TypeError"]),
        ({"environment": {}}, ["firmware preflight did not end: KeyError"]),
    ],
)
def test_no_preflight_stands_in_the_way_of_an_enrolment(
    host: Host, api: Api, trust: ca.Trust, document: Any, output: list[str]
) -> None:
    lines = enrol(host, api, trust, document)
    assert lines[0] == "gpuaas-enrol: node certificate enrolled"
    assert [line[len("gpuaas-enrol: ") :].partition(": ")[0] for line in lines[1:]] == [
        row.partition(": ")[0] for row in output
    ]
    assert all(row.partition(": ")[2] in line for row, line in zip(output, lines[1:], strict=True))
    assert not (host.root / LOG).exists(), "nothing is there that would pass for a report"


def test_one_that_hangs_is_ended_and_leaves_no_report(
    host: Host, api: Api, trust: ca.Trust
) -> None:
    api.reply = lambda body: (
        200,
        answer(
            trust, EnrolmentRequest.parse(body), preflight=document_of("echo begun; exec sleep 60")
        ),
    )
    script = userdata(api.url, "node-1", TOKEN).replace("timeout=1800", "timeout=1")
    done = host.run(script)
    assert done.returncode == 0
    assert "firmware preflight did not end: subprocess.TimeoutExpired" in done.stdout
    assert not (host.root / LOG).exists()


@pytest.mark.covers("ECO-3")
@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_the_script_is_told_what_the_module_is_told(file: Path) -> None:
    profile = yaml.safe_load(file.read_text())
    environment = preflight.environment(profile)
    assert environment["GPUAAS_SLICE_APPLY_BIOS"] == "0"
    settings = _preflight_command._Settings(environment)
    request = settings.request
    assert settings.applies is False
    assert list(request.gpu_ids) == profile["gpu"]["ids"]
    assert request.expected_gpus == profile["gpu"].get("expected", 0)
    assert list(request.fabric_ids) == profile["fabric"]["pf_ids"]
    assert request.fabric_link == profile["fabric"]["link"]
    assert list(request.exclude_models) == profile["nvme"]["exclude_models"]
    assert list(request.not_applicable) == profile["not_applicable"]
    # The script's own repository is another profile's: if this profile has none, nothing is asked.
    options = profile.get("racadm", {})
    assert {key: settings.install.get(key) for key in ("uri", "suite", "components")} == {
        "uri": options.get("repository"),
        "suite": options.get("suite"),
        "components": options.get("components"),
    }
    names = {name for part in standalone.FIRMWARE.settings for name in part}
    assert environment.keys() >= names, "set, if only to nothing"


@pytest.mark.parametrize("link", [{}, {"link": ""}])
def test_a_profile_without_a_link_still_lets_the_script_look(link: dict[str, str]) -> None:
    """Its ids alone are wrong settings, which end the script before it has looked at anything."""
    profile = yaml.safe_load((PROJECT / "profiles/lab.yml").read_text())
    del profile["fabric"]["link"]
    profile["fabric"] |= link
    environment = preflight.environment(profile)
    assert environment["GPUAAS_SLICE_FABRIC_IDS"] == environment["GPUAAS_SLICE_FABRIC_LINK"] == ""
    assert list(_preflight_command._Settings(environment).request.gpu_ids) == profile["gpu"]["ids"]


def settled(environment: dict[str, str]) -> dict[str, str]:
    """The settings that the generated script begins with where it is given these."""
    head, _start, _program = standalone.build(standalone.FIRMWARE).partition("for python in ")
    given = {"PATH": os.environ["PATH"], **environment}
    shown = subprocess.run(
        ["sh"], input=f"{head}env\n", text=True, capture_output=True, check=True, env=given
    ).stdout.splitlines()
    values = dict(row.partition("=")[::2] for row in shown)
    return {name: value for name, value in values.items() if name.startswith("GPUAAS_SLICE_")}


def test_where_maas_sets_nothing_the_script_asks_what_a_first_boot_asks() -> None:
    profile = yaml.safe_load((PROJECT / "profiles/xe9680l-h200.yml").read_text())
    settings = {name: value for name, value in preflight.environment(profile).items() if value}
    assert settings.pop("GPUAAS_SLICE_APPLY_BIOS") == "0"
    assert settled({}) == settings
    assert settings["GPUAAS_SLICE_GPU_EXPECTED"] == "8"
    assert settings["GPUAAS_SLICE_NVME_EXCLUDE"] == "Dell BOSS"
    # How many of another GPU there must be is not the profile's to say.
    others = settled({"GPUAAS_SLICE_GPU_IDS": "10de:26b9"})
    assert "GPUAAS_SLICE_GPU_EXPECTED" not in others


def test_what_a_profile_leaves_open_is_not_asked_of_its_machines() -> None:
    """The script has settings by itself, of machines with eight GPUs and a boot card."""
    profile = yaml.safe_load((PROJECT / "profiles/lab.yml").read_text())
    profile["gpu"] = {"ids": ["10de:2330"]}
    environment = preflight.environment(profile)
    assert settled(environment) == environment
    request = _preflight_command._Settings(environment).request
    assert (request.expected_gpus, list(request.exclude_models)) == (0, [])


def test_the_generated_script_reports_about_this_machine(
    host: Host, api: Api, trust: ca.Trust
) -> None:
    """The real script, which reads this machine: its findings are this machine's."""
    profile = yaml.safe_load((PROJECT / "profiles/lab.yml").read_text())
    document = preflight.document(profile)
    assert len(json.dumps(document)) < 1 << 20
    output = enrol(host, api, trust, document)
    lines = host.text(LOG).splitlines()
    assert all(line.startswith("GPUAAS_SLICE_") for line in lines), lines
    assert lines[-1].startswith("GPUAAS_SLICE_FIRMWARE_SUMMARY status=")
    assert output[-1].endswith(lines[-1])
    bios = next(line for line in lines if "check=bios_settings" in line)
    assert "not_applicable" in bios, "the profile's word was heard"
