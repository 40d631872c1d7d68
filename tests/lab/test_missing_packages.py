"""A machine without some packages of a slice host gets them from the archive by its bootstrap.

It plays on a lab host of its own. Its apt uses a mirror on this machine, which passes on the
archive's answers, so that the distribution's own signatures are verified.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

import httpx
import pytest

from lab.distro import host_distro
from tests.lab import prepared

# Not qemu-system-x86, which is large, and not ovmf, whose files the lab replaces.
LACKING = {
    *("conntrack", "dnsmasq", "dnsmasq-utils", "genisoimage"),
    *("libvirt-daemon-system", "nvme-cli", "openvswitch-switch", "zstd"),
}
PROGRAMS = "conntrack dhcp_release dnsmasq genisoimage libvirtd nvme ovs-vsctl zstd"
PRESENT = f"for name in {PROGRAMS}; do command -v $name || true; done"
# Removes the packages with all that only they need, whatever else suggests it.
PURGE = """set -e
export DEBIAN_FRONTEND=noninteractive
apt-get --quiet --yes -o APT::AutoRemove::SuggestsImportant=false \\
  purge --auto-remove {packages} >&2 < /dev/null
sed -i 's|{archive}|{mirror}|' /etc/apt/sources.list
"""
RECORD = "/var/lib/gpuaas/before/packages.json"


@contextmanager
def mirror(archive: str, fetched: set[str]) -> Iterator[int]:
    """Serve the archive to the lab host and note the fetched packages; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url, plain = f"{archive}{self.path}", {"Accept-Encoding": "identity"}
            with httpx.stream("GET", url, headers=plain, timeout=60) as answer:
                self.send_response(answer.status_code)
                # Without a length, apt takes the answer for an empty one.
                self.send_header("Content-Length", answer.headers["Content-Length"])
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)
            if self.path.endswith(".deb"):
                fetched.add(PurePosixPath(self.path).name.partition("_")[0])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.mark.covers("HOST-4")
def test_bootstrap_installs_what_the_machine_lacks() -> None:
    archive, fetched = host_distro().mirror, set[str]()
    with prepared.alone("missing-packages", {}) as stage, mirror(archive, fetched) as port:
        address = f"http://{stage.host().gateway}:{port}"
        purge = PURGE.format(packages=" ".join(LACKING), archive=archive, mirror=address)
        assert stage.on_host("sh", "-s", stdin=purge + PRESENT, limit_s=1800) == ""
        enrol, *rest = prepared.STEPS
        enrol(stage)
        plan = stage.task(stage.path("/bootstrap"), {"plan_only": True})["plan"]
        (packages,) = (row["steps"] for row in plan if row["part"] == "packages")
        assert packages == "install_packages(packages)" and not fetched
        # The last step requires that all slots are for sale.
        for step in rest:
            step(stage)
        assert len(stage.on_host("sh", "-s", stdin=PRESENT).split()) == len(PROGRAMS.split())
        assert stage.on_host("dpkg", "--audit") == ""
        # The way back reads this record: files of these packages did not exist before.
        assert set(json.loads(stage.on_host("cat", RECORD))) == LACKING
    assert fetched >= LACKING
