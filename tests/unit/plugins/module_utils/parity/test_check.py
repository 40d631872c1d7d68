"""Outcomes of parity checks and their lines: a line per check, for every text of a host."""

from __future__ import annotations

import shlex

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _report_line
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _check
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.covers("HOST-10")


def check(status: str = "PASS", detail: str = "fine", *, soft: bool = False) -> _check.Check[None]:
    remedy = _check.Remedy("run it", "book", "part")
    return _check.Check("nat", lambda _facts: _check.Verdict(status, detail), remedy, soft=soft)


def outcome_of(examined: _check.Check[None], intent: str = "slice", *exempt: str) -> dict[str, str]:
    return _check.evaluate([examined], None, intent=intent, not_applicable=exempt)[0]


def test_a_pass_names_no_remedy() -> None:
    assert outcome_of(check()) == {
        "check": "nat",
        "status": "PASS",
        "detail": "fine",
        "remediation": "",
        "playbook": "",
        "role": "",
    }


def test_a_failure_names_its_remedy_and_playbook() -> None:
    outcome = outcome_of(check("FAIL", "no rule"))
    assert outcome["status"] == "FAIL"
    assert (outcome["remediation"], outcome["playbook"], outcome["role"]) == (
        "run it",
        "book",
        "part",
    )


def test_bare_metal_has_remedies_of_its_own() -> None:
    """The remedy of a slice host would bring slice mode back."""
    examined = _check.Check(
        "nat",
        lambda _facts: _check.passed("fine"),
        _check.Remedy("bootstrap", "book", "part"),
        baremetal=lambda _facts: _check.failed("a rule is there"),
        restore=_check.Remedy("restore", "other"),
    )
    shown = outcome_of(examined, "baremetal")
    assert (shown["remediation"], shown["playbook"], shown["role"]) == ("restore", "other", "")


def test_a_soft_check_only_warns() -> None:
    assert outcome_of(check("FAIL", soft=True))["status"] == "WARN"


def test_not_applicable_only_when_named() -> None:
    assert outcome_of(check("FAIL"), "slice", "nat")["detail"] == "not_applicable"
    assert outcome_of(check("FAIL"), "slice", "dnsmasq")["status"] == "FAIL"


def test_a_check_that_says_nothing_of_bare_metal_is_not_required_there() -> None:
    assert outcome_of(check("FAIL"), "baremetal")["detail"] == "not_required_for_baremetal"


@pytest.mark.parametrize(
    "problem",
    [
        Refusal("command_failed", expected="", found="exit 1", remedy=""),
        OSError("no such device"),
        ValueError("not a number"),
        KeyError("bridge"),
    ],
)
def test_a_check_that_cannot_look_has_failed(problem: Exception) -> None:
    def examine(_facts: None) -> _check.Verdict:
        raise problem

    assert outcome_of(_check.Check("nat", examine, _check.Remedy("run it")))["status"] == "FAIL"


def test_the_report_counts_and_closes_with_a_summary() -> None:
    outcomes = [
        outcome_of(check()),
        outcome_of(check("FAIL", "no")),
        outcome_of(check("WARN", "old")),
    ]
    report = _check.report(outcomes)
    assert (report["failures"], report["warnings"]) == (1, 1)
    assert report["lines"][-1] == (
        "GPUAAS_SLICE_PARITY_SUMMARY status=FAIL checks=3 failures=1 warnings=1"
    )


def test_lines_look_as_the_runbook_shows_them() -> None:
    outcome = {
        "check": "ipoib_netplan",
        "status": "FAIL",
        "detail": "command exited with 1",
        "remediation": "render /etc/netplan/60-ipoib.yaml from site/profile bootstrap",
        "playbook": "",
    }
    assert _check.line(outcome) == (
        "GPUAAS_SLICE_PARITY status=FAIL check=ipoib_netplan detail=command\\ exited\\ with\\ 1"
        " remediation=render\\ /etc/netplan/60-ipoib.yaml\\ from\\ site/profile\\ bootstrap"
    )


@pytest.mark.parametrize(
    "payload",
    [
        "x\nGPUAAS_SLICE_PARITY status=PASS check=nat detail=fine",
        "x\rGPUAAS_SLICE_PARITY status=PASS check=nat",
        "x\u2028GPUAAS_SLICE_PARITY status=PASS",
        "$(reboot) `id` {{ lookup('pipe','id') }}",
        "\x1b[2K status=PASS",
    ],
)
def test_a_hostile_host_forges_no_line_and_no_status(payload: str) -> None:
    line = _check.line(outcome_of(check("FAIL", payload)))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert line.count("status=") == 1
    words = shlex.split(line)
    assert [word.partition("=")[0] for word in words[1:]] == [
        "status",
        "check",
        "detail",
        "remediation",
    ]


@given(st.text(min_size=1))
def test_any_text_stays_one_printable_shell_word(text: str) -> None:
    word = _report_line.quoted(text)
    assert word.isascii()
    assert word.isprintable()
    assert len(shlex.split(word)) == 1


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
def test_printable_text_reads_back_as_it_was(text: str) -> None:
    assert shlex.split(_report_line.quoted(text)) == [text]


def test_a_flood_is_cut() -> None:
    assert len(outcome_of(check("FAIL", "x" * 1_000_000))["detail"]) == 2000
