"""Explanations of a placement, for operators and for tenants."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from reconciler.db.engine import transaction
from reconciler.lifecycle import gate, host
from reconciler.model.states import SlotState
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.stack import ACT, FREE, NODE, Stack, bundle, discovery
from tests.unit.reconciler.api.test_launches import BODY, PATH, launch

EXPLAIN = "admin/placement/explain"


@pytest.mark.covers("CTRL-5")
def test_where_it_would_go(selling: Stack) -> None:
    admin = selling.client("admin")
    answer = admin.get(EXPLAIN, params={"gpus": 1}).json()
    assert answer["placement"]["node_id"] == NODE
    (chosen,) = answer["placement"]["slot_ids"]
    launched = launch(selling).json()["id"]
    (claim,) = admin.get(f"admin/allocations/{launched}").json()["claims"]
    assert claim["slot_id"] == chosen, "and there it went"
    left = admin.get(EXPLAIN, params={"gpus": 2}).json()
    assert left["placement"] is None
    assert left["explanation"]["nodes"] == [
        {
            "node_id": NODE,
            "slots": len(FREE),
            "free": 1,
            "largest": 1,
            "reasons": {SlotState.RESERVED: 1},
        }
    ]
    assert left["explanation"]["nearest"] == [{"gpus": 1, "region": "", "pool": ""}]


@pytest.mark.covers("CTRL-5")
def test_filters(selling: Stack) -> None:
    admin = selling.client("admin")
    for query, reason in (
        ({"region": "moon"}, "other_region"),
        ({"pool": "none"}, "other_pool"),
        ({"node_id": "n9"}, "other_node"),
    ):
        answer = admin.get(EXPLAIN, params={"gpus": 1, **query}).json()
        assert answer["placement"] is None
        assert answer["explanation"]["reasons"] == {reason: len(FREE)}
    assert admin.get(EXPLAIN, params={"gpus": 0}).json()["code"] == "request_invalid"
    member = selling.client("member").get(EXPLAIN, params={"gpus": 1})
    assert (member.status_code, member.json()["code"]) == (403, "role_required")


@pytest.mark.covers("CTRL-5", "CTRL-10")
def test_a_refused_launch_tells_admins_where_and_members_how_many(selling: Stack) -> None:
    body = BODY | {"gpu_count": 3}
    problems = {}
    for who in ("admin", "member"):
        headers = {"Idempotency-Key": who}
        answer = selling.client(who).post(PATH, json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (409, "no_capacity")
        assert answer.headers["content-type"] == "application/problem+json"
        problems[who] = answer.json()
    nodes = problems["admin"]["explanation"].pop("nodes")
    assert [row["node_id"] for row in nodes] == [NODE]
    problems["admin"]["explanation"].pop("nodes_left_out")
    assert problems["member"]["explanation"] == problems["admin"]["explanation"]
    assert problems["member"]["explanation"]["nearest"] == [{"gpus": 2, "region": "", "pool": ""}]
    assert problems["member"]["explanation"]["summary"] == "2 GPUs free, no 3 on one node"
    assert problems["member"]["remedy"] == "ask for 2 GPUs, or later"
    assert NODE not in str(problems["member"])


@pytest.mark.covers("CTRL-5")
def test_slots_know_where_their_gpu_sits(selling: Stack) -> None:
    slots = selling.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    assert [slot["capacity_metadata"]["pcie_switch"] for slot in slots] == [
        "pci0000:20",
        "pci0000:40",
    ]


def test_what_nvlink_joins_is_the_profiles_and_kept_with_the_slot(
    selling: Stack, tmp_path: Path
) -> None:
    """Approved again under a profile that knows the board; two GPUs of no common set do not fit."""
    lab = yaml.safe_load((selling.settings.profiles_dir / "lab.yml").read_text())
    addresses = [bundle(index)["gpu_pci_address"] for index in FREE]
    lab["gpu"] |= {"nvlink_sets": [[1, 2], [3, 4]], "module_ids": {addresses[0]: 1}}
    lab["gpu"]["module_ids"][addresses[1]] = 3
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "lab.yml").write_text(yaml.safe_dump(lab))
    settings = selling.settings.model_copy(update={"profiles_dir": tmp_path / "profiles"})
    stack = Stack(settings, selling.engine, selling.secrets)
    admin, path = stack.client("admin"), f"admin/nodes/{NODE}/resource-slots"
    for slot in admin.get(path).json()["items"]:
        for act in ("disable", "withdraw"):
            assert admin.post(f"{path}/{slot['id']}/{act}").status_code == 200
    body = {"slots": [bundle(index) for index in FREE], "reason": "another profile"}
    approved = admin.post(path, json=body).json()["items"]
    metadata = [slot["capacity_metadata"] for slot in approved]
    assert [slot["gpu_module_id"] for slot in metadata] == [1, 3]
    assert metadata[0]["nvlink_sets"] == [[1, 2], [3, 4]]
    report = {"failures": 0, "warnings": 0, **wipes.proven(discovery())}
    with transaction(stack.engine) as conn:
        host.record_discovery(conn, NODE, discovery(), ACT)
        host.record_parity(conn, NODE, report, ACT)
        assert len(gate.open_gate(conn, NODE, ACT)["opened"]) == len(FREE)
    answer = admin.get(EXPLAIN, params={"gpus": 2}).json()
    assert answer["explanation"]["summary"] == "2 GPUs free, no 2 that NVLink joins on one node"
    assert admin.get(EXPLAIN, params={"gpus": 1}).json()["placement"]
