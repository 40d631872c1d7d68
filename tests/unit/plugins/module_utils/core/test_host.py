"""File tree of a host: the formats of its files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8", [0, 1, 2, 3, 8]), ("", []), ("5\n", [5]), ("0-1,4-5", [0, 1, 4, 5])],
)
def test_numbers(text: str, expected: list[int]) -> None:
    assert _host.numbers(text) == expected


def test_names_by_pattern(tree: Path) -> None:
    assert _host.matching("/etc/x", "*.conf") == []
    for name in ("b.conf", "a.conf", ".c.conf", "d.confs"):
        _host.write(f"/etc/x/{name}", "")
    assert _host.matching("/etc/x", "*.conf") == [".c.conf", "a.conf", "b.conf"]


def test_a_broken_link_is_there(tree: Path) -> None:
    (tree / "link").symlink_to("nowhere")
    (tree / "file").touch()
    names = ("/link", "/file", "/nowhere", "/file/below")
    assert [_host.is_there(name) for name in names] == [True, True, False, False]


@pytest.mark.parametrize("ending", [errno.ENOENT, errno.ESRCH])
def test_a_process_that_ends_during_the_scan_is_passed_over(
    tree: Path, monkeypatch: pytest.MonkeyPatch, ending: int
) -> None:
    def end(*_arguments: object) -> bytes:
        raise OSError(ending, os.strerror(ending))

    (tree / "proc/12").mkdir(parents=True)
    monkeypatch.setattr(Path, "read_bytes", end)
    monkeypatch.setattr(os, "scandir", end)
    assert _host.of_process(12, "cmdline") == ""
    assert list(_host.open_files(12)) == []


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENAMETOOLONG])
def test_a_file_that_is_closed_during_the_scan_hides_no_other(
    tree: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    readlink = os.readlink

    def closed(link: str) -> str:
        if link.endswith("/fd/1"):
            if code != errno.ENAMETOOLONG:
                Path(link).unlink()
            raise OSError(code, os.strerror(code))
        return readlink(link)

    (tree / "proc/12/fd").mkdir(parents=True)
    for number in (1, 2):
        (tree / f"proc/12/fd/{number}").symlink_to(f"/dev/{number}")
    monkeypatch.setattr(os, "readlink", closed)
    assert list(_host.open_files()) == [(12, "/dev/2")]


def test_an_open_file_without_a_name_is_not_passed_over(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(_link: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tree / "proc/12/fd").mkdir(parents=True)
    (tree / "proc/12/fd/1").symlink_to("/dev/1")
    monkeypatch.setattr(os, "readlink", deny)
    with pytest.raises(Refusal, match="file_unreadable"):
        list(_host.open_files())
