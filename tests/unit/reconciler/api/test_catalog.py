"""Catalogue: offers of the hardware profiles and free capacity, without names of machines."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy import Connection

from reconciler.api import catalog
from reconciler.db.engine import transaction
from reconciler.db.schema import nodes, slots
from reconciler.lifecycle import placement
from reconciler.model.scheduler.snapshot import Want
from reconciler.settings import Settings
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.api.test_canaries import canaries
from tests.unit.reconciler.api.test_launches import launch, with_profile
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("CTRL-11")


def test_offers_are_those_of_the_hardware_profiles(selling: Stack) -> None:
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(region="north"))
    shown = selling.client("member").get("catalog").json()
    offers = {sku["name"]: sku for sku in shown["skus"]}
    assert offers["h200-sxm-slice"]["gpu_counts"] == [1]
    assert offers["lab-edu-slice"]["gpu_counts"] == [1, 2, 4]
    assert offers["h200-sxm-slice"]["vcpus_per_gpu"] == 24
    disks = [
        (offers[name]["least_disk_bytes_per_gpu"], offers[name]["most_disk_bytes_per_gpu"])
        for name in ("h200-sxm-slice", "lab-edu-slice", "lab")
    ]
    with transaction(selling.engine) as conn:
        (size,) = conn.execute(sa.select(slots.c.nvme_size_bytes).distinct()).scalars()
    assert disks == [(None, None), (size, size), (None, None)]
    (north,) = shown["regions"]
    assert north.pop("title") == "north"
    assert north == {"name": "north", "enabled": True, "planned": False, "reason": ""}


def test_a_profile_with_a_text_for_a_number_hides_no_other_offer(
    selling: Stack, tmp_path: Path
) -> None:
    stack = with_profile(selling, tmp_path)
    other = (tmp_path / "zz-other.yml").read_text()
    assert "vcpus_per_gpu: 1\n" in other
    for wrong in ("vcpus_per_gpu: one\n", "vcpus_per_gpu: [1]\n"):
        (tmp_path / "zz-other.yml").write_text(other.replace("vcpus_per_gpu: 1\n", wrong))
        offers = stack.client("member").get("catalog").json()["skus"]
        assert [sku["name"] for sku in offers] == ["lab-edu-slice", "lab"]


def test_regions_to_come_are_named_and_disabled(selling: Stack) -> None:
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(region="north"))
    planned = {"planned_regions": "south=Lyon (Sud), north=Århus, west"}
    selling.settings = Settings(**{**selling.settings.model_dump(), **planned})
    north, south, west = selling.client("member").get("catalog").json()["regions"]
    assert (north["enabled"], north["planned"]) == (True, False)
    # A title stays when the region gets its first machine.
    titles = [each["title"] for each in (north, south, west)]
    assert titles == ["Århus", "Lyon (Sud)", "west"]
    assert (south["name"], south["enabled"], south["planned"]) == ("south", False, True)
    for wrong in ("South", "a b", "a,,b", "<b>", "a=", "a=b=c", "a=b\nc"):
        with pytest.raises(ValidationError):
            Settings(planned_regions=wrong)


@pytest.mark.parametrize("off", ["drained", "node", "site", "taken"])
def test_a_region_is_enabled_while_something_fits(selling: Stack, off: str) -> None:
    """By the judgement of the availability. A free slot of a drained node is not for sale."""
    admin, member = selling.client("admin"), selling.client("member")
    because = {"reason": "maintenance"}
    if off == "drained":
        answer = admin.post(f"admin/nodes/{NODE}/drain", json=because)
    elif off == "taken":
        launch(selling)
        answer = launch(selling, key="second")
    else:
        path = (
            f"admin/nodes/{NODE}/scheduling" if off == "node" else "admin/settings/slice-scheduling"
        )
        answer = admin.put(path, json={"enabled": False, **because})
    assert answer.status_code in (200, 201), answer.text
    assert member.get("catalog/availability", params={"gpus": 1}).json()["fits"] is False
    (region,) = member.get("catalog").json()["regions"]
    assert region == {
        "name": "",
        "title": "",
        "enabled": False,
        "planned": False,
        "reason": "nothing is free here now",
    }


def test_one_judgement_of_the_regions_serves_all_and_refuses_nobody(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog.AnswerCache, "FRESH_S", 600.0)
    gate, judged, regions = threading.Event(), [], placement.regions

    def slowly(conn: Connection, wants: Any) -> set[str]:
        judged.append(1)
        assert len(judged) == 1 or gate.wait(30)
        return regions(conn, wants)

    monkeypatch.setattr(placement, "regions", slowly)

    def enabled(who: str = "member") -> list[bool]:
        return [row["enabled"] for row in selling.client(who).get("catalog").json()["regions"]]

    assert (enabled(), enabled("stranger"), len(judged)) == ([True], [True], 1)
    launch(selling)
    launch(selling, key="second")
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(enabled)
        until(lambda: len(judged) == 2)
        assert (enabled(), enabled("stranger")) == ([True], [True]), "as it was a moment ago"
        gate.set()
        assert slow.result() == [False]
    assert enabled() == [False]


def test_availability_follows_launches_and_names_no_machine(selling: Stack) -> None:
    planted, member = canaries(selling), selling.client("member")

    def available(**query: str | int) -> dict[str, object]:
        answer = member.get("catalog/availability", params=query)
        assert not {canary for canary in planted if canary in answer.text.lower()}
        document: dict[str, object] = answer.json()
        return document

    both = available(gpus=2, sku="lab-edu-slice")
    assert (both["fits"], both["free"], both["largest"]) == (True, 2, 2)
    launch(selling)
    body = available(gpus=2)
    assert (body["fits"], body["largest"]) == (False, 1)
    assert both["summary"] == "2 GPUs free, 2 on one node" and both["reasons"] == {}
    assert body["summary"] == "1 GPU free, no 2 on one node" and body["reasons"] == {"reserved": 1}
    assert body["nearest"] == [{"gpus": 1, "region": "", "pool": ""}]
    elsewhere = available(gpus=1, sku="h200-sxm-slice")
    assert (elsewhere["fits"], elsewhere["free"]) == (False, 0)
    assert available(gpus=1, sku="none")["code"] == "sku_unknown"
    assert available(gpus=0)["code"] == "request_invalid"


def test_one_judgement_serves_all_until_something_changes(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member's endless different queries occupy a single thread; others still get answers."""
    monkeypatch.setattr(catalog.AnswerCache, "FRESH_S", 600.0)
    judged, judge = [], placement.judge
    gate = threading.Event()

    def slowly(conn: Connection, want: Want) -> Any:
        judged.append(want.gpus)
        if want.gpus > 9:
            assert gate.wait(30)
        return judge(conn, want)

    monkeypatch.setattr(placement, "judge", slowly)

    def free(who: str, gpus: int) -> Any:
        answer = selling.client(who).get("catalog/availability", params={"gpus": gpus})
        return answer.json().get("free", answer.status_code)

    assert [free(who, 1) for who in ("member", "stranger", "member")] == [2, 2, 2]
    assert judged == [1]
    launch(selling)
    assert free("member", 1) == 1 and judged == [1, 1]
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(free, "stranger", 10)
        until(lambda: len(judged) == 3)
        assert {free("stranger", gpus) for gpus in range(20, 40)} == {429}
        assert free("stranger", 1) == 1, "what was judged before is there for all"
        assert free("member", 2) == 1, "and others have places of their own"
        gate.set()
        assert slow.result() == 1
    assert free("stranger", 99) == 1


def test_a_fleet_in_one_request(selling: Stack) -> None:
    made = launch(selling).json()["id"]
    fleet = selling.client("admin").get("admin/fleet").json()
    assert fleet["nodes"] == {"ready": 1}
    assert fleet["regions"] == [{"region": "", "nodes": fleet["nodes"]}]
    assert fleet["machines"] == [], "a host of slices is not sold as a whole"
    assert fleet["slots"] == {"available": 1, "reserved": 1}
    assert fleet["capacity"] == [{"region": "", "sku": "lab-edu-slice", "slots": fleet["slots"]}]
    (node,) = fleet["items"]
    assert node["id"] == NODE
    holders = {slot["status"]: slot["allocation_id"] for slot in node["slots"]}
    assert holders == {"available": None, "reserved": made}
    blocked = selling.client("admin").get("admin/fleet", params={"blocked": "true"}).json()
    assert blocked["items"] == []
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(state="retired"))
    assert selling.client("admin").get("admin/fleet").json()["items"] == []
