"""Nodes and the two switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.runs import contract
from tests.unit.reconciler.api.stack import NODE, Stack

BODY = {"id": "n2", "name": "Rack 2", "address": "192.0.2.8", "profile": "lab"}


@pytest.mark.covers("CTRL-10")
def test_add_show_change(new: Stack) -> None:
    admin = new.client("admin")
    made = admin.post("admin/nodes", json={**BODY, "reason": "second host"})
    assert made.status_code == 201
    assert (made.json()["state"], made.json()["mode"]) == ("enrolling", "converting_to_slice")
    assert made.json()["created_at"].endswith("+00:00")

    changed = admin.patch("admin/nodes/n2", json={"pool": "west", "port": 2222})
    assert (changed.json()["pool"], changed.json()["port"]) == ("west", 2222)
    assert changed.json()["name"] == "Rack 2"
    assert admin.get("admin/nodes/n2").json()["certificates"] == []
    assert [row["id"] for row in admin.get("admin/nodes").json()["items"]] == ["n2", NODE]
    assert admin.get("admin/nodes", params={"state": "ready"}).json()["items"] == []

    log = admin.get("admin/audit", params={"subject_id": "n2"}).json()["items"]
    assert [row["action"] for row in log] == ["admin.node.changed", "admin.node.created"]
    assert log[1]["actor"].startswith("admin:admin#")
    assert log[1]["reason"] == "second host"


@pytest.mark.covers("HOST-7")
@pytest.mark.covers("CTRL-1")
def test_a_change_of_nothing_is_none(new: Stack) -> None:
    """The ETag stays valid for a client that decided on it."""
    admin = new.client("admin")
    before = admin.get(f"admin/nodes/{NODE}").json()
    for body in ({}, {"pool": before["pool"], "port": before["port"]}):
        answer = admin.patch(f"admin/nodes/{NODE}", json=body)
        assert (answer.status_code, answer.json()["generation"]) == (200, before["generation"])
    answer = admin.patch(f"admin/nodes/{NODE}", json={"pool": "p2", "port": before["port"]})
    assert answer.json()["generation"] == before["generation"] + 1
    (entry,) = admin.get("admin/audit", params={"action": "admin.node.changed"}).json()["items"]
    assert set(entry["detail"]) == {"pool"}


def test_a_nodes_own_place_on_the_fabric(new: Stack) -> None:
    admin = new.client("admin")
    fabric = {"fabric_interface": "ibp65s0", "fabric_address": "10.20.0.7/16"}
    made = admin.post("admin/nodes", json=BODY | fabric).json()
    assert {name: made[name] for name in fabric} == fabric
    changed = admin.patch("admin/nodes/n2", json={"fabric_address": "10.20.0.8/16"}).json()
    assert (changed["fabric_interface"], changed["fabric_address"]) == ("ibp65s0", "10.20.0.8/16")
    assert admin.patch("admin/nodes/n2", json={"fabric_address": ""}).json()["fabric_address"] == ""


@pytest.mark.covers("HOST-10", "CTRL-10")
def test_a_machines_tags_in_maas_are_unknown_none_or_some(new: Stack) -> None:
    admin = new.client("admin")
    assert admin.post("admin/nodes", json=BODY).json()["maas_tags"] is None
    other = {**BODY, "id": "n3", "name": "Rack 3", "maas_tags": ["virtual", "a_B-1", "virtual"]}
    # In another order or twice they are the same tags.
    assert admin.post("admin/nodes", json=other).json()["maas_tags"] == ["a_B-1", "virtual"]
    same = admin.patch("admin/nodes/n3", json={"maas_tags": ["virtual", "a_B-1"]})
    assert same.json()["generation"] == 0
    answers: list[Any] = []
    for tags in ([], None, ["gpuaas-profile-slice-vm"]):
        answer = admin.patch("admin/nodes/n3", json={"maas_tags": tags, "reason": "as in MAAS"})
        answers.insert(0, answer.json()["maas_tags"])
        assert answers[0] == tags
        # An omitted field keeps its value.
        after = admin.patch("admin/nodes/n3", json={"pool": f"p{len(answers)}"})
        assert after.json()["maas_tags"] == tags
    query = {"subject_id": "n3", "action": "admin.node.changed"}
    log = admin.get("admin/audit", params=query).json()["items"]
    changes = [row for row in log if "maas_tags" in row["detail"]]
    assert [row["detail"]["maas_tags"]["to"] for row in changes] == answers
    assert {row["reason"] for row in changes} == {"as in MAAS"}


@pytest.mark.covers("HOST-10", "CTRL-5")
def test_tags_put_nothing_on_sale_and_take_nothing_off(selling: Stack) -> None:
    admin, path = selling.client("admin"), f"admin/nodes/{NODE}"

    def statuses() -> list[str]:
        rows = admin.get(f"{path}/resource-slots").json()["items"]
        return [row["status"] for row in rows]

    before = statuses()
    assert "available" in before
    for tags in (["gpuaas-profile-baremetal"], ["gpuaas-profile-slice-vm"], None):
        assert admin.patch(path, json={"maas_tags": tags}).status_code == 200
        assert statuses() == before


@pytest.mark.parametrize(
    "tags",
    [
        "gpuaas-profile-slice-vm",
        [""],
        ["a b"],
        ["a.b"],
        ["ü"],
        ["a\n"],
        ["a" * 65],
        [1],
        [None],
        [f"t{number}" for number in range(65)],
    ],
)
def test_what_maas_would_not_call_a_tag_is_refused(new: Stack, tags: Any) -> None:
    admin = new.client("admin")
    for answer in (
        admin.post("admin/nodes", json={**BODY, "maas_tags": tags}),
        admin.patch(f"admin/nodes/{NODE}", json={"maas_tags": tags}),
    ):
        assert answer.json()["code"] == "request_invalid"
    assert admin.get(f"admin/nodes/{NODE}").json()["maas_tags"] is None
    assert len(admin.get("admin/nodes").json()["items"]) == 1


@pytest.mark.covers("HOST-10")
def test_the_most_and_longest_tags_are_let_through_to_the_host(new: Stack) -> None:
    """If a node could have more tags than a run accepts, its parity check would never start."""
    tags = sorted(f"{number:064d}" for number in range(64))
    answer = new.client("admin").patch(f"admin/nodes/{NODE}", json={"maas_tags": tags})
    assert answer.json()["maas_tags"] == tags
    run = {"id": "r", "task_id": "t", "kind": "k", "node_id": "n", "correlation_id": "c"}
    lab = yaml.safe_load((new.settings.profiles_dir / "lab.yml").read_text())
    given = {"slice_run": run, "slice_profile": lab, "slice_slots": [], "slice_intent": "slice"}
    contract.check_vars("parity", {**given, "slice_maas_tags": tags})


def test_an_id_is_made_when_none_is_given(new: Stack) -> None:
    body = {name: value for name, value in BODY.items() if name != "id"}
    assert len(new.client("admin").post("admin/nodes", json=body).json()["id"]) == 36


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"profile": "none"}, "profile_unknown"),
        ({"id": NODE}, "node_exists"),
        ({"id": "Has Spaces"}, "request_invalid"),
        ({"address": "-oProxyCommand=id"}, "request_invalid"),
        ({"address": "{{ x }}"}, "request_invalid"),
        ({"ssh_user": "Root"}, "request_invalid"),
        ({"fabric_interface": "ib0; reboot"}, "request_invalid"),
        ({"fabric_address": "10.20.0.7"}, "request_invalid"),
        ({"fabric_address": "10.20.0.256/16"}, "request_invalid"),
        ({"port": 0}, "request_invalid"),
        ({"name": "a\x1b[2J"}, "request_invalid"),
        ({"state": "ready"}, "request_invalid"),
    ],
)
def test_bad_nodes_are_refused(new: Stack, wrong: dict[str, Any], code: str) -> None:
    admin = new.client("admin")
    assert admin.post("admin/nodes", json=BODY | wrong).json()["code"] == code
    assert len(admin.get("admin/nodes").json()["items"]) == 1


@pytest.mark.covers("HOST-7")
def test_no_node_takes_up_a_profile_that_leaves_its_fabric_open(new: Stack, tmp_path: Path) -> None:
    """A node that has it from before is changed in everything else."""
    lab = yaml.safe_load((new.settings.profiles_dir / "lab.yml").read_text())
    del lab["fabric"]["link"]
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "lab.yml").write_text(yaml.safe_dump(lab))
    settings = new.settings.model_copy(update={"profiles_dir": tmp_path / "profiles"})
    admin = Stack(settings, new.engine, new.secrets).client("admin")
    for answer in (
        admin.post("admin/nodes", json=BODY),
        admin.patch(f"admin/nodes/{NODE}", json={"profile": "lab"}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (422, "fabric_link_missing")
    assert admin.patch(f"admin/nodes/{NODE}", json={"name": "Rack 1"}).status_code == 200


@pytest.mark.covers("CTRL-5")
def test_nothing_is_sold_before_it_is_proven(new: Stack) -> None:
    admin = new.client("admin")
    answer = admin.put(f"admin/nodes/{NODE}/scheduling", json={"enabled": True})
    assert (answer.status_code, answer.json()["code"]) == (409, "scheduling_not_ready")
    unclear = admin.put(f"admin/nodes/{NODE}/scheduling", json={"enabled": "yes"})
    assert unclear.json()["code"] == "request_invalid"


@pytest.mark.covers("CTRL-5")
def test_the_site_sells_nothing_until_switched_on(new: Stack) -> None:
    admin, path = new.client("admin"), "admin/settings/slice-scheduling"
    assert admin.get(path).json() == {"enabled": False}
    assert admin.put(path, json={"enabled": True}).json() == {"enabled": True}
    assert admin.get(path).json() == {"enabled": True}
