"""Questions to the daemons of Open vSwitch, on the sockets that ovs-appctl and ovs-vsctl use.

A program for a question takes ten times as long as its answer, and the guardian asks every two
seconds. Only the programs change the database. Where a socket cannot be used, the program says why.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

FOLDER = "/run/openvswitch"
DATABASE = "db.sock"
# The longest wait for an answer, and its most bytes. One of 200 ports has 20 KB.
ANSWER_S, _LARGEST = 10.0, 16 << 20
_CHUNK = 1 << 16

Answer = TypeVar("Answer")
# A table, its columns as `a,b`, and the name of the only row or "".
Query = tuple[str, str, str]


def appctl(*words: str) -> str:
    """Answer of ovs-vswitchd to a command of ovs-appctl."""
    argv = ["ovs-appctl", f"--timeout={ANSWER_S:g}", *words]
    control = f"ovs-vswitchd.{_host.read(f'{FOLDER}/ovs-vswitchd.pid')}.ctl"
    answer = _ask(control, argv, words[0], words[1:], str)
    return _command.run(argv, timeout=30).out if answer is None else answer


def rows(*queries: Query) -> list[list[list[Any]]]:
    """Rows of each query, with the values of its columns in OVSDB's notation, of one moment."""
    argv = ["ovs-vsctl", f"--timeout={ANSWER_S:g}", "--format=json"]
    operations: list[dict[str, Any]] = []
    for table, columns, name in queries:
        argv += [*(["--"] if operations else []), f"--columns={columns}"]
        argv += ["find", table, f"name={name}"] if name else ["list", table]
        where = [["name", "==", name]] if name else []
        operation = {"op": "select", "table": table, "where": where}
        operations.append({**operation, "columns": columns.split(",")})

    def take(results: Any) -> list[list[list[Any]]]:
        return [
            [[row[column] for column in operation["columns"]] for row in result["rows"]]
            for operation, result in zip(operations, results, strict=True)
        ]

    answer = _ask(DATABASE, argv, "transact", ["Open_vSwitch", *operations], take)
    if answer is not None:
        return answer
    return [json.loads(line)["data"] for line in _command.run(argv).out.splitlines()]


def _ask(
    name: str,
    argv: Sequence[str],
    method: str,
    params: Sequence[Any],
    take: Callable[[Any], Answer],
) -> Answer | None:
    """What `take` makes of a JSON-RPC result; None if the socket of this name cannot be used.

    argv: the program with the same question, for the refusal.
    """
    end, code = time.monotonic() + ANSWER_S, "command_failed"
    try:
        with socket.socket(socket.AF_UNIX) as handle:
            handle.settimeout(ANSWER_S)
            try:
                handle.connect(str(_host.path(f"{FOLDER}/{name}")))
            except OSError:
                return None
            request = {"id": 0, "method": method, "params": params}
            handle.sendall(json.dumps(request).encode())
            reply = _receive(handle, end)
            if not reply["error"]:
                return take(reply["result"])
            problem = str(reply["error"])
    except PermissionError:
        # libvirt's hook is confined as libvirtd is, and the programs that it starts are not.
        return None
    except (OSError, ValueError, LookupError, TypeError) as broken:
        problem = f"{type(broken).__name__}: {broken}"
        if isinstance(broken, TimeoutError):
            code = "command_timeout"
    raise Refusal(
        code,
        expected=f"Open vSwitch to answer `{' '.join(argv)}` within {ANSWER_S:g} s",
        found=problem[:2000],
        remedy="look at `journalctl -u ovsdb-server -u ovs-vswitchd`",
    )


def _receive(handle: socket.socket, end: float) -> Any:
    """The JSON document that arrives before `end`."""
    text = b""
    while len(text) <= _LARGEST:
        handle.settimeout(max(end - time.monotonic(), 0.001))
        part = handle.recv(_CHUNK)
        text += part
        # An inner object may end here too.
        with contextlib.suppress(ValueError):
            if part.rstrip().endswith(b"}"):
                return json.loads(text)
        if not part:
            break
    raise ValueError(f"no whole answer in {len(text)} bytes")
