"""Optional steps of a plan: they come last, are reported, and never fail the run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

pytestmark = pytest.mark.covers("HOST-6", "HOST-10")


class Host:
    """An optional step, then a required step. broken: refusal of the optional step. deaf: steps
    without effect."""

    def __init__(self, broken: str = "") -> None:
        self.there: set[str] = set()
        self.broken = broken
        self.deaf: set[str] = set()

    def subject(self) -> _change.Subject:
        return _change.Subject(lambda _params: set(self.there), self._plan, self._apply)

    def _plan(self, _params: Any, state: set[str]) -> _change.Plan:
        steps = (_change.Step("soft", "s", soft=True), _change.Step("hard", "h"))
        return _change.Plan(tuple(step for step in steps if step.name not in state))

    def _apply(self, _params: Any, step: _change.Step) -> None:
        if step.soft and self.broken:
            raise Refusal(self.broken, expected="", found="", remedy="")
        if step.name not in self.deaf:
            self.there.add(step.name)


class Module:
    """Ansible's side of the module."""

    check_mode = False

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.warned: list[str] = []
        self.left: tuple[str, dict[str, Any]] = ("", {})

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def exit_json(self, **document: Any) -> None:
        self.left = ("exit", document)

    def fail_json(self, **document: Any) -> None:
        self.left = ("fail", document)


def test_a_soft_step_that_is_refused_ends_nothing_and_is_a_warning() -> None:
    host, module = Host("no_card"), Module()
    _change.run(module, host.subject())
    how, document = module.left
    assert (how, document["changed"], document["done"]) == ("exit", True, ["hard"])
    assert [text.partition(":")[0] for text in module.warned] == ["no_card"]


def test_one_that_had_no_effect_is_told_though_nothing_refused_it() -> None:
    host = Host()
    host.deaf = {"soft"}
    outcome = _change.drive(host.subject(), {}, check_mode=False)
    assert (outcome.failure, outcome.failed_step) == (None, None)
    assert [(doubt.code, doubt.found) for doubt in outcome.doubts] == [
        ("verify_failed", "still open: soft(s)")
    ]


def test_a_hard_step_without_effect_still_fails() -> None:
    host = Host("no_card")
    host.deaf = {"hard"}
    outcome = _change.drive(host.subject(), {}, check_mode=False)
    assert outcome.failure.found == "still open: hard(h)"
    assert [doubt.code for doubt in outcome.doubts] == ["no_card"]


@pytest.mark.parametrize("problem", [Refusal("gone", expected="", found="", remedy=""), OSError()])
def test_what_was_done_is_said_also_if_the_second_read_fails(problem: Exception) -> None:
    """The result has the done steps, but no values of the first read, which are out of date."""
    host, module = Host(), Module()
    subject, looks = host.subject(), []

    def observe(params: Any) -> set[str]:
        looks.append(params)
        if len(looks) > 1:
            raise problem
        there: set[str] = subject.observe(params)
        return there

    facts = {"untouched": True}
    _change.run(module, replace(subject, observe=observe, facts=lambda _params, _state: facts))
    how, document = module.left
    code = "gone" if isinstance(problem, Refusal) else "system_error"
    assert (how, document["error"]["code"], document["failed_step"]) == ("fail", code, "verify")
    assert (document["changed"], document["done"]) == (True, ["soft", "hard"])
    assert "untouched" not in document


@pytest.mark.parametrize(
    ("enrolled", "node_id", "code"),
    [
        ("node-b", "node-a", "wrong_node"),
        ("node-b", "node-b", None),
        ("node-b", "by-hand", None),
        ("node-b", "", None),
        ("", "node-a", None),
        (None, "node-a", None),
    ],
)
def test_a_host_refuses_the_run_of_another_node(
    enrolled: str | None,
    node_id: str,
    code: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_host, "ROOT", tmp_path)
    monkeypatch.setenv(_change.RUN_NODE, node_id)
    if enrolled is not None:
        _host.write("/etc/gpuaas/enrolment.env", f"A=1\nGPUAAS_NODE_ID={enrolled}\n")
    host, module = Host(), Module()
    _change.run(module, host.subject())
    how, document = module.left
    assert (how, document.get("error", {}).get("code")) == ("fail" if code else "exit", code)
    assert host.there == (set() if code else {"soft", "hard"})
    assert document.get("answered_by") == (None if code else enrolled or None)


def test_folders_of_a_module_are_open_whatever_the_umask_of_the_login(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        step = _change.Step("make", "folder", None, "there")
        subject = _change.Subject(
            observe=lambda _params: (tmp_path / "made").is_dir(),
            plan=lambda _params, there: _change.Plan(() if there else (step,)),
            apply=lambda _params, _step: (tmp_path / "made").mkdir(),
        )
        _change.run(Module(), subject)
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)


def test_who_is_not_root_and_may_not_read_is_told_to_become_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Playbooks do not become root by themselves."""

    def closed(*_given: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/sys/firmware/acpi/tables/DMAR")

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    subject = _change.Subject(closed, closed, closed)
    for drive, given in (
        (_change.inform, closed),
        (_change.run, subject),
        (_change.run_parts, (part("first", subject),)),
    ):
        module = Module()
        drive(module, given)
        how, document = module.left
        assert (how, document["error"]["code"]) == ("fail", "root_required")
        assert "user 1000" in document["error"]["found"]
        assert "-b" in document["error"]["remedy"]


def part(name: str, subject: _change.Subject) -> _change.Part:
    return _change.Part(name, subject, lambda params, facts: {**params, "before": dict(facts)})


def test_parts_go_in_order_and_a_failure_names_its_part() -> None:
    first, second, third, module = Host(), Host(), Host(), Module()
    second.deaf = {"hard"}
    subjects = (first.subject(), second.subject(), third.subject())
    _change.run_parts(module, [part(f"part_{n}", s) for n, s in enumerate(subjects)])
    how, document = module.left
    assert (how, document["part"], document["failed_step"]) == ("fail", "part_1", "verify")
    assert document["done"] == ["soft", "hard"] * 2 and document["changed"]
    assert third.there == set()


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Refusal("planted", expected="", found="", remedy=""), "planted"),
        (PermissionError("/etc"), "system_error"),
    ],
)
def test_a_part_that_cannot_look_keeps_what_was_done_before_it(
    problem: Exception, code: str
) -> None:
    def observe(params: Any) -> None:
        assert params["before"] == {"seen": 1}
        raise problem

    host, module = Host(), Module()
    subject = host.subject()
    seeing = _change.Subject(
        subject.observe, subject.plan, subject.apply, lambda _params, _state: {"seen": 1}
    )
    blind = _change.Subject(observe, subject.plan, subject.apply)
    _change.run_parts(module, [part("look", seeing), part("act", blind)])
    how, document = module.left
    assert (how, document["part"], document["error"]["code"]) == ("fail", "act", code)
    assert document["changed"] and document["seen"] == 1
