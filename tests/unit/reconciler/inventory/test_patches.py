"""Changes of a device in NetBox, for any values on both sides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from reconciler.inventory.expected import DEVICE_FIELDS, SEAL, seal
from reconciler.inventory.netbox import Device
from reconciler.inventory.patches import BLOCKED, PURPOSES, device_patch, device_values
from reconciler.model.states import HealthState, SlotState

pytestmark = pytest.mark.covers("ECO-2")

NAMES = [name for name in DEVICE_FIELDS if name != SEAL]
PAGE = Path(__file__).parents[4] / "docs" / "netbox.md"
SLOTS = st.lists(
    st.fixed_dictionaries(
        {
            "index": st.integers(0, 15),
            "status": st.sampled_from([state.value for state in SlotState]),
            "health": st.sampled_from([state.value for state in HealthState]),
        }
    ),
    max_size=3,
)
# Few texts, so that both sides often agree. NetBox may have anything in a field.
VALUES = st.none() | st.integers(0, 2) | st.sampled_from(["", "ready", "n1"]) | SLOTS
FIELDS = st.fixed_dictionaries(dict.fromkeys(NAMES, VALUES))
FOREIGN = st.dictionaries(st.sampled_from(["rack_note", "owner"]), st.text(max_size=3))
TAGS = st.sets(st.sampled_from([BLOCKED, "legal-hold", *PURPOSES.values()]))


def device(fields: dict[str, Any], tags: set[str]) -> Device:
    return Device.model_construct(
        id=1, name="n1", tags=[SimpleNamespace(slug=tag) for tag in tags], custom_fields=fields
    )


def tags_of(item: Device) -> set[str]:
    return {tag.slug for tag in item.tags}


def patched(item: Device, patch: dict[str, Any]) -> Device:
    """The device as NetBox has it after the change."""
    added, removed = (
        {tag["slug"] for tag in patch.get(verb, ())} for verb in ("add_tags", "remove_tags")
    )
    fields = {**item.custom_fields, **patch.get("custom_fields", {})}
    return device(fields, (tags_of(item) | added) - removed)


@given(
    FIELDS,
    st.booleans(),
    FIELDS,
    FOREIGN,
    TAGS,
    st.sampled_from(["none", "ours", "earlier", "other"]),
)
def test_a_change_ends_the_difference_or_is_not_made_for_a_foreign_edit(
    target: dict[str, Any],
    blocked: bool,
    fields: dict[str, Any],
    foreign: dict[str, str],
    tags: set[str],
    sealed: str,
) -> None:
    before = device({**fields, **foreign}, tags)
    actual = device_values(before)
    seals = {"ours": seal(actual, "a"), "earlier": seal(actual), "other": seal(actual, "b")}
    before.custom_fields[SEAL] = seals.get(sealed)
    expected: Any = SimpleNamespace(fields=target, blocked=blocked, site="a")
    values = {**target, BLOCKED: blocked}
    patch, edited = device_patch(expected, before)
    differing = sorted(name for name, value in values.items() if actual[name] != value)
    if sealed == "other" and differing:
        assert (patch, edited) == ({}, differing)
        return
    after = patched(before, patch)
    assert (edited, device_values(after)) == ([], values)
    assert after.custom_fields[SEAL] == seal(values, "a")
    assert device_patch(expected, after) == ({}, [])
    # Nothing else is written, and no value that is right already.
    assert patch.keys() <= {"custom_fields", "add_tags", "remove_tags"}
    assert set(patch.get("custom_fields", ())) <= {*differing, SEAL}
    assert tags_of(after) - {BLOCKED} == tags - {BLOCKED}
    assert {name: after.custom_fields[name] for name in foreign} == foreign


@given(SLOTS)
def test_the_schema_of_the_page_takes_what_is_written_and_nothing_else(slots: list[Any]) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    validator = Draft202012Validator(json.loads(block))
    assert validator.is_valid(slots)
    for row in slots:
        assert not validator.is_valid([{**row, "status": "sold"}])
        assert not validator.is_valid([{**row, "gpu_pci_address": "0000:1b:00.0"}])
