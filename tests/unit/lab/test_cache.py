"""Content keys and the build-once folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUAAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gpuaas"


def test_the_key_does_not_depend_on_the_order_of_inputs() -> None:
    assert cache.content_key({"a": 1, "b": 2}) == cache.content_key({"b": 2, "a": 1})


def test_the_key_changes_with_a_file_its_name_and_its_mode(tmp_path: Path) -> None:
    source = tmp_path / "overlay"
    source.mkdir()
    file = source / "script"
    file.write_text("one")
    keys = {cache.content_key({}, [source])}
    file.write_text("two")
    keys.add(cache.content_key({}, [source]))
    file.chmod(0o755)
    keys.add(cache.content_key({}, [source]))
    file.rename(source / "other")
    keys.add(cache.content_key({}, [source]))
    assert len(keys) == 4


def test_compiled_python_is_no_source(tmp_path: Path) -> None:
    source = tmp_path / "overlay"
    (source / "__pycache__").mkdir(parents=True)
    before = cache.content_key({}, [source])
    (source / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert cache.content_key({}, [source]) == before


def test_a_second_call_builds_nothing(folder: Path) -> None:
    calls: list[Path] = []

    def build(half: Path) -> None:
        calls.append(half)
        (half / "image").write_text("made")

    for _ in range(2):
        target = cache.ensure("thing", "k1", build)
        assert (target / "image").read_text() == "made"
    assert len(calls) == 1
    assert target == folder / "thing-k1"


def test_a_build_that_failed_leaves_nothing_that_looks_complete(folder: Path) -> None:
    def fail(half: Path) -> None:
        (half / "image").write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        cache.ensure("thing", "k1", fail)
    assert not (folder / "thing-k1").exists()
    assert cache.ensure("thing", "k1", lambda half: (half / "new").touch()).joinpath("new").exists()
    assert not (folder / "thing-k1" / "image").exists()
