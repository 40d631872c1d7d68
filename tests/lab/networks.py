"""Networks beside the lab host: network namespaces, which are gone after its next boot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from lab.demo import slice_steps
from lab.demo.stage import Stage
from tests.unit.plugins.module_utils.network import rig

OUTSIDE_MAC = "02:00:00:00:00:aa"
# wire NAME INTERFACE HOST_ADDRESS ADDRESS: connect the namespace lab-NAME to the host.
WIRE = f"""set -e
wire() {{
  ip netns delete "lab-$1" 2> /dev/null || true
  ip netns add "lab-$1"
  ip link add "$2" address {OUTSIDE_MAC} type veth peer name eth0 netns "lab-$1"
  ip address add "$3" dev "$2"
  ip link set "$2" up
  ip -n "lab-$1" link set lo up
  ip -n "lab-$1" address add "$4" dev eth0
  ip -n "lab-$1" link set eth0 up
}}
"""
# A public network with a server.
WORLD, ROUTER = "world0", "11.0.0.1"
WIRE_WORLD = f"""wire world {WORLD} {rig.UPLINK}/24 {ROUTER}/24
ip -n lab-world address add {rig.WORLD}/32 dev lo
ip route add 9.9.9.0/24 via {ROUTER}
"""
TARGET = f"{rig.WORLD}:443"
# A management network with a BMC, which guests must not reach, and a storage service.
MANAGEMENT = "bmc0"
WIRE_MANAGEMENT = f"""wire mgmt {MANAGEMENT} {rig.MANAGEMENT}/24 {rig.BMC}/24
ip -n lab-mgmt address add {rig.STORAGE}/32 dev lo
ip route add 10.30.0.0/24 via {rig.BMC}
"""
_PORT = 2049
_BYTES = 4 << 20
# Takes a text, sends it back, and prints its length and digest.
_SERVE = f"""exec ip netns exec lab-mgmt timeout 300 python3 - <<'DATA'
import hashlib, socket
server = socket.create_server(("{rig.STORAGE}", {_PORT}))
client, _ = server.accept()
text = b"".join(iter(lambda: client.recv(1 << 16), b""))
client.sendall(text)
client.close()
print(len(text), hashlib.sha256(text).hexdigest())
DATA
"""
_ASK = f"""
import hashlib, os, socket, time
end = time.monotonic() + 240
while True:
    try:
        server = socket.create_connection(("{rig.STORAGE}", {_PORT}), timeout=120)
        break
    except ConnectionError:
        assert time.monotonic() < end
        time.sleep(1)
sent, back = os.urandom({_BYTES}), b""
begin = time.monotonic()
server.sendall(sent)
server.shutdown(socket.SHUT_WR)
while more := server.recv(1 << 16):
    first = first if back else time.monotonic()
    back += more
assert back == sent
print(len(back), hashlib.sha256(back).hexdigest(), first - begin, time.monotonic() - first)
"""
# Run in a guest. Prints "open", "refused" or "timeout" for each address and port.
_KNOCK = """
import json, socket
def knock(address, port):
    with socket.socket() as handle:
        handle.settimeout(4)
        try:
            handle.connect((address, port))
            return "open"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "timeout"
print(json.dumps({f"{a}:{p}": knock(a, p) for a, p in DOORS}))
"""


@contextmanager
def world(stage: Stage) -> Iterator[None]:
    """A public server that takes connections at TARGET."""
    address, _, port = TARGET.partition(":")
    serve = ["ip", "netns", "exec", "lab-world", "busybox", "httpd", "-f", "-h", "/bin"]
    try:
        stage.on_host("sh", "-s", stdin=WIRE + WIRE_WORLD)
        stage.on_host("systemd-run", "-q", "--unit=lab-world", *serve, "-p", f"{address}:{port}")
        yield
        # If it had stopped, a failed connection of a guest would prove nothing.
        stage.on_host("systemctl", "is-active", "lab-world.service")
    finally:
        stage.on_host("sh", "-c", "'systemctl stop lab-world; ip netns delete lab-world'")


@contextmanager
def management(stage: Stage) -> Iterator[None]:
    try:
        stage.on_host("sh", "-s", stdin=WIRE + WIRE_MANAGEMENT)
        yield
    finally:
        stage.on_host("ip", "netns", "delete", "lab-mgmt")


def assert_guest_uses_storage(stage: Stage, allocation: dict[str, Any] | None = None) -> None:
    """The guest sends data to the storage service by TCP, and gets them back, not faster than the
    profile's limit allows.
    """
    with ThreadPoolExecutor() as pool:
        served = pool.submit(stage.on_host, "sh", "-s", stdin=_SERVE)
        answer = slice_steps.in_guest(stage, "python3 -", _ASK, allocation=allocation).split()
        assert answer[:2] == served.result().split() != []
    limit = stage.profile()["vm"]["mgmt_qos"]
    least_s = (8 * _BYTES / 1000 - limit["burst_kb"]) / limit["rate_kbps"]
    assert all(float(seconds) > 0.9 * least_s for seconds in answer[2:]), (answer, least_s)


def knock(stage: Stage, doors: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Answers to the guest at addresses and TCP ports: "open", "refused" or "timeout"."""
    script = _KNOCK.replace("DOORS", repr(doors))
    answers: dict[str, str] = json.loads(slice_steps.in_guest(stage, "python3 -", script))
    return answers
