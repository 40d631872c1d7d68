"""Files of public ingress: an invalid rule opens nothing, and a removed rule stays removed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _ingress

pytestmark = pytest.mark.covers("SLICE-9")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
FIELDS: dict[str, Any] = {
    "id": "7d9f2a52-6c54-4f8e-9f0a-3f4b5c6d7e8f",
    "protocol": "tcp",
    "public_address": "192.0.2.10",
    "public_port": 443,
    "guest_port": 8443,
    "sources": ["198.51.100.0/24"],
    "expires_at": 4_000_000_000,
}


def test_a_file_is_read_as_it_was_written(tree: Path) -> None:
    rule = _ingress.check(FIELDS)
    _ingress.save(ONE, _ingress.Kept().with_rule(rule))
    assert _ingress.every() == {ONE: _ingress.Kept({rule.id: rule})}
    assert _host.path(_object_names.ingress_path(ONE)).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        '{"rules": {}, "removed": []}',
        json.dumps({"rules": [FIELDS, {**FIELDS, "public_port": "443; drop"}]}),
        json.dumps({"rules": [{**FIELDS, "more": 1}]}),
        json.dumps({"rules": [{**FIELDS, "sources": "0.0.0.0/0"}]}),
        json.dumps({"rules": [{**FIELDS, "expires_at": 1e999}]}),
    ],
)
def test_a_file_that_is_not_valid_opens_nothing(tree: Path, text: str) -> None:
    _host.write(_object_names.ingress_path(ONE), text)
    kept = _ingress.kept(ONE)
    assert (kept.rules, kept.removed) == ({}, {})
    assert kept.broken


def test_a_removed_rule_is_remembered_until_no_run_can_add_it(tree: Path) -> None:
    """At most for MEMORY_S: rules last for months, and the guardian reads the file often."""
    now = int(time.time())
    rule = _ingress.check({**FIELDS, "expires_at": now + 600})
    long = _ingress.check({**FIELDS, "id": ONE.replace("2", "3")})
    past = _ingress.check({**FIELDS, "id": ONE, "expires_at": now - 1})
    kept = _ingress.Kept().with_rule(rule).with_rule(past).with_rule(long)
    kept = kept.without(past).without(rule).without(long)
    assert (kept.rules, kept.removed[rule.id]) == ({}, rule.expires_at)
    assert kept.removed.keys() == {rule.id, long.id}
    assert 0 <= kept.removed[long.id] - now - _ingress.MEMORY_S < 60
    assert kept.with_rule(past).removed == kept.removed, "nor by another rule"
