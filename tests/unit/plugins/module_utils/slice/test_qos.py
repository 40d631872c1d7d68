"""Port limit, as Open vSwitch 3.1 prints and accepts it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _qos

pytestmark = pytest.mark.covers("HOST-7")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
PORT = _object_names.port_name(ONE)
ROW, OTHER = "c1b6ca3b-c32d-480d-b6d9-c8ddb6e15cab", "8c4d3f10-1111-4c58-9dbf-6a41c1f4a0de"
LIMIT = _qos.Limit(1000, 100)
LOOK = (
    "ovs-vsctl", "--timeout=10", "--format=json",
    "--columns=ingress_policing_rate,ingress_policing_burst",
    "find", "Interface", f"name={PORT}",
    "--", "--columns=qos", "find", "Port", f"name={PORT}",
    "--", "--columns=_uuid,type,other_config,external_ids", "list", "QoS",
)  # fmt: skip
INTERFACES = '"headings":["ingress_policing_rate","ingress_policing_burst"]'
NO_PORT = f'{{"data":[],{INTERFACES}}}\n{{"data":[],"headings":["qos"]}}'


def port(rate: int = 0, burst: int = 0, row: str = "") -> str:
    named = f'["uuid","{row}"]' if row else '["set",[]]'
    return f'{{"data":[[{rate},{burst}]],{INTERFACES}}}\n{{"data":[[{named}]],"headings":["qos"]}}'


def rows(*queues: tuple[str, str], bits: str = "1000000") -> str:
    data = ",".join(
        f'[["uuid","{row}"],"linux-htb",["map",[["max-rate","{bits}"]]],'
        f'["map",[["gpuaas-allocation","{owner}"]]]]'
        for row, owner in queues
    )
    return f'{{"data":[{data}],"headings":["_uuid","type","other_config","external_ids"]}}'


def observed(script: Any, *lines: str) -> _qos.State:
    script.on(*LOOK, out="\n".join(lines) + "\n")
    return _qos.observe(ONE)


def test_a_limited_port_is_read_back(script: Any) -> None:
    state = observed(script, port(1000, 100, ROW), rows((ROW, ONE), (OTHER, OTHER)))
    assert state.holds(LIMIT)
    assert state.document() == {
        "rate_kbps": 1000,
        "burst_kb": 100,
        "shaper": "linux-htb",
        "shaped_bps": 1000000,
        "rows": 1,
    }
    assert not state.holds(None)


def test_a_port_without_limit_and_none_at_all(script: Any) -> None:
    for first in (port(), NO_PORT):
        script.answers.clear()
        state = observed(script, first, rows((OTHER, OTHER)))
        assert state.holds(None) and state.document() == {}
        assert not state.holds(LIMIT)


@pytest.mark.parametrize(
    "lines",
    [
        (port(999, 100, ROW), rows((ROW, ONE))),
        (port(1000, 0, ROW), rows((ROW, ONE))),
        (port(1000, 100), rows((ROW, ONE))),
        (port(1000, 100, ROW), rows((ROW, ONE), bits="1000")),
        (port(1000, 100, ROW), rows((ROW, ONE), (OTHER, ONE))),
        (port(1000, 100, ROW), rows((ROW, OTHER))),
        (NO_PORT, rows((ROW, ONE))),
    ],
    ids=["rate", "burst", "not shaped", "shaped otherwise", "a row too many", "foreign", "no port"],
)
def test_what_differs_in_one_point_does_not_hold(script: Any, lines: tuple[str, str]) -> None:
    state = observed(script, *lines)
    assert not state.holds(LIMIT) and not state.holds(None)


def test_it_is_set_in_one_transaction_in_place_of_the_one_before(script: Any) -> None:
    script.on(*LOOK, out=f"{port(5, 12, ROW)}\n{rows((ROW, ONE))}\n")
    forget = ("--", "--if-exists", "clear", "Port", PORT, "qos")
    script.on(
        "ovs-vsctl", "--timeout=30",
        "--", "set", "Interface", PORT, "ingress_policing_rate=1000", "ingress_policing_burst=100",
        *forget, "--", "--if-exists", "destroy", "QoS", ROW,
        "--", "--id=@limit", "create", "QoS", "type=linux-htb",
        "other_config:max-rate=1000000", f"external_ids:gpuaas-allocation={ONE}",
        "--", "set", "Port", PORT, "qos=@limit",
    )  # fmt: skip
    _qos.install(ONE, LIMIT)
    script.on(
        "ovs-vsctl", "--timeout=30", "--", "--if-exists",
        "set", "Interface", PORT, "ingress_policing_rate=0", "ingress_policing_burst=0",
        *forget, "--", "--if-exists", "destroy", "QoS", ROW,
    )  # fmt: skip
    _qos.install(ONE, None)
    assert len(script.calls) == 4


def test_a_switch_that_refuses_is_no_limit(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: Any, **_more: Any) -> _command.Result:
        if "list" in argv:
            return _command.Result(0, f"{NO_PORT}\n{rows()}\n", "")
        raise Refusal("command_failed", expected="", found='no row "x" in table Port', remedy="")

    monkeypatch.setattr(_command, "run", run)
    with pytest.raises(Refusal, match="no row"):
        _qos.install(ONE, LIMIT)


def test_what_would_let_nothing_pass_is_refused() -> None:
    assert _qos.limit(None) is None
    assert _qos.limit({"rate_kbps": 1000, "burst_kb": 100}) == LIMIT
    for wrong in ({"rate_kbps": 0, "burst_kb": 100}, {"rate_kbps": 1000, "burst_kb": 11}):
        with pytest.raises(Refusal, match="mgmt_qos"):
            _qos.limit(wrong)


def test_rows_of_slices_are_listed_with_their_allocation(script: Any) -> None:
    argv = ("ovs-vsctl", "--timeout=10", "--format=json", "--columns=_uuid,external_ids")
    data = [
        [["uuid", "row-1"], ["map", [[_qos.LABEL, "23bd713b-6073-4ef7-8a51-2897e902365d"]]]],
        [["uuid", "row-2"], ["map", []]],
    ]
    text = json.dumps({"data": data, "headings": ["_uuid", "external_ids"]}) + "\n"
    script.on(*argv, "list", "QoS", out=text)
    assert _qos.rows() == {"row-1": "23bd713b-6073-4ef7-8a51-2897e902365d"}
