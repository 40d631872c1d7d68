"""Job templates of awx/ against the run contract, and the import against the templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.runs import contract
from reconciler.runs.awx.request import REQUIRED

pytestmark = pytest.mark.covers("CTRL-9")

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES: list[dict[str, Any]] = yaml.safe_load((ROOT / "awx/job_templates.yml").read_text())[
    "job_templates"
]


def test_there_is_a_template_for_each_playbook() -> None:
    names = [template["name"] for template in TEMPLATES]
    assert sorted(names) == [f"gpuaas.slice.{playbook}" for playbook in contract.PLAYBOOKS]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template["name"])
def test_a_template_is_what_its_launch_needs(template: dict[str, Any]) -> None:
    playbook = template["name"].removeprefix("gpuaas.slice.")
    assert template["playbook"] == f"playbooks/{playbook}.yml"
    assert (ROOT / template["playbook"]).is_file()
    said = template["description"].partition("Variables: ")[2].split(", ")
    assert said == contract.schema(playbook)["required"]
    assert {field: template[field] for field in REQUIRED} == REQUIRED


def test_the_import_leaves_no_field_out() -> None:
    (play,) = yaml.safe_load((ROOT / "awx/import.yml").read_text())
    (task,) = play["tasks"]
    given = task["awx.awx.job_template"]
    for template in TEMPLATES:
        assert set(template) == set(given)
    assert given == {field: f"{{{{ item.{field} }}}}" for field in given}
