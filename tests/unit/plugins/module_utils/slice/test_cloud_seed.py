"""Cloud-init documents, read back by a YAML reader, and the digest in an ISO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _cloud_seed
from hypothesis import given
from hypothesis import strategies as st

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@given(documents)
def test_any_document_reads_back_unchanged(document: Any) -> None:
    assert yaml.safe_load(_cloud_seed.yaml(document)) == document


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
