"""Import of awx/ by the collection awx.awx 24.6.1 into the stand-in, and the objects it makes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.runs import contract
from reconciler.runs.awx.client import Client
from reconciler.runs.awx.request import REQUIRED, find_template, list_templates
from tests.standin.controller import TOKEN, Controller, standing

pytestmark = pytest.mark.covers("CTRL-9", "ECO-4")

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WEBHOOK = "https://chat.example/hook"
SECRET = "canary-77aa01-do-not-print"
KEY = f"consumer:token:{SECRET}"
# A site with all that is left out by default.
SITE = {
    "gpuaas_awx_webhook": WEBHOOK,
    "gpuaas_awx_maas_url": "https://maas.example",
    "gpuaas_awx_maas_tags": ["gpuaas-profile-slice-vm", "rack-1"],
    "gpuaas_awx_maas_networks": ["10.20.0.0/16"],
    "gpuaas_awx_pods": True,
}


@dataclass(frozen=True)
class Import:
    """controller: the stand-in, which begins without our objects. folder: the site's files."""

    controller: Controller
    folder: Path

    def __call__(self, *words: str) -> str:
        """Play the import; returns its output."""
        done = subprocess.run(
            [str(BIN / "ansible-playbook"), "-i", "localhost,", ROOT / "awx/import.yml", *words],
            env={
                **{name: value for name, value in os.environ.items() if "ANSIBLE" not in name},
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "build" / "ansible-12.3.0"),
                "ANSIBLE_PIPELINING": "1",
                "CONTROLLER_HOST": self.controller.url,
                "CONTROLLER_OAUTH_TOKEN": TOKEN,
                "SSL_CERT_FILE": str(self.controller.ca_file),
                "GPUAAS_TOKEN_FILE": str(self.folder / "reconciler-token"),
                "GPUAAS_MAAS_TOKEN_FILE": str(self.folder / "maas-key"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert SECRET not in output
        return done.stdout


@contextmanager
def importing(folder: Path) -> Iterator[Import]:
    """An AWX without our objects."""
    subprocess.run([str(ROOT / "scripts" / "ansible-collections")], check=True)
    (folder / "reconciler-token").write_text(f"{SECRET}\n")
    (folder / "maas-key").write_text(f"{KEY}\n")
    with standing(folder) as controller:
        controller.begin(empty=True)
        yield Import(controller, folder)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Import]:
    with importing(tmp_path_factory.mktemp("awx")) as first:
        first("-e", json.dumps(SITE))
        yield first


def named(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (item,) = [item for item in objects if item["name"] == name]
    return item


def test_every_template_is_as_a_launch_needs_it(imported: Import) -> None:
    """The launcher's own check, over the templates that the import has made."""
    access = imported.controller.access
    with Client(access) as client:
        listed = list_templates(client, access)
        for playbook in contract.PLAYBOOKS:
            template = find_template(listed, access, playbook)
            assert {field: template[field] for field in REQUIRED} == REQUIRED
            assert (ROOT / template["playbook"]).is_file()
            variables = template["description"].partition("Variables: ")[2].split(", ")
            assert variables == contract.schema(playbook)["required"]
    assert len(listed) == len(contract.PLAYBOOKS)


def test_every_field_arrives(imported: Import) -> None:
    """AWX would silently drop an unknown field."""
    objects = imported.controller.objects()
    common = yaml.safe_load((ROOT / "awx" / "job_templates.yml").read_text())["job_template"]
    references = {"organization", "project", "inventory", "execution_environment", "credentials"}
    plain = {name: value for name, value in common.items() if name not in references}
    plain["extra_vars"] = json.dumps(plain["extra_vars"])
    launched = [t for t in objects["job_templates"] if t["name"].startswith("gpuaas.slice.")]
    for template in launched:
        assert {name: template[name] for name in plain} == plain
    source = named(objects["inventory_sources"], "gpuaas nodes")
    assert (source["source"], source["overwrite"], source["overwrite_vars"]) == ("scm", True, True)
    assert (ROOT / source["source_path"]).is_file()
    assert source["update_on_launch"] is False
    assert source["summary_fields"]["credential"]["name"] == "gpuaas reconciler"
    maas = named(objects["inventory_sources"], "gpuaas machines")
    assert (maas["source"], maas["overwrite"], maas["overwrite_vars"]) == ("scm", True, True)
    assert (ROOT / maas["source_path"]).is_file()
    assert json.loads(maas["source_vars"]) == {
        "GPUAAS_MAAS_TAGS": "gpuaas-profile-slice-vm,rack-1",
        "GPUAAS_MAAS_NETWORKS": "10.20.0.0/16",
    }
    assert maas["summary_fields"]["credential"]["name"] == "gpuaas MAAS"
    # No machine of MAAS is a host for the reconciler's jobs.
    assert maas["inventory"] != source["inventory"]
    project = named(objects["projects"], "gpuaas.slice")
    # A branch that exists. A tag would have to be made before AWX can fetch it.
    assert project["scm_branch"] == "main"
    assert project["scm_update_on_launch"] is False
    started = [t for t in objects["job_templates"] if not t["name"].startswith("gpuaas.slice.")]
    assert len(started) == 7
    for template in started:
        assert (ROOT / template["playbook"]).is_file()
        assert template["ask_variables_on_launch"] is False
        credentials = [item["name"] for item in template["summary_fields"]["credentials"]]
        assert credentials == ["gpuaas reconciler"]
    webhook = named(objects["notification_templates"], "gpuaas webhook")
    assert webhook["notification_configuration"]["url"] == WEBHOOK
    secret = named(objects["credentials"], "gpuaas reconciler")["inputs"]["token"]
    assert secret == SECRET
    inputs = named(objects["credentials"], "gpuaas MAAS")["inputs"]
    assert inputs == {"url": "https://maas.example", "key": KEY}


def test_pods_of_jobs_have_a_limit_of_memory(imported: Import) -> None:
    """AWX merges the specification into its own, where a list replaces the whole list."""
    objects = imported.controller.objects()
    (group,) = objects["instance_groups"]
    assert group["is_container_group"] is True
    pod = yaml.safe_load(group["pod_spec_override"])
    (container,) = pod["spec"]["containers"]
    assert (container["name"], container["resources"]["limits"]) == ("worker", {"memory": "512Mi"})
    # Nothing of a job speaks to Kubernetes.
    assert pod["spec"]["automountServiceAccountToken"] is False
    for template in objects["job_templates"]:
        assert template["prevent_instance_group_fallback"] is True
        assert objects["instance_groups_of"][template["name"]] == [group["name"]]


def scheduled(objects: dict[str, Any]) -> dict[str, tuple[str, str, bool]]:
    """Started template, frequency and activation of each schedule."""
    kinds = ("job_templates", "inventory_sources", "workflow_job_templates")
    names = {item["id"]: item["name"] for kind in kinds for item in objects[kind]}
    return {
        row["name"]: (
            names[row["unified_job_template"]],
            row["rrule"].partition("RRULE:")[2],
            row["enabled"],
        )
        for row in objects["schedules"]
    }


def test_schedules_start_what_they_name(imported: Import) -> None:
    objects = imported.controller.objects()
    assert scheduled(objects) == {
        "gpuaas hosts every ten minutes": ("gpuaas nodes", "FREQ=MINUTELY;INTERVAL=10", True),
        "gpuaas parity each night": ("gpuaas parity of all nodes", "FREQ=DAILY;INTERVAL=1", True),
        "gpuaas NetBox each hour": ("gpuaas compare NetBox", "FREQ=HOURLY;INTERVAL=1", False),
        "gpuaas machines each hour": ("gpuaas machines", "FREQ=HOURLY;INTERVAL=1", True),
    }
    netbox = named(objects["schedules"], "gpuaas NetBox each hour")
    assert netbox["extra_data"]["gpuaas_action"] == "netbox_diff"


@pytest.mark.long
def test_a_site_with_netbox_and_without_maas_and_webhook(tmp_path: Path) -> None:
    with importing(tmp_path) as site:
        # A site without MAAS needs no key of it.
        (tmp_path / "maas-key").unlink()
        site("-e", "gpuaas_awx_netbox=true")
        objects = site.controller.objects()
    assert scheduled(objects)["gpuaas NetBox each hour"][2] is True
    assert objects["notification_templates"] == []
    # An AWX without Kubernetes runs no pods.
    assert objects["instance_groups"] == []
    assert not any(item["prevent_instance_group_fallback"] for item in objects["job_templates"])
    for kind in ("inventories", "inventory_sources", "credentials", "schedules"):
        assert not [item for item in objects[kind] if re.search("MAAS|machines", item["name"])]


def test_no_question_takes_an_id_from_a_list(imported: Import) -> None:
    """Lists of ids grow old. Everything that is started has a reason."""
    surveys = imported.controller.objects()["surveys"]
    assert len(surveys) == 7
    for survey in surveys:
        questions = {question["variable"]: question for question in survey["spec"]}
        assert questions["gpuaas_reason"]["min"] == 10
        if subject := questions.get("gpuaas_subject"):
            assert subject["type"] == "text"
            assert "choices" not in subject


def test_a_person_decides_between_discovery_and_approval(imported: Import) -> None:
    objects = imported.controller.objects()
    links = {link["from"]: link["to"] for link in objects["links"]}
    order = ["bootstrap", "discover", "decide", "approve", "bind", "parity"]
    assert links == {step: [after] for step, after in pairwise(order)}
    steps = {step["identifier"]: step for step in objects["workflow_job_template_nodes"]}
    (approval,) = objects["workflow_approval_templates"]
    assert steps["decide"]["unified_job_template"] == approval["id"]
    assert "void" in approval["description"]


def test_teams_get_what_they_need_and_no_more(imported: Import) -> None:
    teams = imported.controller.objects()["teams_of"]
    launched = {f"job_templates/gpuaas.slice.{name}/execute" for name in contract.PLAYBOOKS}
    assert {role for role, who in teams.items() if "gpuaas reconciler" in who} == {
        *launched,
        "inventories/gpuaas.slice/read",
    }
    for role, who in teams.items():
        if "gpuaas auditors" in who:
            assert role.endswith("/read")
        if "gpuaas operators" in who:
            assert role not in launched
    workflow = "workflow_job_templates/gpuaas deployed machine to slice host"
    assert teams[f"{workflow}/approval"] == ["gpuaas operators"]


def test_a_second_import_changes_only_what_a_person_has_changed(imported: Import) -> None:
    before = imported.controller.objects()
    change = {"limit": "all", "allow_simultaneous": False, "start_at_task": "Look again"}
    imported.controller.spoil("gpuaas.slice.parity", extra_vars="slice_remediate: true", **change)
    deleted = ("gpuaas.slice.reboot_node", "gpuaas operate node", "gpuaas compare NetBox")
    for name in deleted:
        imported.controller.delete(name)
    # A template's schedule is deleted with it; a workflow's step stays, with nothing to run.
    assert "gpuaas NetBox each hour" not in scheduled(imported.controller.objects())
    output = imported("-e", json.dumps(SITE))
    assert re.findall(r"^changed: \[localhost\] => \(item=(.*)\)$", output, re.MULTILINE) == [
        "gpuaas.slice.parity",
        *deleted,
        # Objects that belonged to them: steps of the workflow, a schedule, and rights of teams.
        *("bootstrap", "discover", "bind", "parity"),
        "gpuaas NetBox each hour",
        *("gpuaas operators: execute", "gpuaas auditors: read", "gpuaas reconciler: execute"),
    ]
    after = imported.controller.objects()
    template = named(after["job_templates"], "gpuaas.slice.parity")
    assert template["limit"] == "no-host-chosen"
    assert template["allow_simultaneous"] is True
    assert (template["extra_vars"], template["start_at_task"]) == ("{}", "")
    assert scheduled(after) == scheduled(before)
    for name in deleted:
        old, new = (named(objects["job_templates"], name) for objects in (before, after))
        ours = set(old) - {"id", "url", "related", "summary_fields"}
        assert {field: new[field] for field in ours} == {field: old[field] for field in ours}
    names = {item["id"]: item["name"] for item in after["job_templates"]}
    steps = {step["identifier"]: step for step in after["workflow_job_template_nodes"]}
    assert names[steps["bootstrap"]["unified_job_template"]] == "gpuaas operate node"
    specs = {survey["url"]: survey["spec"] for survey in after["surveys"]}
    assert specs[named(after["job_templates"], "gpuaas operate node")["url"]]
    assert after["teams_of"] == before["teams_of"]


def test_the_same_data_has_the_shape_of_infra_aap_configuration(tmp_path: Path) -> None:
    """Its roles silently drop unknown fields. Their known fields are recorded from their tasks."""
    record = json.loads((ROOT / "tests/data/awx/aap-configuration-3.0.0.json").read_text())
    text = (ROOT / "awx" / "controller.yml").read_text()
    ours = re.findall(r"^((?:controller|aap)_\w+):", text, re.MULTILINE)
    for secret in ("reconciler-token", "maas-key"):
        (tmp_path / secret).write_text(SECRET)
    site = {"gpuaas_awx_contracts": str(ROOT / "contracts/runs"), **SITE}
    content = "{{ {" + ", ".join(f"'{name}': {name}" for name in ours) + "} | to_json }}"
    files = [str(ROOT / "awx" / name) for name in ("job_templates.yml", "controller.yml")]
    task = {
        "ansible.builtin.copy": {"content": content, "dest": f"{tmp_path}/data", "mode": "0600"}
    }
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False}
    (tmp_path / "play.yml").write_text(
        yaml.safe_dump([{**play, "vars_files": files, "tasks": [task]}])
    )
    words = [str(BIN / "ansible-playbook"), "-i", "localhost,", str(tmp_path / "play.yml"), "-e"]
    env = {
        **os.environ,
        "GPUAAS_TOKEN_FILE": str(tmp_path / "reconciler-token"),
        "GPUAAS_MAAS_TOKEN_FILE": str(tmp_path / "maas-key"),
    }
    # A site's own playbook lies elsewhere: without the contracts there would be no template.
    lost = subprocess.run([*words, "a=b"], env=env, check=False, capture_output=True, text=True)
    assert lost.returncode and "set gpuaas_awx_contracts" in lost.stdout + lost.stderr
    subprocess.run([*words, json.dumps(site)], env=env, check=True)
    data = json.loads((tmp_path / "data").read_text())
    page = (ROOT / "docs" / "awx.md").read_text()
    for variable, items in data.items():
        role = record["variables"].get(variable)
        assert role, f"no role reads {variable}"
        assert items and all(set(item) <= set(role["fields"]) for item in items), variable
        assert role["dispatched"] or f"infra.aap_configuration.{role['role']}" in page
    for workflow in data["controller_workflows"]:
        for node in workflow["simplified_workflow_nodes"]:
            assert set(node) <= set(record["variables"]["controller_workflows"]["nodes"])
