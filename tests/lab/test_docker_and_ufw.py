"""A slice on a host that has docker and ufw, and whose owner applies its networks anew.

It plays on a lab host of its own, which uses both before it is enrolled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from lab.demo import slice_steps
from lab.demo.stage import Stage
from tests.lab import networks, prepared
from tests.lab.conftest import Chapter
from tests.lab.proof import differences, prove_again
from tests.unit.plugins.module_utils.network import rig


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A deployed machine whose container serves the network, and whose filter is closed."""
    site = {"GPUAAS_INGRESS_ADDRESSES": PUBLIC}
    packages = {"GPUAAS_LAB_PACKAGES": "docker.io ufw"}
    with prepared.alone("docker-and-ufw", packages, settings=site) as stage:
        stage.on_host("sh", "-s", stdin=SITE, limit_s=600)
        yield stage


@pytest.mark.covers("HOST-6")
def test_the_machine_becomes_a_slice_host_and_the_sites_rules_stay(
    stage: Stage, story: Chapter
) -> None:
    before = _site(stage)
    for step in prepared.STEPS:
        step(stage)
    assert before <= _site(stage)
    assert differences(stage) == set()
    story.done["neighbours"] = True


@pytest.mark.covers("HOST-6", "SLICE-9")
def test_guest_and_container_pass_and_do_not_meet(stage: Stage, story: Chapter) -> None:
    story.needs("neighbours")
    slice_steps.provision(stage)
    _all_pass(stage)
    address = stage.on_host("ip", "-4", "-br", "address", "show", "dev", "mgmt0").split()[2]
    container = stage.on_host("docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", "web")
    doors = [("172.17.0.1", 8080), (address.partition("/")[0], 8080), (container.strip(), 80)]
    assert set(networks.knock(stage, doors).values()) == {"timeout"}
    story.done["slice beside a container"] = True


@pytest.mark.covers("HOST-6", "SLICE-9")
def test_clients_reach_the_guest_by_managed_ingress_alone(stage: Stage, story: Chapter) -> None:
    story.needs("slice beside a container")
    assert stage.member is not None
    project, allocation = stage.facts["project"], stage.facts["allocation"]["id"]
    path = f"/projects/{project}/allocations/{allocation}/ingress"
    stage.on_host("ip", "address", "add", f"{PUBLIC}/32", "dev", "mgmt0")
    served = slice_steps.in_guest(stage, "sudo sh -s", SERVICE).strip()
    with networks.management(stage):
        assert _fetched(stage) == CURL_TIMED_OUT
        rule = stage.member.post(
            path,
            {
                "public_address": PUBLIC,
                "public_port": 443,
                "guest_port": 8443,
                "sources": [f"{rig.BMC}/32"],
                "expires_at": (datetime.now(UTC) + timedelta(days=1)).isoformat(),
            },
        )
        stage.follow({"id": rule["task_id"]})
        assert stage.member.get(f"{path}/{rule['id']}")["state"] == "applied"
        assert _fetched(stage) == served
        assert differences(stage) == set()
        stage.follow({"id": stage.member.delete(f"{path}/{rule['id']}")["task_id"]})
        assert _fetched(stage) == CURL_TIMED_OUT
    assert stage.member.get(f"{path}/{rule['id']}")["state"] == "removed"
    stage.on_host("ip", "address", "delete", f"{PUBLIC}/32", "dev", "mgmt0")


@pytest.mark.covers("HOST-6", "SLICE-8")
@pytest.mark.parametrize(
    "command",
    ["systemctl restart docker.service", "ufw reload", "netplan apply"],
    ids=["docker restarts", "ufw loads its rules", "netplan applies"],
)
def test_all_pass_after_the_owner_has_loaded_the_site_anew(
    stage: Stage, story: Chapter, command: str
) -> None:
    story.needs("slice beside a container")
    before = _site(stage)
    stage.on_host(*command.split())
    _all_pass(stage)
    assert _site(stage) == before
    assert differences(stage) == set()


@pytest.mark.covers("HOST-6", "SLICE-8")
def test_a_repair_leaves_docker_and_ufw_alone(stage: Stage, story: Chapter) -> None:
    story.needs("slice beside a container")
    before = _site(stage)
    stage.on_host("sh", "-s", stdin=DAMAGE)
    assert differences(stage) == set()
    latest = stage.api().get(stage.path("/drift"))["task"]["result"]
    mended = {row["step"].split()[0] for row in latest["repairs"]}
    assert {"add_nat", "admit_guests", "start_service"} <= mended, latest
    _all_pass(stage)
    assert _site(stage) == before


@pytest.mark.covers("HOST-6", "SLICE-7")
def test_the_slice_leaves_and_the_site_is_as_before(stage: Stage, story: Chapter) -> None:
    story.needs("slice beside a container")
    before = _site(stage)
    assert slice_steps.release(stage)["allocation"] == "released"
    prove_again(stage)
    assert _site(stage) == before
    assert differences(stage) == set()


PUBLIC = "203.0.113.10"
# The guest serves 1 MiB at port 8443, and prints its digest.
SERVICE = """set -e
mkdir -p /srv/site
head -c 1048576 /dev/urandom > /srv/site/data
systemd-run -q --unit=site python3 -m http.server 8443 --directory /srv/site
for _ in $(seq 60); do
  if python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8443))'; then break; fi
  sleep 1
done
sha256sum < /srv/site/data
"""
# A client of the public address, which prints curl's status if it gets nothing.
FETCH = f"""ip -n lab-mgmt route replace {PUBLIC}/32 via {rig.MANAGEMENT}
ip netns exec lab-mgmt curl -sf --max-time 60 -o /run/fetched http://{PUBLIC}:443/data \\
  && sha256sum < /run/fetched || echo $?
"""
CURL_TIMED_OUT = "28"
# A container of this host's own busybox, which serves it at port 8080 of all addresses.
SITE = """set -e
ufw allow 22/tcp
ufw --force enable
tar -ch /bin/busybox $(ldd /bin/busybox | awk '/\\//{print $(NF-1)}') | docker import - site
docker run -d --restart always --name web -p 8080:80 site /bin/busybox httpd -f -p 80 -h /bin
"""
# The container is used by the network and uses it. A port that ufw has not opened stays closed.
NEIGHBOURS = f"""set -e
for place in "ip netns exec lab-mgmt busybox httpd -f -p {rig.STORAGE}:81 -h /bin" \\
             "busybox httpd -f -p {rig.MANAGEMENT}:82 -h /bin"; do
  systemd-run -q -p Restart=on-failure $place
done
same() {{ [ "$(sha256sum < /bin/busybox)" = "$("$@" | sha256sum)" ]; }}
try() {{
  for _ in $(seq 30); do
    if same "$@"; then return; fi
    sleep 1
  done
  echo "$*" >&2
  exit 1
}}
outside() {{
  ip netns exec lab-mgmt curl -sS --max-time "$1" "http://{rig.MANAGEMENT}:$2/busybox"
}}
# Debian's busybox ends by a signal if its wget gets a time limit.
try timeout 60 docker exec web /bin/busybox wget -q -O - http://{rig.STORAGE}:81/busybox
try outside 60 8080
try curl -sS --max-time 60 http://{rig.MANAGEMENT}:82/busybox
outside 5 82 > /dev/null && exit 1 || [ $? = 28 ]
"""
DAMAGE = """set -e
systemctl stop gpuaas-slice-network-baseline.service
iptables -t nat -D POSTROUTING -s 10.100.0.0/24 -j MASQUERADE
iptables -S FORWARD | sed -n '/gpuaas-slice/s/^-A/iptables -D/p' | sh -e
"""


def _all_pass(stage: Stage) -> None:
    with networks.management(stage):
        networks.assert_guest_uses_storage(stage)
        try:
            stage.on_host("sh", "-s", stdin=NEIGHBOURS, limit_s=600)
        finally:
            stage.on_host("systemctl", "stop", "'run-*.service'")


def _fetched(stage: Stage) -> str:
    return stage.on_host("sh", "-s", stdin=FETCH).strip()


def _site(stage: Stage) -> set[str]:
    """Rules and policies of the host's filter that are not ours, without counters."""
    rows = stage.on_host("iptables-save").splitlines()
    rules = {re.sub(r" \[\d+:\d+\]", "", row) for row in rows if row[0] in ":-"}
    return {rule for rule in rules if "gpuaas" not in rule and "10.100.0." not in rule}
