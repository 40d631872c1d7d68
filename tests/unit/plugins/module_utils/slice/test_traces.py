"""Traces of slices: the owner of an object, read from its name alone."""

from __future__ import annotations

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _slice_holdings, _traces

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
EARLY = "00000000-0073-4ef7-8a51-2897e902365d"


@pytest.mark.parametrize(
    ("owner", "belongs"),
    [
        (ONE, True),
        ("23bd713b6073", True),
        ("23bd713b60734ef7", True),
        ("23bd713b60734ef8", False),
        ("23bd713b607", False),
        ("", False),
        ("a-name-of-the-site", False),
    ],
)
def test_a_trace_belongs_to_the_allocation_whose_id_begins_so(owner: str, belongs: bool) -> None:
    assert _traces.Trace(owner, "", {}).belongs_to(ONE) is belongs


@pytest.mark.parametrize("allocation", [ONE, EARLY])
def test_every_name_gives_its_owner_back(allocation: str) -> None:
    whole = (
        _object_names.domain_name(allocation),
        _object_names.seed_path(allocation),
        _object_names.nvram_path(allocation),
        f"{_object_names.console_path(allocation)}.1",
    )
    assert {_object_names.owner(name) for name in whole} == {allocation}
    digits = allocation.replace("-", "")
    assert _object_names.port_owner(_object_names.port_name(allocation)) == digits[:12]
    assert _object_names.cookie_owner(_object_names.cookie(allocation)) == digits[:16]


@pytest.mark.parametrize("name", ["eno1", "gs1", "gs23bd713b60731", "xgs23bd713b6073"])
def test_a_port_of_the_site_is_nobodys(name: str) -> None:
    assert _object_names.port_owner(name) == ""


def test_every_kind_is_listed_among_the_holdings() -> None:
    assert set(_slice_holdings.PARTS) == set(_traces.looks("ovsbr0"))
