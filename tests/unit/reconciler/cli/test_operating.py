"""`gpuaas explain`, `recovery-policy`, `projects set-quota` and `usage`."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields
from typing import Any

import pytest

from reconciler.api.projects import Limits
from reconciler.cli import projects
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.cli.conftest import Gpuaas


@pytest.mark.covers("CTRL-5")
def test_explain(selling: Stack, gpuaas: Gpuaas) -> None:
    out = gpuaas.at(selling)("explain", "--gpus", "3")
    assert "2 GPUs free, no 3 on one node" in out
    assert NODE in out
    document = json.loads(gpuaas("explain", "--pool", "none", "--output", "json"))
    assert document["explanation"]["reasons"] == {"other_pool": 2}


@pytest.mark.covers("CTRL-7")
def test_recovery_policy(selling: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)("recovery-policy", "on", "--per-hour", "9", "--output", "json")
    assert json.loads(gpuaas.out)["per_hour"] == 9
    gpuaas("recovery-policy", "off", "--output", "json")
    document = json.loads(gpuaas("recovery-policy", "--output", "json"))
    assert (document["enabled"], document["per_hour"]) == (False, 9), "limits stay"


def test_the_switch_of_the_site_is_shown(selling: Stack, gpuaas: Gpuaas) -> None:
    for switch, enabled in (("show", True), ("off", False), ("show", False)):
        gpuaas.at(selling)("scheduling", switch, "--reason", "why", "--output", "json")
        assert json.loads(gpuaas.out) == {"enabled": enabled}
    assert json.loads(gpuaas("scheduling", "--output", "json")) == {"enabled": False}


def test_every_limit_of_a_project_is_an_option(selling: Stack, gpuaas: Gpuaas) -> None:
    names = [field.name for field in fields(projects.Limits)]
    assert {*names, "reason"} == set(Limits.model_fields)
    values = {name: number for number, name in enumerate(names, 1)}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    shown = gpuaas.at(selling)("projects", "set-quota", "demo", *words, "--output", "json")
    assert json.loads(shown)["own"] == values


def test_a_limit_that_is_not_named_stays(selling: Stack, gpuaas: Gpuaas) -> None:
    def limits(*words: str) -> Any:
        gpuaas.at(selling)("projects", "set-quota", *words, "--output", "json")
        document = json.loads(gpuaas.err or gpuaas.out)
        return document.get("own", document.get("limits", document.get("code")))

    assert limits("demo", "--gpus=8", "--jobs-open=5") == {"gpus": 8, "jobs_open": 5}
    assert limits("demo", "--machines", "2") == {"gpus": 8, "jobs_open": 5, "machines": 2}
    assert limits("demo", "--remove=jobs-open", "--remove=gpus") == {"machines": 2}
    for name in ("pgus", "reason"):
        assert limits("demo", f"--remove={name}") == "request_invalid"
    gpuaas("projects", "set-quota", "demo", "--gpus=3", "--remove=gpus")
    assert (gpuaas.status, "set it or remove it" in gpuaas.err) == (2, True)
    shipped = selling.client("admin").get("admin/settings/default-quota").json()["limits"]
    assert limits("--gpus=64") == shipped | {"gpus": 64}
    assert limits("--remove=gpus") == limits() == shipped


@pytest.mark.covers("CTRL-14")
def test_usage(selling: Stack, gpuaas: Gpuaas) -> None:
    allocation_id = launch(selling).json()["id"]
    activate(selling, allocation_id)
    assert allocation_id in gpuaas.at(selling)("usage", "--from", "2020-01-01T00:00:00Z")
    assert allocation_id in gpuaas("usage", "--from", "2020-01-01")
    assert allocation_id not in gpuaas("usage", "--from", "2020-01-01", "--to", "2020-01-02")
    assert gpuaas.status == 0, gpuaas.err
    (row,) = csv.DictReader(io.StringIO(gpuaas("usage", "--project", "demo", "--csv")))
    assert (row["allocation_id"], row["node_id"]) == (allocation_id, NODE)
    mine = gpuaas.at(selling, "member")("usage", "--project", "demo", "--csv")
    assert (allocation_id in mine, NODE in mine) == (True, False)
