"""Cloud-init seed: documents read back by a YAML reader, the digest in an ISO, a seed's life.

It is written once, replaced when its content changes, destroyed when read, and never shown.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _cloud_seed,
    _domain,
    _libvirt,
    _traces,
)
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.covers("SLICE-3")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@given(documents)
def test_any_document_reads_back_unchanged(document: Any) -> None:
    assert yaml.safe_load(_cloud_seed.yaml(document)) == document


@pytest.mark.covers("P2")
@pytest.mark.parametrize(
    "hostile",
    ["{{ lookup('pipe','id') }}", "a\n- b: c", "52:54:00:12:34:56", "!!python/object", "*x", "- "],
)
def test_hostile_text_stays_text(hostile: str) -> None:
    assert yaml.safe_load(_cloud_seed.yaml({"hostname": hostile})) == {"hostname": hostile}


def test_the_user_data_begins_with_its_mark() -> None:
    content = _cloud_seed.files({"hostname": "a"}, {"instance-id": "i"}, {})
    assert content["user-data"].startswith("#cloud-config\n")
    assert "network-config" not in content


def test_a_tenants_document_comes_after_and_takes_nothing_away() -> None:
    ours = {"users": [{"name": "ada"}], "write_files": [{"path": "/a"}], "runcmd": ["first"]}
    theirs = {
        "users": [],
        "write_files": [{"path": "/a", "content": "theirs"}, {"path": "/b"}],
        "runcmd": ["second"],
        "packages": ["htop"],
        "timezone": "UTC",
    }
    assert _cloud_seed.merged(ours, theirs) == {
        "users": [{"name": "ada"}],
        # Ours are written first, so that an error in theirs leaves them in place.
        "write_files": [{"path": "/a"}, {"path": "/b"}],
        "runcmd": ["first", "second"],
        "packages": ["htop"],
        "timezone": "UTC",
    }


@pytest.mark.parametrize("key", ["write_files", "runcmd", "packages"])
def test_what_is_no_list_is_refused(key: str) -> None:
    with pytest.raises(Refusal) as refusal:
        _cloud_seed.merged({}, {key: {"0": "x"}})
    assert refusal.value.code == "spec_invalid"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(Refusal, match="spec_invalid"):
        _cloud_seed.yaml("\ud800")


class Maker:
    """ISO program that writes only the parts that `present` reads."""

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.missing = missing
        self.programs: list[str] = []

    def run(self, argv: list[str], **_: object) -> _command.Result:
        self.programs.append(argv[0])
        if argv[0] in self.missing:
            raise Refusal("command_missing", expected="", found="", remedy="")
        mark = argv[argv.index("-appid") + 1]
        Path(argv[argv.index("-output") + 1]).write_bytes(
            bytes(16 * 2048 + 574) + mark.ljust(128).encode()
        )
        return _command.Result(0, "", "")


def test_an_iso_says_what_it_holds_and_only_root_reads_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_command, "run", Maker().run)
    content = _cloud_seed.files({"a": 1}, {}, {})
    _cloud_seed.make("/var/lib/gpuaas/seeds/x.iso", content)
    assert _cloud_seed.present("/var/lib/gpuaas/seeds/x.iso") == _cloud_seed.digest(content)
    folder = tree / "var/lib/gpuaas/seeds"
    assert (folder / "x.iso").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in folder.iterdir()] == ["x.iso"]


def test_a_seed_is_on_the_disk_before_it_has_its_name(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power its header would vouch for content that never came."""
    synced, sync = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(_command, "run", Maker().run)
    monkeypatch.setattr(os, "fsync", fsync)
    _cloud_seed.make("/var/lib/gpuaas/seeds/x.iso", {"user-data": ""})
    assert (tree / "var/lib/gpuaas/seeds/x.iso").stat().st_ino in synced


def test_another_program_is_tried(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(missing=("genisoimage",))
    monkeypatch.setattr(_command, "run", maker.run)
    _cloud_seed.make("/var/lib/gpuaas/seeds/x.iso", {"user-data": ""})
    assert maker.programs == ["genisoimage", "xorrisofs"]


def test_without_any_program_it_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(missing=("genisoimage", "xorrisofs", "mkisofs"))
    monkeypatch.setattr(_command, "run", maker.run)
    with pytest.raises(Refusal, match="command_missing"):
        _cloud_seed.make("/var/lib/gpuaas/seeds/x.iso", {"user-data": ""})
    assert not list((tree / "var/lib/gpuaas/seeds").iterdir())


def test_a_foreign_file_is_not_a_seed(tree: Path) -> None:
    (tree / "x.iso").write_bytes(b"x" * 40000)
    assert _cloud_seed.present("/x.iso") == ""
    assert _cloud_seed.present("/y.iso") is None


PARAMS: dict[str, Any] = {
    "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d",
    "state": "present",
    "user_data": json.dumps({"users": [{"name": "ada", "passwd": "canary-secret"}]}),
    "meta_data": {"instance-id": "i"},
    "network_config": {"version": 2},
    "runtime_data": {},
}


@pytest.fixture
def seeds(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def make(path: str, content: dict[str, str]) -> None:
        file = tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        mark = b"GPUAAS SEED " + _cloud_seed.digest(content).upper().encode()
        file.write_bytes(bytes(16 * 2048 + 574) + mark.ljust(128))

    monkeypatch.setattr(_cloud_seed, "make", make)
    return tree


def drive(params: dict[str, Any], *, check_mode: bool = False) -> _change.Outcome:
    return _change.drive(_cloud_seed.SUBJECT, params, check_mode=check_mode)


def test_write_change_and_remove(seeds: Path) -> None:
    assert drive(PARAMS, check_mode=True).changed
    assert drive(PARAMS).done == ["write_seed"]
    assert drive(PARAMS).done == []
    assert drive({**PARAMS, "meta_data": {"instance-id": "j"}}).done == ["write_seed"]
    assert drive({**PARAMS, "state": "absent"}).done == ["remove_seed"]
    assert drive({**PARAMS, "state": "absent"}).done == []


@pytest.mark.covers("P3")
def test_nothing_of_the_content_is_in_the_result(seeds: Path) -> None:
    assert "canary-secret" not in json.dumps(drive(PARAMS).document())


@pytest.mark.parametrize("text", ["canary-secret", "[1]", '"canary-secret"'])
def test_what_is_no_document_is_refused_without_being_quoted(seeds: Path, text: str) -> None:
    with pytest.raises(_change.Refusal) as refusal:
        drive({**PARAMS, "user_data": text})
    assert refusal.value.code == "spec_invalid"
    assert "canary" not in str(refusal.value)


@pytest.mark.covers("I13", "P13")
@pytest.mark.parametrize("state", ["present", "detached", "absent"])
def test_the_secrets_of_a_killed_run_are_a_trace_and_go(
    tree: Path, script: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    def killed(*_words: object, **_options: object) -> None:
        raise SystemExit

    with monkeypatch.context() as during:
        during.setattr(_command, "run", killed)
        during.setattr(_cloud_seed.shutil, "rmtree", lambda _folder: None)
        with pytest.raises(SystemExit):
            drive(PARAMS)
    allocation_id = PARAMS["allocation_id"]
    (trace,) = _traces.looks("ovsbr0")["seed"]()
    assert trace.belongs_to(allocation_id)
    assert "canary-secret" in (tree / trace.text.lstrip("/") / "user-data").read_text()
    monkeypatch.setattr(_command, "run", Maker().run)
    monkeypatch.setattr(_libvirt, "described", lambda _name, **_: (None, []))
    assert drive({**PARAMS, "state": state}).done[0] == "remove_draft"
    left = [trace.text for trace in _traces.looks("ovsbr0")["seed"]()]
    assert left == ([_object_names.seed_path(allocation_id)] if state == "present" else [])


def test_a_late_run_writes_none(seeds: Path) -> None:
    late = {**PARAMS, "slots": [{"slot_id": "s1", "fence": 3}]}
    _ledger.raise_fence("s1", fence=4)
    with pytest.raises(_change.Refusal) as refusal:
        drive(late)
    assert refusal.value.code == "stale_fence"
    assert drive(PARAMS).done == ["write_seed"]
    assert drive({**late, "state": "absent"}).done == ["remove_seed"]


NAME = _object_names.domain_name(PARAMS["allocation_id"])
PATH = _object_names.seed_path(PARAMS["allocation_id"])
DETACH = {**PARAMS, "state": "detached"}
VIRSH = ("virsh", "--connect", "qemu:///system")
_LOOK = f"domstats --state --nowait {NAME}; dumpxml --inactive {NAME}; dumpxml {NAME}"
DESCRIBE = (*VIRSH, _LOOK)


def domain_xml(*, seed: bool) -> str:
    machine = _domain.Domain(
        allocation_id=PARAMS["allocation_id"],
        vcpus=1,
        memory_mib=768,
        mac="52:54:00:64:00:0a",
        bridge="ovsbr0",
        disks=("/dev/disk/by-id/nvme-eui.5e0000000000a003",),
        gpus=("0000:43:00.0",),
        seed_path=PATH if seed else "",
    )
    return _domain.render(machine)


def runs(script: Any, *, live: list[bool], state: int = 1) -> None:
    """A domain whose definition names the seed at the first look. live: whether its QEMU has it: at
    the first look, after it was unplugged, and at the last look.
    """
    _host.write(f"/etc/libvirt/qemu/{NAME}.xml", "<domain/>")
    text = f"Domain: '{NAME}'\n  state.state={state}\n  state.reason=1\n\n"
    for kept, plugged in ((True, live[0]), (False, live[-1])):
        definitions = "\n".join(domain_xml(seed=seed) for seed in (kept, plugged))
        script.on(*DESCRIBE, out=text + definitions + "\n")
    for plugged in live[1:-1] or live:
        script.on(*VIRSH, "dumpxml", NAME, out=domain_xml(seed=plugged))
    for mode in ("--config", "--live"):
        script.on(*VIRSH, "detach-disk", NAME, PATH, mode)


@pytest.mark.covers("P13")
def test_after_readiness_it_is_overwritten_and_out_of_the_guest(seeds: Path, script: Any) -> None:
    """QEMU has the file open, so that deleting it alone would leave its content in the guest."""
    drive(PARAMS)
    with (seeds / PATH.lstrip("/")).open("rb") as qemu:
        assert b"GPUAAS SEED" in qemu.read()
        runs(script, live=[True, True, False, False])
        script.calls.clear()
        outcome = drive(DETACH)
        programs = [argv[3].partition(" ")[0] for argv in script.calls]
        unplug = ["detach-disk", "dumpxml", "dumpxml"]
        assert programs == ["domstats", "detach-disk", *unplug, "domstats"]
        assert outcome.done == ["forget_seed", "destroy_seed", "unplug_seed"]
        assert not (seeds / PATH.lstrip("/")).exists()
        qemu.seek(0)
        assert qemu.read().strip(b"\0") == b""
    evidence = {"destroyed": True, "in_definition": False, "in_guest": False}
    assert (outcome.facts["seed"], outcome.doubts) == (evidence, [])
    assert drive(DETACH).done == []


@pytest.mark.covers("P13")
def test_a_guest_that_keeps_the_disk_keeps_zeros_and_is_a_doubt(
    seeds: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(PARAMS)
    runs(script, live=[True])
    clock = itertools.count(step=20)
    monkeypatch.setattr(_libvirt.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(_libvirt.time, "sleep", lambda _seconds: None)
    outcome = drive(DETACH)
    assert outcome.failure is None
    assert [doubt.code for doubt in outcome.doubts] == ["disk_not_unplugged"]
    assert outcome.facts["seed"] == {"destroyed": True, "in_definition": False, "in_guest": True}
    assert not (seeds / PATH.lstrip("/")).exists()


def test_a_late_run_detaches_none(seeds: Path) -> None:
    _ledger.raise_fence("s1", fence=4)
    with pytest.raises(_change.Refusal) as refusal:
        drive({**DETACH, "slots": [{"slot_id": "s1", "fence": 3}]})
    assert refusal.value.code == "stale_fence"
