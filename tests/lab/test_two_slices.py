"""Two slices on a host, from launch to release, with refusals and attacks.

The first boots by BIOS, the second by UEFI, at the same time. Their tenants have root: both send
the whole table of attacks before, during and after a crash and a restart of the switch, and from
their first packet after a power loss of the host. The second slice is released, its slot is blocked
and recovered, while the first goes on.

Plays on the host that test_slice_host.py left: two slots, bound and available. The first slice
stays for test_upkeep.py.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _tuning_profiles
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files

from lab.command import LabError
from lab.demo import slice_steps
from lab.demo.stage import Stage
from reconciler.model import firmware
from tests.lab import byhand, captures, networks
from tests.lab.attacks import Attacks
from tests.lab.conftest import Chapter
from tests.lab.proof import beginning, differences, ledger_entry, prove_again, records, refusal

# Firmware of the two slices, in the order of their launch.
FIRMWARE = ("bios", "uefi")
# Runtime of their guests: both reach a public server before they are ready, and the first is tuned.
EGRESS = {"probes": {"egress": 1500, "gpu_compute": 1500}, "egress_target": networks.TARGET}
TUNING = _tuning_profiles.DEFINITIONS[_tuning_profiles.NETWORK]
RUNTIME = {"bios": {**EGRESS, "tuning": True}, "uefi": EGRESS}
# The guests of an emulated host need some minutes to boot.
BOOT_S = 900
# A tenant's own cloud-config. The second file is the site's, which stays.
OWN = """\
#cloud-config
write_files:
- {path: /etc/own, content: kept}
- {path: /etc/systemd/system/gpuaas-telemetry.service, content: mine}
"""
# User, seccomp mode and AppArmor's profile of each slice's QEMU.
CONFINED = f"""
for pid in $(pgrep -f 'qemu.*guest={_object_names.PREFIX}'); do
  awk '/^Uid:/ {{ uid = $2 }} /^Seccomp:/ {{ printf "%s %s ", uid, $2 }}' "/proc/$pid/status"
  cat "/proc/$pid/attr/current"
done
"""
# In a guest: a megabyte without an end of line, bytes that are no text, and then the lie.
LIE = """sudo sh -c '
systemctl stop gpuaas-telemetry.service
exec > /dev/virtio-ports/org.gpuaas.telemetry.0
head -c 1000000 /dev/zero | tr "\\0" x
printf "\\n\\377\\376{\\n"
cat'
"""
# Telemetry is read every minute, and measured every half minute.
LIE_S = 300
FUNCTIONS = """
import json, pathlib, subprocess
rows = {}
for link in json.loads(subprocess.check_output(["ip", "-j", "link", "show"])):
    card = pathlib.Path("/sys/class/net", link["ifname"], "device")
    for row in link.get("vfinfo_list", []):
        rows[(card / f"virtfn{row['vf']}").resolve().name] = row
print(json.dumps(rows))
"""
# In a guest: superblocks of md (1.2) and LVM on its disk, as mdadm and pvcreate write them. Prints
# the recognized type of each alone.
LABELS = """
import os, struct, subprocess, zlib
disk = "/dev/vda"
def put(offset, data):
    with open(disk, "r+b", buffering=0) as handle:
        os.pwrite(handle.fileno(), data, offset)
        os.fsync(handle.fileno())
def taken():
    words = ["blkid", "-p", "-u", "raid", "-s", "TYPE", "-o", "value", disk]
    print(subprocess.check_output(words, text=True).strip())
array = bytearray(4096)
struct.pack_into("<III", array, 0, 0xA92B4EFC, 1, 0)
struct.pack_into("<Q", array, 144, 8)
put(4096, array)
taken()
put(4096, bytes(4096))
label = bytearray(512)
struct.pack_into("<8sQ", label, 0, b"LABELONE", 1)
struct.pack_into("<I8s32s", label, 20, 32, b"LVM2 001", b"x" * 32)
struct.pack_into("<I", label, 16, zlib.crc32(label[20:], 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF)
put(512, label)
taken()
put(4096, array)
"""
# In a guest: frames of many hardware addresses, and more ARP packets than a guest may send.
FLOOD = """
import socket
handle = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
name = next(name for _, name in socket.if_nameindex() if name != "lo")
handle.bind((name, 0))
own = handle.getsockname()[4]
for number in range(10000):
    stranger = bytes([2, 0, 0, 0, number >> 8, number & 255])
    handle.send(bytes([255] * 6) + stranger + b"\\x08\\x00" + bytes(46))
    if number % 5 == 0:
        handle.send(bytes([255] * 6) + own + b"\\x08\\x06" + bytes(46))
"""
# On the host: bytes as of a guest's console, into the pipe between its QEMU and virtlogd. A guest's
# own serial port is too slow for them on an emulated host. Prints size and number of the logs.
CONSOLE_FLOOD = """
import fcntl, glob, os, struct, subprocess, sys, termios, time
domain, log, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
def pid(*words):
    return subprocess.check_output(["pgrep", *words], text=True).strip()
def pipes(folder):
    links = {}
    for entry in os.scandir(folder):
        try:
            links[os.readlink(entry.path)] = entry.path
        except FileNotFoundError:
            pass
    return {link: path for link, path in links.items() if link.startswith("pipe:")}
qemu = pid("-f", f"qemu.*guest={domain},")
# virtlogd takes QEMU's own messages too.
own = {os.readlink(f"/proc/{qemu}/fd/{number}") for number in (1, 2)}
written = pipes(f"/proc/{qemu}/fd")
(console,) = set(written) & set(pipes(f"/proc/{pid('-x', 'virtlogd')}/fd")) - own
with open(written[console], "wb", buffering=0) as handle:
    left = size
    while left:
        left -= handle.write(b"x" * min(left, 1 << 16))
    while struct.unpack("i", fcntl.ioctl(handle, termios.FIONREAD, bytes(4)))[0]:
        time.sleep(0.1)
time.sleep(1)
logs = glob.glob(f"{log}*")
print(sum(map(os.path.getsize, logs)), len(logs))
"""
# More than virtlogd's defaults: 2 MiB of a log, and three rotated ones.
CONSOLE_BYTES, CONSOLE_LIMIT, CONSOLE_LOGS = 10 << 20, 8 << 20, 4
QOS_ROWS = ("ovs-vsctl", "--timeout=60", "--bare", "--columns=_uuid", "list", "QoS")


@pytest.mark.covers("CTRL-5")
def test_more_gpus_than_one_node_has_are_refused(stage: Stage, story: Chapter) -> None:
    story.needs("prepared")
    assert refusal(stage, lambda: slice_steps.launch(stage, gpu_count=3)) == "no_capacity"
    stage.use_vm(span_numa=False)
    code = refusal(stage, lambda: slice_steps.launch(stage, gpu_count=2))
    stage.use_vm(span_numa=True)
    assert code == "numa_node_exceeded", "the slots are on two NUMA nodes"


@pytest.mark.covers("I4", "SLICE-2", "P14")
def test_an_image_with_another_digest_never_reaches_the_disk(stage: Stage, story: Chapter) -> None:
    story.needs("prepared")
    image = stage.facts["image"]
    entry = stage.api().post(
        "/admin/images",
        {
            "name": "forged",
            "version": "1",
            "digest": "sha256:" + "0" * 64,
            "size_bytes": image.size,
            "url": Path(image.zst).as_uri(),
            "compression": "zstd",
        },
    )
    disks = [slot["nvme_device"] for slot in stage.bundles()]
    before = [beginning(stage, disk) for disk in disks]
    allocation = slice_steps.launch(stage, image_id=entry["id"])
    ended = slice_steps.wait_for(stage, allocation["id"], {"active", "failed"})
    assert ended["state"] == "failed"
    error = ended["error"]
    assert error["code"] == "image_digest_mismatch"
    assert error["expected"] and error["found"] and error["remedy"]
    # Nothing was written, so the slot is free at once and needs no wipe.
    slot = slice_steps.slot_of(stage, ended)
    assert slot["status"] == "available"
    # The host's ledger and the disks confirm the run's report.
    ledger = ledger_entry(stage, slot["id"])
    assert (ledger["dirty"], ledger["allocation_id"]) == (False, "")
    assert [beginning(stage, disk) for disk in disks] == before


@pytest.mark.covers("CTRL-9", "I12", "I14", "I15", "I17", "SLICE-4", "SLICE-5")
def test_two_slices_start_at_once_though_the_reconciler_is_killed(
    stage: Stage, story: Chapter
) -> None:
    """By BIOS and by UEFI. After kill -9 in the middle of both runs these go on, and the next
    reconciler settles them.
    """
    story.needs("prepared")
    before = stage.profile()["vm"]
    with networks.world(stage):
        launched = [_launch(stage, firmware, user_data=OWN) for firmware in FIRMWARE]
        stage.use_vm(**before)
        _kill_the_reconciler(stage, launched[-1]["task_ids"][-1])
        story.done["slices"] = [_active(stage, allocation) for allocation in launched]
    stage.facts["allocation"] = story.done["slices"][-1]


def _launch(stage: Stage, firmware: str, **changes: Any) -> dict[str, Any]:
    """Launch a slice; its run has read its part of the profile when this returns."""
    runtime = {"source": "baked", "driver": "edu", **RUNTIME[firmware]}
    stage.use_vm(firmware=firmware, guest_runtime=runtime)
    launched = slice_steps.launch(stage, terminal=True, **changes)
    allocation = stage.api().get(f"/admin/allocations/{launched['id']}")
    _await_progress(stage, allocation["task_ids"][-1])
    return allocation


def _active(stage: Stage, launched: dict[str, Any]) -> dict[str, Any]:
    """Wait until a slice is ready, by the first attempt; check the evidence of its readiness."""
    allocation = slice_steps.wait_for(stage, launched["id"], {"active", "failed"})
    assert allocation["state"] == "active", slice_steps.why(stage, allocation)
    task = stage.api().get(f"/admin/tasks/{launched['task_ids'][-1]}")
    assert (task["state"], task["attempt"]) == ("succeeded", 1)
    readiness = task["result"]["readiness"]
    assert readiness["actual_ip"] == readiness["expected_ip"]
    assert readiness["lease_state"] == "bound"
    assert readiness["host_keys"][0].startswith("ssh-ed25519 ")
    # The guest's own probe answered over the virtio-serial channel.
    probes = {row["name"]: row for row in readiness["probes"]}
    assert list(probes) == ["address", "lease", "ssh", "egress", "gpu_compute"]
    assert all(row["ok"] for row in probes.values())
    assert probes["gpu_compute"]["values"] == {"gpus": 1, "memory_bytes": 4096}
    # A guest that is ready has no access to its seed any more.
    assert task["result"]["seed"] == {"destroyed": True, "in_definition": False, "in_guest": False}
    # Open vSwitch has the profile's limit for each direction, and a single QoS row for it.
    qos = stage.profile()["vm"]["mgmt_qos"]
    limit = task["result"]["domain"]["qos"]
    assert {name: limit[name] for name in qos} == qos
    assert (limit["shaped_bps"], limit["rows"]) == (1000 * qos["rate_kbps"], 1)
    return allocation


@pytest.mark.covers("P12")
def test_each_machine_runs_confined_and_unprivileged(stage: Stage, story: Chapter) -> None:
    story.needs("slices")
    rows = stage.on_host("sh", stdin=CONFINED).splitlines()
    assert len(rows) == len(FIRMWARE)
    for row in rows:
        uid, seccomp, label = row.split(" ", 2)
        assert int(uid) != 0 and seccomp == "2", row
        assert label.startswith("libvirt-") and label.endswith("(enforce)"), row


@pytest.mark.covers("HOST-7", "SLICE-9")
def test_each_machines_function_is_in_its_tenants_network(stage: Stage, story: Chapter) -> None:
    """By the card's values: spoof check, no trust, and another VLAN than idle functions."""
    story.needs("slices")
    idle, last = stage.profile()["fabric"]["vlans"]
    functions = {slot["slot_id"]: slot["fabric_vf_pci_address"] for slot in stage.bundles()}
    shown = _functions(stage)
    taken = [functions[each["claims"][0]["slot_id"]] for each in story.done["slices"]]
    (vlan,) = {shown[address][0] for address in taken}
    assert idle < vlan <= last, "both are of one project"
    assert all(shown[address][1:] == (True, False) for address in shown), shown
    assert {shown[address][0] for address in set(shown) - set(taken)} == {idle}


def _functions(stage: Stage) -> dict[str, tuple[int, bool, bool]]:
    """VLAN, spoof check and trust of each virtual function, by its PCI address."""
    rows = json.loads(stage.on_host("python3", "-", stdin=FUNCTIONS))
    return {
        address: (row["vlan_list"][0]["vlan"], row["spoofchk"], row["trust"])
        for address, row in rows.items()
    }


@pytest.mark.covers("CTRL-7")
def test_an_active_allocation_is_not_force_cleaned(stage: Stage, story: Chapter) -> None:
    story.needs("slices")
    path = f"/admin/allocations/{stage.facts['allocation']['id']}/force-cleanup"
    body = {"reason": "test", "runtime_verified_absent": True}
    assert refusal(stage, lambda: stage.api().post(path, body)) == "allocation_active"


@pytest.mark.covers("SLICE-3", "SLICE-4", "P12")
def test_the_tenant_computes_on_the_gpu(stage: Stage, story: Chapter) -> None:
    story.needs("slices")
    evidence = slice_steps.login(stage)
    assert evidence["user"] == slice_steps.USER
    (gpu,) = evidence["gpu"]["gpus"]
    assert gpu["remains"]["ok"], gpu
    assert slice_steps.in_guest(stage, "cat /etc/own") == "kept"
    # The host can run virtual machines, but does not offer this to guests.
    host = stage.on_host("grep", "-m1", "^flags", "/proc/cpuinfo").split()
    guest = slice_steps.in_guest(stage, "grep -m1 ^flags /proc/cpuinfo").split()
    assert {"svm", "vmx"} & set(host) and "fpu" in guest
    assert not {"svm", "vmx"} & set(guest), guest
    story.done["login"] = evidence


@pytest.mark.covers("SLICE-3")
def test_a_guest_is_tuned_if_its_profile_says_so(stage: Stage, story: Chapter) -> None:
    story.needs("slices")
    command = f"/usr/sbin/sysctl -n {' '.join(TUNING.sysctl)}; ulimit -l"
    tuned, plain = (
        slice_steps.in_guest(stage, command, allocation=allocation).splitlines()
        for allocation in story.done["slices"]
    )
    expected = [*TUNING.sysctl.values(), TUNING.memlock]
    assert [line.split() for line in tuned] == [value.split() for value in expected]
    assert not set(tuned) & set(plain)


@pytest.mark.covers("P12")
def test_a_guests_console_cannot_fill_the_hosts_disk(stage: Stage, story: Chapter) -> None:
    """The running virtlogd limits the log, and still records the console afterwards."""
    story.needs("login")
    allocation = stage.facts["allocation"]["id"]
    domain, log = _object_names.domain_name(allocation), _object_names.console_path(allocation)
    words = ("python3", "-", domain, log, str(CONSOLE_BYTES))
    size, number = map(int, stage.on_host(*words, stdin=CONSOLE_FLOOD).split())
    assert (number, size <= CONSOLE_LIMIT) == (CONSOLE_LOGS, True), (size, number)
    slice_steps.in_guest(stage, "sudo sh -c 'echo still heard > /dev/ttyS0'")
    # QEMU and virtlogd write it only after the guest's program has ended.
    end = time.monotonic() + 60
    while "still heard" not in (text := stage.on_host("tail", "-c", "4096", log)):
        assert time.monotonic() < end, text
        time.sleep(1)


@pytest.mark.covers("SLICE-9", "HOST-6")
def test_a_guest_speaks_tcp_to_an_allowed_network(stage: Stage, story: Chapter) -> None:
    """Through guard and NAT, in both directions, with a kernel's own connection tracking."""
    story.needs("login")
    with networks.management(stage):
        networks.assert_guest_uses_storage(stage)


@pytest.mark.covers("SLICE-11")
def test_telemetry_comes_from_the_host_and_from_the_guest(stage: Stage, story: Chapter) -> None:
    """Over a real virtio-serial channel and the account that bootstrap added."""
    story.needs("slices")
    latest = slice_steps.telemetry(stage)
    host, guest = latest["host"], latest["guest"]
    assert (host["source"], host["state"], host["address_leased"]) == ("host", "running", True)
    assert host["cpu_s"] > 0 and host["disk_read_bytes"] > 0 and host["received_packets"] > 0
    assert guest["source"] == "guest" and guest["cuda"] in ("absent", None)
    assert guest["cpus"] == host["vcpus"]
    assert 0 < guest["memory_available_bytes"] < guest["memory_total_bytes"]
    assert guest["memory_total_bytes"] < host["memory_bytes"]
    assert 0 < guest["disk_free_bytes"] < guest["disk_total_bytes"]
    # The account's forced command can only print, whatever command a client sends.
    words = stage.on_host("cat", "/etc/ssh/gpuaas_principals/gpuaas-telemetry")
    assert words.startswith("restrict,command=")
    assert "gpuaas-telemetry" not in stage.on_host("cat", "/etc/ssh/gpuaas_principals/root")


@pytest.mark.covers("SLICE-11", "P2")
def test_a_guest_that_lies_about_itself_says_nothing_of_its_neighbour(
    stage: Stage, story: Chapter
) -> None:
    """Its root writes false values to the virtio-serial channel itself."""
    story.needs("login")
    honest, liar = story.done["slices"]
    before = _latest(stage, honest)
    lie = {"allocation_id": honest["id"], "cpus": -7, "gpus": [{"index": -1}], "uptime_s": 41.5}
    slice_steps.in_guest(stage, LIE, f"{json.dumps(lie)}\n", allocation=liar)
    try:
        end = time.monotonic() + LIE_S
        while (guest := _latest(stage, liar)["guest"])["uptime_s"] != lie["uptime_s"]:
            assert time.monotonic() < end, guest
            time.sleep(5)
        assert (guest["cpus"], guest["gpus"]) == (None, []), guest
        while (now := _latest(stage, honest))["at"] <= before["at"]:
            assert time.monotonic() < end, now
            time.sleep(5)
        assert now["guest"]["cpus"] == before["guest"]["cpus"] > 0
    finally:
        slice_steps.in_guest(
            stage, "sudo systemctl start gpuaas-telemetry.service", allocation=liar
        )


def _latest(stage: Stage, allocation: dict[str, Any]) -> dict[str, Any]:
    path = f"/projects/{stage.facts['project']}/allocations/{allocation['id']}/telemetry"
    latest: dict[str, Any] = stage.api().get(path)["latest"]
    return latest


@pytest.mark.covers("I7", "HOST-9")
def test_the_disk_of_a_running_machine_is_not_wiped(stage: Stage, story: Chapter) -> None:
    """The call carries the tenant's own fence, so that only QEMU's open descriptor protects the
    disk."""
    story.needs("login")
    claim = stage.facts["allocation"]["claims"][0]
    slot = next(slot for slot in stage.bundles() if slot["slot_id"] == claim["slot_id"])
    ledger = ledger_entry(stage, slot["slot_id"])
    # Only the partition table is stable, because the guest writes behind it.
    before = beginning(stage, slot["nvme_device"], mib=1)
    refused = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"]}]})
    assert refused["failed"] and not refused["changed"], refused
    assert refused["error"]["code"] == "disk_in_use"
    assert "open in QEMU" in refused["error"]["found"]
    assert refused["error"]["expected"] and refused["error"]["remedy"]
    assert beginning(stage, slot["nvme_device"], mib=1) == before
    assert ledger_entry(stage, slot["slot_id"]) == ledger


@pytest.fixture(scope="module")
def attacks(story: Chapter) -> Attacks:
    story.needs("attacks")
    attacks: Attacks = story.done["attacks"]
    return attacks


@pytest.mark.covers("SLICE-9", "HOST-6", "P9")
def test_every_frame_is_seen_only_where_it_should_be(stage: Stage, story: Chapter) -> None:
    story.needs("slices")
    attacks = Attacks(stage, story.done["slices"])
    assert attacks.install() == [[firmware, "0"] for firmware in FIRMWARE]
    attacks.lay_out()
    story.done["attacks"] = attacks
    assert attacks.one_round() == []
    story.done["attacked"] = True


@pytest.mark.covers("SLICE-9", "HOST-6", "P9")
@pytest.mark.parametrize("command", [byhand.KILL, byhand.RESTART], ids=["crash", "restart"])
def test_nothing_passes_while_the_switch_comes_back(
    attacks: Attacks, stage: Stage, story: Chapter, command: str
) -> None:
    story.needs("attacked")
    attacks.order("loop")
    attacks.await_world()
    down, back = byhand.switch_down(stage, command)
    attacks.await_world(after=back)
    attacks.order("stop")
    assert attacks.strays() == []
    journal = ("journalctl", "-u", "gpuaas-slice-network-baseline.service", "-o", "cat")
    assert "restored: guard_bridge" in stage.on_host(*journal)
    sent = [event for event in attacks.departures(attacks.events()) if down < event.at < back]
    places = {attacks.attacks[event.token].place for event in sent}
    assert places >= {each.place for each in attacks.slices}
    assert attacks.one_round() == [], "the guards are not as before"


@pytest.mark.covers("SLICE-9", "HOST-6", "P9")
def test_a_flood_of_hardware_addresses_fills_no_table_of_the_switch(
    attacks: Attacks, stage: Stage
) -> None:
    """A flow per refused frame would fill the kernel's datapath."""
    flooding, neighbour = attacks.slices
    before, meters = _refused(stage, flooding.port), _meters(stage)
    slice_steps.in_guest(stage, "sudo python3 -", FLOOD, allocation=flooding.allocation)
    refused = {
        kind: packets - before[kind] for kind, packets in _refused(stage, flooding.port).items()
    }
    assert refused["mac_spoofed"] >= 10_000 and refused["packet_rate"] > 0, refused
    flows = stage.on_host("ovs-appctl", "dpctl/dump-flows")
    assert len(flows.splitlines()) < 300, flows[:2000]
    user = slice_steps.in_guest(stage, "id -un", allocation=neighbour.allocation)
    assert user.strip() == slice_steps.USER
    # Both guests have answered through their meters, which the kernel has.
    after = _meters(stage)
    for each in (flooding, neighbour):
        number = stage.on_host("ovs-vsctl", "get", "Interface", each.port, "ofport").strip()
        rate, packets = after[number]
        assert rate == _baseline_files.PACKETS_PER_SECOND
        assert packets > meters[number][1], (each.port, meters, after)


def _meters(stage: Stage) -> dict[str, tuple[int, int]]:
    """Packets per second, and packets so far, of each meter of the datapath by its number."""
    ask = ("ovs-ofctl", "--protocols=OpenFlow13")
    rates = stage.on_host(*ask, "dump-meters", "ovsbr0")
    counts = stage.on_host(*ask, "meter-stats", "ovsbr0")
    packets = dict(re.findall(r"^meter:([0-9]+) .*?packet_in_count:([0-9]+)", counts, re.MULTILINE))
    limits = re.findall(r"^meter=([0-9]+) pktps .*\n.* rate=([0-9]+)$", rates, re.MULTILINE)
    return {number: (int(rate), int(packets[number])) for number, rate in limits}


def _refused(stage: Stage, port: str) -> dict[str, int]:
    """Frames of a port that the filter before the switch refused, by kind."""
    listed = stage.on_host("nft", "-j", "list", "table", "netdev", f"gpuaas_{port}")
    counters = [row["counter"] for row in json.loads(listed)["nftables"] if "counter" in row]
    return {row["name"].removesuffix("_refused"): row["packets"] for row in counters}


@pytest.mark.covers("SLICE-9", "HOST-6", "I14", "I17", "P9")
def test_guests_are_guarded_from_their_first_packet_after_a_power_loss(
    attacks: Attacks, stage: Stage, story: Chapter
) -> None:
    """The attack starts with each guest. An operator starts both by hand."""
    story.needs("attacked")
    attacks.close()
    boot, shown = byhand.boot(stage), byhand.firmware_report(stage)
    byhand.power_cut(stage)
    byhand.booted(stage, after=boot)
    assert differences(stage) == {"guest_stopped"}
    attacks.lay_out()
    first = attacks.slices[0].allocation["id"]
    guard, domain = _object_names.guard_path(first), _object_names.domain_name(first)
    stage.on_host("mv", guard, "/run/guard")
    with pytest.raises(LabError, match="guard_missing"):
        stage.on_host("virsh", "start", domain, limit_s=600)
    stage.on_host("mv", "/run/guard", guard)
    for each in attacks.slices:
        domain = _object_names.domain_name(each.allocation["id"])
        stage.on_host("virsh", "start", domain, limit_s=600)
    attacks.await_world(limit_s=BOOT_S)
    for each in attacks.slices:
        _is_up(stage, each.allocation)
    attacks.order("stop")
    assert attacks.strays() == []
    assert attacks.one_round() == []
    attacks.close()
    # Slices that ran before the power loss are started as soon as the host is proven: these run.
    prove_again(stage)
    assert firmware.differences(shown, byhand.firmware_report(stage)) == []
    for each in attacks.slices:
        path = f"/admin/allocations/{each.allocation['id']}"
        stage.follow({"id": stage.api().get(path)["task_ids"][-1]})
        ended = stage.api().get(path)
        assert (ended["state"], ended["error"]) == ("active", {})


def _is_up(stage: Stage, allocation: dict[str, Any]) -> None:
    """Wait until the tenant can log in, under the host key that the guest had before."""
    end = time.monotonic() + BOOT_S
    while True:
        try:
            assert slice_steps.in_guest(stage, "id -un", allocation=allocation).strip() == (
                slice_steps.USER
            )
        except LabError:
            assert time.monotonic() < end, "the guest does not answer"
            time.sleep(15)
        else:
            return


@pytest.mark.covers("CTRL-9", "I12", "I14", "I15", "I17", "SLICE-6", "SLICE-7")
def test_one_is_released_beside_the_other_though_the_reconciler_is_killed(
    stage: Stage, story: Chapter
) -> None:
    """Host and records agree before and after the release."""
    story.needs("login")
    if "attacks" in story.done:
        story.done["attacks"].close()
        story.done["attacks"].remove()
    assert differences(stage) == set()
    # An array and a volume group of the tenant do not stop the release.
    types = slice_steps.in_guest(stage, "sudo python3 -", LABELS).split()
    assert types == ["linux_raid_member", "LVM2_member"], types
    evidence = slice_steps.release(stage, lambda task_id: _kill_the_reconciler(stage, task_id))
    assert evidence["allocation"] == "released"
    assert evidence["shutdown"] == "graceful"
    assert evidence["absence"]["absent"]
    assert evidence["slots"] == ["available"]
    functions = {slot["slot_id"]: slot["fabric_vf_pci_address"] for slot in stage.bundles()}
    address = functions[stage.facts["allocation"]["claims"][0]["slot_id"]]
    assert _functions(stage)[address][0] == stage.profile()["fabric"]["vlans"][0]
    # Only the limit of the other slice is left.
    assert len(stage.on_host(*QOS_ROWS).split()) == 1
    assert differences(stage) == set()
    story.done["release"] = evidence


@pytest.mark.covers("I4", "SLICE-6", "P11")
def test_no_byte_of_the_tenant_is_left(stage: Stage, story: Chapter) -> None:
    story.needs("release")
    evidence = slice_steps.wipe_proof(stage)
    (proof,) = evidence["proofs"]
    assert proof["kind"] == "wipe"
    assert evidence["canary_copies_on_disk"] == 0
    # The tenant left a pattern in the whole buffer of its GPU, and values in its registers.
    assert evidence["gpus_after_reset"][0]["buffer_bytes"] == 0
    gpu = proof["document"]["gpu"]
    assert (gpu["method"], gpu["scrub"]["method"], gpu["verified"]) == ("bus", "edu", True)


@pytest.mark.covers("I10", "SLICE-1")
def test_a_stale_fence_is_refused_by_the_host(stage: Stage, story: Chapter) -> None:
    """The host's ledger has a higher fence than a run from an older claim carries."""
    story.needs("release")
    claim = stage.facts["allocation"]["claims"][0]
    slot = next(slot for slot in stage.bundles() if slot["slot_id"] == claim["slot_id"])
    device = slot["nvme_device"]
    # The disk now has data to lose. With the present fence the same call wipes it, as the end
    # shows.
    stage.on_host("sh", "-c", f"'mkswap -q {device}; udevadm settle'")
    ledger, disk = ledger_entry(stage, slot["slot_id"]), beginning(stage, device)
    before = records(stage)

    stale = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"] - 1}]})
    assert stale["failed"]
    assert not stale["changed"]
    assert stale["error"]["code"] == "stale_fence"
    assert stale["error"]["expected"] and stale["error"]["found"] and stale["error"]["remedy"]
    assert ledger_entry(stage, slot["slot_id"]) == ledger
    assert beginning(stage, device) == disk
    assert records(stage) == before

    wiped = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"]}]})
    assert wiped["done"] == ["wipe_disk"], wiped
    again = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"]}]})
    assert (again["failed"], again["changed"]) == (False, False), again
    assert beginning(stage, device) != disk
    assert not ledger_entry(stage, slot["slot_id"])["dirty"]


@pytest.mark.covers("HOST-12")
def test_host_and_vm_are_measured_by_the_same_harness(
    stage: Stage, story: Chapter, tmp_path: Path
) -> None:
    """Measure the VM through its host, with the key from its console; missing tools are named."""
    story.needs("release")
    measured = story.done["slices"][0]
    taken = {claim["slot_id"] for claim in measured["claims"]}
    disk = next(row["nvme_device"] for row in stage.bundles() if row["slot_id"] not in taken)
    node = stage.on_host("readlink", "-f", disk).strip()
    written = captures.writes(stage, node)
    files = [tmp_path / "bare.json", tmp_path / "slice.json"]
    host = captures.of_host(stage, files[0], "--fio-target", disk)
    assert captures.writes(stage, node) == written
    targets = ["--fio-target", "/dev/vda", "--rdma-peer", "10.100.0.1"]
    guest = captures.of_guest(stage, measured, files[1], "--sudo", "--vcpus", "1", *targets)
    assert (guest["kind"], guest["vcpus"], guest["host"]["hostname"]) == ("vm", 1, "slice")
    assert guest["harness"]["digest"] == host["harness"]["digest"]

    probes = captures.probes(guest)
    for name in ("cpu", "memory"):
        assert probes[name]["status"] == "ok", probes[name]["reason"]
    lacking = {"disk": "tool_missing", "rdma": "tool_missing", "gpu": "cuda_driver_missing"}
    for name, code in {**lacking, "vllm": "tool_missing"}.items():
        assert (probes[name]["status"], probes[name]["reason"]["code"]) == ("unavailable", code)
        assert probes[name]["reason"]["remedy"]
    assert captures.probes(host)["disk"]["status"] == "ok"

    rows = captures.compared(stage, files, tmp_path / "difference.svg")
    for metric in ("cpu.integer", "cpu.float", "memory.copy"):
        assert rows[metric]["delta_percent"] is not None, rows[metric]
        assert rows[metric]["direction"] in ("better", "worse", "same", "unclear")
    missing = (rows["disk.read"]["direction"], rows["disk.read"]["note"])
    assert missing == ("missing", "unavailable: tool_missing")


@pytest.mark.covers("I6", "SLICE-3", "SLICE-5")
def test_a_vm_whose_gpu_does_not_compute_blocks_its_slot(stage: Stage, story: Chapter) -> None:
    """The GPU is the site's, so the launch does not count as its tenant's failure."""
    story.needs("release")
    evidence = slice_steps.blocked(stage)
    assert evidence["health_state"] == "failed"
    assert evidence["health_detail"]["allocation_id"] == evidence["allocation"]
    assert evidence["error"]["code"] == "probe_failed"
    assert "does not keep what is written to its memory" in evidence["error"]["found"]
    story.done["blocked"] = evidence


@pytest.mark.covers("CTRL-7", "I21")
def test_force_cleanup_wants_an_idempotency_key_and_keeps_to_it(
    stage: Stage, story: Chapter
) -> None:
    story.needs("blocked")
    path = f"/admin/allocations/{story.done['blocked']['allocation']}/force-cleanup"
    body = {"reason": "test", "runtime_verified_absent": False}
    api, other = stage.api(), {**body, "reason": "another"}
    assert refusal(stage, lambda: api.post(path, body, key=None)) == "idempotency_key_required"
    first = api.post(path, body, key="same-key")
    assert api.post(path, body, key="same-key") == first
    code = refusal(stage, lambda: api.post(path, other, key="same-key"))
    assert code == "idempotency_key_reused"
    # If the operator answers "not verified", the slot stays blocked.
    slot = slice_steps.slot_of(stage, stage.facts["blocked"])
    assert slot["status"] == "cleanup_blocked"


@pytest.mark.covers("CTRL-7")
def test_recovery_brings_the_slot_back(stage: Stage, story: Chapter) -> None:
    story.needs("blocked")
    evidence = slice_steps.recover(stage)
    assert evidence["audit"]["events"]
    assert all(slot["status"] == "available" for slot in evidence["inventory_after"].values())
    stage.facts["allocation"] = story.done["slice"] = story.done["slices"][0]


def _await_progress(stage: Stage, task_id: str) -> None:
    """Wait until the task's run works on the host."""
    end = time.monotonic() + 120
    while True:
        task = stage.api().get(f"/admin/tasks/{task_id}")
        if task["state"] == "running" and task.get("progress"):
            return
        assert time.monotonic() < end, "the run did not start in two minutes"
        time.sleep(0.5)


def _kill_the_reconciler(stage: Stage, task_id: str) -> None:
    """Kill the reconciler once the task's run works on the host; start a new one five seconds
    later.
    """
    assert stage.service is not None
    _await_progress(stage, task_id)
    stage.service.kill()
    time.sleep(5)
    stage.service.start()
