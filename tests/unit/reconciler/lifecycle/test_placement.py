"""Placement on records: few nodes are read, and every fitting slot is considered."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import slots
from reconciler.lifecycle import host, launch, placement
from reconciler.model.errors import Problem
from reconciler.model.scheduler.place import place
from reconciler.model.scheduler.snapshot import Snapshot, Want
from reconciler.records import nodes
from tests.unit.reconciler.conftest import Site


@pytest.fixture
def fleet(site: Site) -> Any:
    """Eight nodes with two slots each; the last node is in use already."""
    for number in range(8):
        site.node(f"n{number}", (0, 1), number)
    with transaction(site.engine) as conn:
        launch.allocate(conn, site.launch(node_id="n7"), site.act)
    return site


def ids(conn: sa.Connection, want: Want, limit: int, **options: Any) -> list[str]:
    """Those with a slice, then the others."""
    looked = (
        placement.likely(conn, want, limit, sliced=sliced, **options) for sliced in (True, False)
    )
    return [node.id for picture in looked for node in picture.nodes][:limit]


def test_the_counts_rank_nodes_as_the_scheduler_does(fleet: Any) -> None:
    with reading(fleet.engine) as conn:
        assert ids(conn, Want(1), 1) == ["n7"], "with a slice, and the fullest"
        assert ids(conn, Want(2), 3) == ["n0", "n1", "n2"], "one slot of n7 is taken"
        assert ids(conn, Want(1), 2, beside={"n7", "n0"}) == ["n1", "n2"]
        assert ids(conn, Want(1, node_id="n5"), 9) == ["n5"]
        assert ids(conn, Want(1, pool="none"), 9) == []
        assert ids(conn, Want(3), 9) == []
        best, explanation = placement.judge(conn, Want(1))
        assert (best.node_id, explanation["free"]) == ("n7", 15)


def test_nodes_that_take_nothing_are_not_looked_at(fleet: Any) -> None:
    with transaction(fleet.engine) as conn:
        host.drain(conn, "n7", fleet.act)
        host.set_scheduling(conn, "n0", False, fleet.act)
        assert ids(conn, Want(1), 2) == ["n1", "n2"]


def test_one_room_on_one_numa_node_first(fleet: Any) -> None:
    with transaction(fleet.engine) as conn:
        # The fullest two slots of n1 are far from each other, those of the others are not.
        far = sa.update(slots).where(slots.c.node_id == "n1", slots.c.slot_index == 1)
        conn.execute(far.values(numa_node=9))
        assert ids(conn, Want(2), 1) == ["n0"]
        assert "n1" not in ids(conn, Want(2), 6)


def refused(conn: sa.Connection, want: Want) -> Problem:
    """Nothing is found, and this is why."""
    with pytest.raises(placement.NoRoom):
        placement.reserve(conn, want)
    problem = placement.refusal(conn, want)
    assert problem is not None
    return problem


@pytest.mark.covers("CTRL-5")
def test_rows_that_the_counts_take_for_free_are_passed_over(fleet: Any) -> None:
    """Every node but n3 is full of incomplete rows: the search goes on until n3 is found."""
    with transaction(fleet.engine) as conn:
        broken = sa.update(slots).where(slots.c.node_id != "n3", slots.c.status == "available")
        conn.execute(broken.values(private_ip=slots.c.id, nvme_serial=""))
        node_id, reserved = placement.reserve(conn, Want(2))
        assert (node_id, len(reserved)) == ("n3", 2)
        explanation: Any = refused(conn, Want(3)).detail["explanation"]
        assert explanation["reasons"] == {"incomplete": 13, "reserved": 1}
        assert explanation["summary"] == "2 GPUs free, no 3 on one node"


def test_nvlink_sets_are_those_of_the_approved_slots(fleet: Any) -> None:
    with transaction(fleet.engine) as conn:
        for slot in rows.every(conn, sa.select(slots)):
            joined = {"gpu_module_id": slot["slot_index"], "nvlink_sets": [[1, 2]]}
            metadata = {**slot["capacity_metadata"], **joined}
            update = sa.update(slots).where(slots.c.id == slot["id"])
            conn.execute(update.values(capacity_metadata=metadata))
        problem = refused(conn, Want(2))
        assert problem.found == "15 GPUs free, no 2 that NVLink joins on one node"
        assert problem.remedy == "ask for 1 GPU, or later"


@pytest.mark.covers("CTRL-5")
def test_elsewhere_is_offered(fleet: Any) -> None:
    with transaction(fleet.engine) as conn:
        nodes.change(conn, "n2", fleet.act, region="r2")
        assert "ask for 2 GPUs in" in refused(conn, Want(2, region="r1")).remedy


@pytest.mark.covers("CTRL-5")
@pytest.mark.parametrize("seed", range(12))
def test_looking_at_few_nodes_finds_what_looking_at_all_would(fleet: Any, seed: int) -> None:
    """Counts rank nodes as scores do, but for PCIe switches: those are judged among the first."""

    def one_of(what: str, *choices: Any) -> Any:
        return choices[zlib.crc32(f"{seed} {what}".encode()) % len(choices)]

    with transaction(fleet.engine) as conn:
        conn.execute(
            sa.update(slots).values(capacity_metadata={"fabric_claim_mode": "per_slot_vf"})
        )
        for slot in rows.every(conn, sa.select(slots)):
            disk = str(slot["nvme_identity"])
            status = one_of(f"status {disk}", "available", "available", "active", "disabled")
            used = {} if status == "available" else {"available_proof_id": None, "status": status}
            moved = {"numa_node": one_of(f"numa {disk}", 0, 1), **used}
            if slot["status"] == "available":
                conn.execute(sa.update(slots).where(slots.c.id == slot["id"]).values(moved))
        for number in range(8):
            if one_of(f"off {number}", True, False, False, False, False):
                host.set_scheduling(conn, f"n{number}", False, fleet.act)
        for want in (Want(1), Want(2), Want(1, node_id="n3")):
            best = place(placement.snapshot(conn), want)
            if best is None:
                with pytest.raises(Problem, match="no_capacity"):
                    placement.reserve(conn, want)
                continue
            node_id, reserved = placement.reserve(conn, want)
            assert (node_id, tuple(slot.id for slot in reserved)) == (best.node_id, best.slot_ids)


def test_a_node_that_gets_its_first_slice_meanwhile_is_not_missed(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant comes between the look at nodes with slices and that at those without."""
    look = placement.likely

    def looked(conn: sa.Connection, *given: Any, sliced: bool, **options: Any) -> Snapshot:
        selected = look(conn, *given, sliced=sliced, **options)
        if sliced:
            taken = sa.update(slots).where(slots.c.node_id == "n1", slots.c.slot_index == 0)
            conn.execute(taken.values(status="active", available_proof_id=None))
        return selected

    monkeypatch.setattr(placement, "likely", looked)
    want = Want(1, node_id="n1")
    with transaction(fleet.engine) as conn:
        with pytest.raises(placement.NoRoom):
            placement.reserve(conn, want)
        # Who asked is not told so: there is room, and the launch is tried again.
        assert placement.refusal(conn, want) is None
        node_id, selected = placement.reserve(conn, want)
    assert (node_id, [slot.slot_index for slot in selected]) == ("n1", [1])
