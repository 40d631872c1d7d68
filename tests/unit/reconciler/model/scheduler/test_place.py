"""The scheduler: same node, best fit, sliced nodes first, always the same answer, explained."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.model.scheduler.explain import LISTED, explain, public
from reconciler.model.scheduler.place import Placement, place
from reconciler.model.scheduler.snapshot import (
    NodeView,
    Refusal,
    SlotView,
    Snapshot,
    Want,
    feasible,
)

pytestmark = pytest.mark.covers("CTRL-5")


def slot(index: int, node: str = "a", **fields: Any) -> SlotView:
    base = SlotView(
        id=f"{node}{index}", index=index, status="available", fabric=f"{node}-vf{index}"
    )
    return replace(base, **fields)


def node(id: str, *slots: SlotView, **fields: Any) -> NodeView:
    return NodeView(id=id, slots=slots, **fields)


@pytest.mark.covers("CTRL-5")
def test_never_across_nodes() -> None:
    snapshot = Snapshot.of(node(n, *(slot(i, n) for i in range(4))) for n in "ab")
    assert place(snapshot, Want(6)) is None
    explanation = explain(snapshot, Want(6))
    assert explanation["summary"] == "8 GPUs free, no 6 on one node"
    assert explanation["largest"] == 4
    assert explanation["nearest"] == [{"gpus": 4, "region": "", "pool": ""}]
    assert "nodes" not in public(explanation)


@pytest.mark.covers("CTRL-5")
def test_prefers_a_sliced_node_then_the_tighter_one() -> None:
    clean = node("a", slot(0), slot(1))
    sliced = node("b", slot(0, "b"), slot(1, "b"), slot(2, "b"), slot(3, "b", status="active"))
    tight = node("c", slot(0, "c"), slot(1, "c", status="active"))
    assert _placed(Snapshot.of([clean, sliced, tight]), Want(1)).node_id == "c"
    assert _placed(Snapshot.of([clean, sliced]), Want(1)).node_id == "b"
    assert _placed(Snapshot.of([clean, sliced, tight]), Want(2)).node_id == "b"


def test_one_numa_node_and_the_smaller_gap() -> None:
    slots = [slot(i, numa_node=0) for i in range(3)] + [slot(i, numa_node=1) for i in (3, 4)]
    assert _placed(Snapshot.of([node("a", *slots)]), Want(2)).slot_ids == ("a3", "a4")
    assert _placed(Snapshot.of([node("a", *slots)]), Want(3)).slot_ids == ("a0", "a1", "a2")
    assert place(Snapshot.of([node("a", *slots)]), Want(4)) is None
    spread = _placed(Snapshot.of([node("a", *slots)]), Want(4, spanning=("",)))
    assert spread.slot_ids == ("a0", "a1", "a2", "a3")
    explanation = explain(Snapshot.of([node("a", *slots)]), Want(4))
    assert explanation["summary"] == "5 GPUs free, no 4 on one NUMA node"
    assert explanation["nearest"] == [{"gpus": 3, "region": "", "pool": ""}]


def test_a_barred_profile_is_a_reason_of_its_own() -> None:
    barred = (("h200", Refusal("nvlink_unsupported", "one GPU", "ask for one")),)
    nodes = [node("a", slot(0), slot(1), profile="h200"), node("b", slot(0, "b"), profile="pcie")]
    want = Want(2, barred=barred)
    assert place(Snapshot.of(nodes), want) is None
    assert explain(Snapshot.of(nodes), want)["reasons"] == {"nvlink_unsupported": 2}
    assert place(Snapshot.of(nodes), Want(2)) is not None


def test_the_boot_slot_is_where_most_of_the_group_is() -> None:
    slots = [slot(0, numa_node=0)] + [slot(i, numa_node=1) for i in (1, 2)]
    want = Want(3, spanning=("",))
    assert _placed(Snapshot.of([node("a", *slots)]), want).slot_ids == ("a1", "a2", "a0")


@pytest.mark.covers("CTRL-5")
def test_one_switch_and_the_one_that_is_broken_into() -> None:
    pairs = [slot(i, numa_node=0, switch=f"s{i // 2}") for i in range(6)]
    pairs[2] = replace(pairs[2], status="active")
    crossed = Snapshot.of([node("a", *pairs)])
    assert _placed(crossed, Want(2)).slot_ids == ("a0", "a1")
    assert _placed(crossed, Want(1)).slot_ids == ("a3",), "the single slot, no pair is broken"
    assert _placed(crossed, Want(4)).slot_ids == ("a0", "a1", "a4", "a5")


@pytest.mark.covers("CTRL-5")
def test_nvlink_sets_of_modules() -> None:
    sets = frozenset({frozenset({1, 2}), frozenset({3, 4}), frozenset({1, 2, 3, 4})})
    # Modules do not follow the PCI order.
    slots = [slot(i, module=module) for i, module in enumerate((4, 1, 3, 2))]
    whole = Snapshot.of([node("a", *slots, nvlink_sets=sets)])
    assert _placed(whole, Want(2)).slot_ids == ("a0", "a2"), "modules 4 and 3"
    assert _placed(whole, Want(4)).slot_ids == ("a0", "a1", "a2", "a3")
    assert _placed(whole, Want(1)).slot_ids == ("a0",), "a lone GPU needs no partition"
    assert place(whole, Want(3)) is None
    broken = [replace(slots[0], status="active"), replace(slots[1], status="active"), *slots[2:]]
    rest = Snapshot.of([node("a", *broken, nvlink_sets=sets)])
    assert place(rest, Want(2)) is None, "modules 3 and 2 are of two sets"
    explanation = explain(rest, Want(2))
    assert explanation["summary"] == "2 GPUs free, no 2 that NVLink joins on one node"
    assert (explanation["free"], explanation["largest"]) == (2, 1)
    assert explanation["nearest"] == [{"gpus": 1, "region": "", "pool": ""}]
    unknown = [replace(slot, module=-1) for slot in slots]
    assert place(Snapshot.of([node("a", *unknown, nvlink_sets=sets)]), Want(2)) is None


@pytest.mark.covers("CTRL-5")
def test_reasons() -> None:
    mixed = node(
        "a",
        slot(0, complete=False),
        slot(1, exclusive_device=False),
        slot(2, proven=False),
        slot(3, status="cleanup_blocked"),
        slot(4, fabric="card", own_function=False),
        slot(5, fabric="card", own_function=False),
        slot(6),
    )
    candidates = feasible(mixed, Want(1))
    assert [view.id for view in candidates.free] == ["a4", "a6"]
    assert candidates.reasons == {
        "incomplete": 1,
        "fractional": 1,
        "unproven": 1,
        "cleanup_blocked": 1,
        "fabric_taken": 1,
    }


def test_a_shared_card_in_use_is_taken() -> None:
    used = slot(0, status="active", fabric="card", own_function=False)
    free = slot(1, fabric="card", own_function=False)
    assert place(Snapshot.of([node("a", used, free)]), Want(1)) is None


def test_filters_and_switches() -> None:
    snapshot = Snapshot.of(
        [
            node("a", slot(0), region="r1", pool="p1"),
            node("b", slot(0, "b"), slot(1, "b"), region="r2", pool="p2"),
            node("c", slot(0, "c"), refusal="scheduling_off"),
        ]
    )
    assert _placed(snapshot, Want(1, region="r2")).node_id == "b"
    assert _placed(snapshot, Want(1, pool="p1")).node_id == "a"
    assert _placed(snapshot, Want(1, node_id="b")).node_id == "b"
    explanation = explain(snapshot, Want(1, node_id="c"))
    assert explanation["reasons"] == {"other_node": 3, "scheduling_off": 1}
    assert explanation["nodes"][2] == {
        "node_id": "c",
        "slots": 1,
        "free": 0,
        "largest": 0,
        "reasons": {"scheduling_off": 1},
    }
    assert (explanation["summary"], explanation["nearest"]) == ("no GPU free", [])
    assert explain(snapshot, Want(1))["summary"] == "3 GPUs free, 2 on one node"
    assert explain(snapshot, Want(1))["nearest"] == [], "it fits as it is"
    elsewhere = explain(snapshot, Want(2, region="r1"))
    assert elsewhere["summary"] == "1 GPU free, no 2 on one node"
    assert elsewhere["nearest"] == [
        {"gpus": 2, "region": "r2", "pool": "p2"},
        {"gpus": 1, "region": "r1", "pool": ""},
    ]


def test_nothing_at_all() -> None:
    assert place(Snapshot(()), Want(1)) is None
    assert place(Snapshot.of([node("a", slot(0))]), Want(0)) is None
    assert explain(Snapshot(()), Want(1))["summary"] == "no GPU free"


def test_many_nodes_are_summed_and_the_nearest_are_told() -> None:
    fleet = [node(f"n{i:03}", slot(0, f"n{i:03}")) for i in range(LISTED + 5)]
    fleet.append(node("z", slot(0, "z"), slot(1, "z")))
    explanation = explain(Snapshot.of(fleet), Want(3))
    assert (explanation["free"], explanation["nodes_left_out"]) == (LISTED + 7, 6)
    assert explanation["nodes"][0]["node_id"] == "z"


STATUSES = ["available", "available", "available", "active", "disabled", "cleanup_blocked"]
SETS = [
    frozenset[frozenset[int]](),
    frozenset({frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5, 6})}),
]
SLOT = st.tuples(
    st.sampled_from(STATUSES),
    st.integers(0, 2),
    st.sampled_from(["s", "t"]),
    st.booleans(),
    st.integers(-1, 6),
    st.sampled_from(["own", "own", "card"]),
)
NODE = st.tuples(st.lists(SLOT, max_size=7), st.sampled_from(SETS), st.sampled_from(["", "off"]))


def fleet(shape: Any) -> list[NodeView]:
    """Nodes as drawn; a module is there once, as on a board."""
    made = []
    for n, (rows, sets, refusal) in enumerate(shape):
        slots, seen = [], set()
        for i, (status, numa, switch, complete, module, fabric) in enumerate(rows):
            view = slot(
                i,
                f"n{n}-",
                status=status,
                numa_node=numa,
                switch=switch,
                complete=complete,
                module=-1 if module in seen else module,
            )
            seen.add(module)
            if fabric == "card":
                view = replace(view, fabric=f"n{n}-card", own_function=False)
            slots.append(view)
        made.append(node(f"n{n}", *slots, nvlink_sets=sets, refusal=refusal))
    return made


def allowed(view: NodeView, group: tuple[SlotView, ...]) -> bool:
    modules = frozenset(slot.module for slot in group)
    joined = not view.nvlink_sets or len(group) == 1 or modules in view.nvlink_sets
    return joined and (len(modules) == len(group) or not view.nvlink_sets or len(group) == 1)


def free_slots(view: NodeView) -> list[SlotView]:
    """Slots that can be sold: a single slot of a shared card, and none while the card is in use."""
    idle = ("available", "disabled")
    cards = {slot.fabric for slot in view.slots if slot.status not in idle}
    free = []
    for slot in sorted(view.slots, key=lambda slot: slot.index):
        sellable = not view.refusal and slot.status == "available" and slot.complete
        if sellable and slot.exclusive_device and slot.proven and slot.fabric not in cards:
            free.append(slot)
            if not slot.own_function:
                cards.add(slot.fabric)
    return free


def rank(view: NodeView, group: tuple[SlotView, ...]) -> tuple[Any, ...]:
    """CTRL-5's "best fit", said in its own words; the lowest wins.

    A node that is sliced already; near, so few NUMA nodes and few switches; tight, so little left
    on the node, beside the group and on its switches; and then the names, so that no two are equal.
    """
    numa = [slot.numa_node for slot in group]
    switches = [(slot.numa_node, slot.switch) for slot in group]
    rest = [slot for slot in free_slots(view) if slot not in group]
    return (
        all(slot.status in ("available", "disabled") for slot in view.slots),
        len(set(numa)),
        len(set(switches)),
        len(rest),
        len([slot for slot in rest if slot.numa_node in numa]),
        len([slot for slot in rest if (slot.numa_node, slot.switch) in switches]),
        view.id,
        [slot.index for slot in group],
    )


@settings(max_examples=150)
@given(
    st.lists(NODE, max_size=3),
    st.integers(1, 5),
    st.sampled_from([(), ("",)]),
    st.randoms(use_true_random=False),
)
def test_the_best_of_all_that_is_feasible(
    shape: list[Any], gpus: int, spanning: tuple[str, ...], shuffler: random.Random
) -> None:
    nodes = fleet(shape)
    want = Want(gpus, spanning=spanning)
    placement = place(Snapshot.of(nodes), want)
    shuffled = [
        replace(view, slots=tuple(shuffler.sample(view.slots, len(view.slots))))
        for view in shuffler.sample(nodes, len(nodes))
    ]
    assert place(Snapshot.of(shuffled), want) == placement, "rows in another order"
    is_the_best(nodes, want)


def test_the_best_where_much_fits() -> None:
    """Nodes that differ little, so that every part of the rule decides somewhere."""
    chance = random.Random(20_26)  # noqa: S311
    for _ in range(400):
        nodes = [
            node(
                f"n{n}",
                *(
                    slot(
                        i,
                        f"n{n}-",
                        status=chance.choice(["available"] * 6 + ["active", "disabled"]),
                        numa_node=chance.randrange(2),
                        switch=chance.choice("st"),
                    )
                    for i in range(chance.randint(2, 6))
                ),
            )
            for n in range(2)
        ]
        spanning = chance.choice([(), ("",)])
        is_the_best(nodes, Want(chance.randint(1, 4), spanning=spanning))


def is_the_best(nodes: list[NodeView], want: Want) -> None:
    """The placement is the best of every group of free slots."""
    placement, gpus = place(Snapshot.of(nodes), want), want.gpus
    options = [
        (rank(view, group), group)
        for view in nodes
        for group in combinations(free_slots(view), gpus)
        if allowed(view, group) and (want.spanning or len({slot.numa_node for slot in group}) == 1)
    ]
    if placement is None:
        assert options == []
        return
    ranked, best = min(options, key=lambda option: option[0])
    assert (placement.node_id, set(placement.slot_ids)) == (ranked[-2], {slot.id for slot in best})
    assert len(placement.slot_ids) == gpus
    # It boots where most of it is.
    numa = [slot.numa_node for slot in best]
    (boot,) = [slot for slot in best if slot.id == placement.slot_ids[0]]
    assert numa.count(boot.numa_node) == max(map(numa.count, numa))


@settings(max_examples=80)
@given(st.lists(NODE, max_size=4), st.integers(1, 5))
def test_the_explanation_adds_up(shape: list[Any], gpus: int) -> None:
    nodes, want = fleet(shape), Want(gpus)
    snapshot = Snapshot.of(nodes)
    explanation = explain(snapshot, want)
    assert explanation["slots"] == sum(len(view.slots) for view in nodes)
    assert explanation["free"] + sum(explanation["reasons"].values()) == explanation["slots"]
    for row in explanation["nodes"]:
        assert row["free"] + sum(row["reasons"].values()) == row["slots"]
        assert row["largest"] <= row["free"]
    assert sum(row["free"] for row in explanation["nodes"]) == explanation["free"]
    fits = place(snapshot, want) is not None
    # Sets leave holes: a larger group may fit where this group does not.
    assert fits <= (explanation["largest"] >= gpus)
    for offer in explanation["nearest"]:
        assert not fits
        nearer = Want(offer["gpus"], offer["region"], offer["pool"])
        assert place(snapshot, nearer) is not None


def _placed(snapshot: Snapshot, want: Want) -> Placement:
    placement = place(snapshot, want)
    assert placement is not None
    return placement
