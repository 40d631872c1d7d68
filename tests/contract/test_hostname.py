"""The common rule of host names for the API, the run contract and the modules on the host."""

from __future__ import annotations

import re

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _cloud_seed
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

from reconciler.api.models import RESERVED_HOSTNAMES, Hostname
from reconciler.runs import contract

ADAPTER: TypeAdapter[str] = TypeAdapter(Hostname)
COMMON = contract.schema("common")["$defs"]["hostname"]
# Read by dnsmasq as a lease time or a command, or written in a way that some readers accept.
RESERVED = ["12h", "10", "7s", "0", "infinite", "ignore", "3w", "90d", "15m"]
MALFORMED = ["", "-a", "a-", "a.b", "Ada", "a\n", "\na", "a b", "\u0661h", "a,b", "id:*", "a" * 64]


def on_the_host(name: str) -> bool:
    try:
        _object_names.check_hostname("hostname", name)
    except Refusal as refusal:
        assert refusal.code == "spec_invalid"
        return False
    return True


def in_the_api(name: str) -> bool:
    try:
        return ADAPTER.validate_python(name) == name
    except ValidationError:
        return False


@given(
    st.one_of(
        st.text(max_size=66),
        st.text("0123456789smhdw-infteogr", min_size=1, max_size=9),
        st.from_regex(_object_names.RESERVED_HOSTNAME),
    )
)
@example("a" * 63)
@example("1h1")
@example("hh")
@example("infinite1")
def test_the_same_names_are_accepted_everywhere(name: str) -> None:
    host = on_the_host(name)
    assert in_the_api(name) == host
    # Readers of JSON Schema differ in whether `$` matches before a line feed at the end.
    if not name.endswith("\n"):
        assert Draft202012Validator(COMMON).is_valid(name) == host


@pytest.mark.parametrize("name", [*RESERVED, *MALFORMED])
def test_words_of_dnsmasq_are_no_names(name: str) -> None:
    assert not in_the_api(name)
    assert not on_the_host(name)
    with pytest.raises(Refusal, match="spec_invalid"):
        _cloud_seed.files({"hostname": name}, {}, {})
    with pytest.raises(Refusal, match="spec_invalid"):
        _cloud_seed.files({}, {"local-hostname": name}, {})


def test_the_contract_and_the_api_have_the_same_pattern() -> None:
    published = ADAPTER.json_schema()
    assert {key: published[key] for key in ("pattern", "maxLength", "not")} == {
        key: COMMON[key] for key in ("pattern", "maxLength", "not")
    }
    assert re.fullmatch(r"\^\((.+)\)\$", RESERVED_HOSTNAMES)[1] == (  # type: ignore[index]
        _object_names.RESERVED_HOSTNAME.pattern
    )
