"""Refusals before AWX gets a launch request, and their codes."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from reconciler.runs import collect, launch
from reconciler.runs.awx import request
from reconciler.runs.awx.client import Client
from reconciler.runs.collect import Phase
from reconciler.runs.contract import PLAYBOOKS, ContractError
from reconciler.runs.launch import Site
from reconciler.runs.spec import LauncherAway, RunError, SpecError
from reconciler.settings import Settings
from tests.standin.awx import IMAGE
from tests.standin.controller import TOKEN, Controller
from tests.unit.reconciler.runs.awx.conftest import LAUNCH, spec

pytestmark = pytest.mark.covers("CTRL-9", "ECO-4")

NAME = "gpuaas.slice.prepare_runtime"
MACHINE = {"id": 2, "name": "gpuaas.slice", "kind": "ssh", "cloud": False}
CLOUD = {"id": 4, "name": "aws", "kind": "aws", "cloud": True}
TEMPLATES = "GET /job_templates/"


def refused(site: Site) -> RunError:
    """Launching fails, nothing is asked for, nothing is kept that would count as begun."""
    with pytest.raises(RunError) as caught:
        launch.launch(site, spec())
    assert TOKEN not in str(caught.value)
    phase = collect.observe(site.state_dir / "runs" / "run-1").phase
    assert phase is Phase.ABSENT
    return caught.value


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"token": "another"}, "awx_unauthorized"),
        ({"status": {TEMPLATES: [403, 1]}}, "awx_forbidden"),
        ({"status": {TEMPLATES: [302, 1]}}, "awx_refused"),
        ({"without": ["gpuaas.slice.prepare_runtime"]}, "awx_template_missing"),
        ({"templates": {"name": "gpuaas.slice.prepare_runtime"}}, "awx_template_ambiguous"),
        ({"templates": {"ask_limit_on_launch": False}}, "awx_template_wrong"),
        ({"templates": {"ask_variables_on_launch": False}}, "awx_template_wrong"),
        ({"templates": {"playbook": "playbooks/release_slice.yml"}}, "awx_template_wrong"),
        ({"templates": {"inventory": None}}, "awx_template_wrong"),
        # A disk that is not wiped, and a task at which the playbook begins.
        ({"templates": {"extra_vars": '{"slice_written_off": []}'}}, "awx_template_wrong"),
        ({"templates": {"start_at_task": "Look again"}}, "awx_template_wrong"),
        (
            {"templates": {"summary_fields": {"user_capabilities": {"start": False}}}},
            "awx_forbidden",
        ),
        ({"templates": {"playbook": "copies/playbooks/prepare_runtime.yml"}}, "awx_template_wrong"),
        ({"templates": {"project": None}}, "awx_template_wrong"),
        ({"templates": {"execution_environment": None}}, "awx_template_wrong"),
        ({"templates": {"summary_fields": {"credentials": []}}}, "awx_template_wrong"),
        (
            {"templates": {"summary_fields": {"credentials": [MACHINE, CLOUD]}}},
            "awx_template_wrong",
        ),
        ({"changed": {NAME: {"project": 6}}}, "awx_template_wrong"),
        ({"changed": {NAME: {"execution_environment": 6}}}, "awx_template_wrong"),
        (
            {"changed": {NAME: {"summary_fields": {"credentials": [{**MACHINE, "id": 3}]}}}},
            "awx_template_wrong",
        ),
        ({"privileged": True, "jinja": "always"}, "awx_jinja_allowed"),
        ({"privileged": True, "jinja": "a later one"}, "awx_jinja_allowed"),
        ({"hosts": []}, "awx_host_missing"),
        ({"groups": ["node-1"]}, "awx_host_ambiguous"),
        # As JSON and as YAML; it could be a template, which AWX would expand.
        ({"variables": {"host": '{"ansible_become_pass": "a"}'}}, "awx_inventory_password"),
        ({"variables": {"group": "---\nansible_sudo_pass: a\n"}}, "awx_inventory_password"),
        ({"variables": {"inventory": "ansible_become_password: a"}}, "awx_inventory_password"),
    ],
)
def test_what_awx_could_not_do_as_asked_has_a_name(
    awx: Controller, site: Site, faults: dict[str, Any], code: str
) -> None:
    awx.begin(**{"page_size": 5, **faults})
    assert refused(site).code == code
    assert LAUNCH not in awx.record()["requests"]


def expecting(site: Site, **names: str) -> Site:
    assert site.awx is not None
    return dataclasses.replace(site, awx=dataclasses.replace(site.awx, **names))


def summary(**names: str) -> dict[str, Any]:
    return {"summary_fields": {what: {"id": 6, "name": name} for what, name in names.items()}}


OTHERS = [f"gpuaas.slice.{playbook}" for playbook in PLAYBOOKS if playbook != "prepare_runtime"]


def test_a_majority_of_templates_proves_nothing(
    awx: Controller, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_spawn", lambda *_: None)
    ours = "gpuaas.slice"
    named = expecting(site, project=ours, execution_environment=ours, credential=ours)
    wrong = {"project": 6, **summary(project="mallory")}
    # All others point elsewhere: the right template is launched if its project is known.
    awx.begin(changed=dict.fromkeys(OTHERS, wrong))
    launch.launch(named, spec("run-2"))
    text = refused(site).found
    assert "gpuaas.slice (5) in gpuaas.slice.prepare_runtime" in text and "mallory (6)" in text
    # This template points elsewhere: without that knowledge, it is as good as the others.
    awx.begin(changed={NAME: wrong})
    assert "mallory (6) and not gpuaas.slice" in refused(named).found
    assert refused(site).code == "awx_template_wrong"
    # Another project of the same name.
    awx.begin(changed={OTHERS[0]: {"project": 6}})
    assert refused(named).code == refused(site).code == "awx_template_wrong"
    awx.begin(changed={NAME: {"scm_branch": "mine"}})
    assert "a branch of its own, 'mine'" in refused(named).found


def test_other_content_behind_the_same_names_is_seen(
    awx: Controller, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_spawn", lambda *_: None)
    repository = {"project_url": "https://git.example/gpuaas", "project_branch": "v1"}
    pinned = expecting(site, **repository, image=IMAGE)
    for change in (
        {"scm_url": "https://git.example/mallory"},
        {"scm_branch": "mine"},
        # A pull request under the name of the release.
        {"scm_refspec": "+refs/pull/7/head:refs/heads/v1"},
    ):
        awx.begin(project=change)
        assert refused(pinned).code == "awx_project_differs"
    environment = {"id": 4, "name": "gpuaas.slice", "image": "registry.example/mallory"}
    awx.begin(templates={"summary_fields": {"execution_environment": environment}})
    assert f"image is registry.example/mallory and not {IMAGE}" in refused(pinned).found
    awx.begin(status={"GET /projects/5/": [403, 1]})
    assert refused(pinned).code == "awx_forbidden"
    awx.begin()
    launch.launch(pinned, spec())


@pytest.mark.parametrize(
    "word",
    [
        "{{ lookup('pipe', 'id') }}",
        "{% set x = lookup('pipe', 'id') %}",
        "#jinja2: variable_start_string:'[['\n[[ lookup('pipe','id') ]]",
    ],
)
@pytest.mark.parametrize("jinja", ["always", "template"])
def test_text_like_a_template_is_launched_only_where_awx_is_known_to_leave_it_alone(
    awx: Controller, site: Site, monkeypatch: pytest.MonkeyPatch, word: str, jinja: str
) -> None:
    """Text of hosts and tenants, and a token that may not read the setting. With `always`, AWX
    executes each of these in the execution environment.
    """
    awx.change(jinja=jinja)
    with pytest.raises(RunError, match="awx_jinja_unknown"):
        launch.launch(site, spec(word=word))
    if jinja == "template":
        monkeypatch.setattr(launch, "_spawn", lambda *_: None)
        awx.change(privileged=True)
        launch.launch(site, spec(word=word))


STRANGE = [
    {TEMPLATES: [{"results": [{"name": NAME, "summary_fields": None}]}]},
    {"GET /jobs/": [{"results": [{"status": "ok"}]}]},
    {"GET /jobs/": [{"results": [{"id": float("inf")}]}]},
]


@pytest.mark.parametrize(
    "faults",
    [
        *({"status": {TEMPLATES: [502, 1]}}, {"drop": {TEMPLATES: 1}}),
        *({"strange": answers} for answers in STRANGE),
    ],
)
def test_an_awx_that_does_not_answer_is_asked_later(
    awx: Controller, site: Site, faults: dict[str, Any]
) -> None:
    awx.begin(**faults)
    assert isinstance(refused(site), LauncherAway)


def test_a_template_is_checked_within_the_lease_of_its_task(
    awx: Controller, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly AWX answers: a worker whose lease ends meanwhile holds a place in vain."""
    assert Settings().task_lease_s > Client.DEADLINE_S
    monkeypatch.setattr(Client, "DEADLINE_S", 1.0)
    # Each answer is in time, and all together are not.
    awx.begin(drip_s=0.4)
    assert isinstance(refused(site), LauncherAway)
    assert len(awx.record()["requests"]) > 1


def test_nobody_listens(awx: Controller, site: Site) -> None:
    assert site.awx is not None
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{nobody.getsockname()[1]}"
        away = dataclasses.replace(site, awx=dataclasses.replace(site.awx, url=url))
        assert isinstance(refused(away), LauncherAway)


def test_only_the_given_ca_vouches(site: Site, tmp_path: Path) -> None:
    """Not the system's, and no answer of a stranger is waited for."""
    assert site.awx is not None
    for ca_file, code in ((None, "awx_untrusted"), (tmp_path / "none", "awx_ca_unreadable")):
        other = dataclasses.replace(site, awx=dataclasses.replace(site.awx, ca_file=ca_file))
        assert refused(other).code == code


@pytest.mark.parametrize("text", ["", "two\nlines", "gr\u00fcn"])
def test_a_token_that_is_none(awx: Controller, site: Site, text: str) -> None:
    awx.token_file.write_text(text)
    assert refused(site).code == "awx_token_unreadable"


def test_the_contract_holds_here_as_well(awx: Controller, site: Site) -> None:
    bad = spec()
    with pytest.raises(ContractError):
        launch.launch(site, dataclasses.replace(bad, variables={**bad.variables, "more": 1}))
    assert awx.record()["requests"] == []


def test_a_run_id_means_one_run(
    awx: Controller, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_spawn", lambda *_: None)
    launch.launch(site, spec())
    with pytest.raises(SpecError, match="run_id_reused"):
        launch.launch(site, spec(word="other"))


def test_a_foreign_job_with_endless_variables_is_none_of_ours() -> None:
    assert request.run_id({"extra_vars": "[" * 100_000}) == ""
