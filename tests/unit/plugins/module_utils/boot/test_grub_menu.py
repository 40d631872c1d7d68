"""Next boot entry of GRUB, read from menus in the form of Debian 12 and Ubuntu 24.04."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _grub_menu

pytestmark = pytest.mark.covers("HOST-4", "HOST-10")

DATA = Path(__file__).resolve().parents[4] / "data/grub"
# `DEFAULT` stands in place of GRUB_DEFAULT; each kernel line has a distinct word.
DEBIAN = (DATA / "debian-12.cfg").read_text()
# The cloud image first boots without an initramfs.
UBUNTU = (DATA / "ubuntu-24.04-cloud.cfg").read_text()


def words(text: str, **environment: str) -> list[str]:
    entry = _grub_menu.chosen(_grub_menu.parse(text), environment)
    return [word for kernel in entry.kernels for word in kernel if word.startswith("one=")]


@pytest.mark.parametrize(
    ("default", "expected"),
    [
        ("0", "one=simple"),
        ("gnulinux-simple-u", "one=simple"),
        ("Debian GNU/Linux", "one=simple"),
        ("1", "one=second"),
        ("1>1", "one=first"),
        ("gnulinux-advanced-u>gnulinux-6.1.0-1-advanced-u", "one=first"),
        ("Advanced options for Debian GNU/Linux>Debian, with Linux 6.1.0-1-amd64", "one=first"),
        ("no such entry", "one=simple"),
        ("17", "one=simple"),
        ("1>17", "one=second"),
    ],
)
def test_the_default_is_found_by_number_title_and_id(default: str, expected: str) -> None:
    assert words(DEBIAN.replace("DEFAULT", default)) == [expected]


@pytest.mark.parametrize("default", ["2", "3", "uefi-firmware"])
def test_a_default_without_a_kernel_starts_none(default: str) -> None:
    assert words(DEBIAN.replace("DEFAULT", default)) == []


def test_what_was_saved_and_what_is_asked_for_once() -> None:
    saved = DEBIAN.replace("DEFAULT", "${saved_entry}")
    assert words(saved) == ["one=simple"]
    assert words(saved, saved_entry="1>1") == ["one=first"]
    assert words(saved, saved_entry="1>1", prev_saved_entry="1>0") == ["one=second"]
    assert words(saved, saved_entry="0", next_entry="1>1") == ["one=first"]
    assert words(DEBIAN.replace("DEFAULT", "0"), saved_entry="1>1") == ["one=simple"]
    # A menu that does not read the variable is not affected by it.
    assert words('set default="1"\n' + DEBIAN[DEBIAN.index("menuentry") :], next_entry="0") == [
        "one=second"
    ]


def test_every_branch_of_an_entry_counts() -> None:
    assert words(UBUNTU) == ["one=with", "one=without"]


def test_a_doubled_sign_belongs_to_the_title() -> None:
    text = DEBIAN.replace("'Debian GNU/Linux'", "'a>b'").replace("DEFAULT", "a>>b")
    assert words(text) == ["one=simple"]


def test_titles_that_are_no_shell_words_do_not_stop_the_look() -> None:
    assert words("menuentry it's {\n linux /boot/vmlinuz one=x\n}\n") == ["one=x"]


def test_a_list_of_kernels_without_entries_is_taken_as_one() -> None:
    assert words("linux /boot/vmlinuz one=a\nlinux /boot/vmlinuz one=b\n") == ["one=a", "one=b"]


def test_it_is_read_with_grubs_environment(tree: Any) -> None:
    assert _grub_menu.next_boot() is None
    folder = tree / "boot/grub"
    folder.mkdir(parents=True)
    (folder / "grub.cfg").write_text(DEBIAN.replace("DEFAULT", "${saved_entry}"))
    (folder / "grubenv").write_text("# GRUB Environment Block\nsaved_entry=1>1\n" + "#" * 900)
    boot = _grub_menu.next_boot()
    assert boot.title == "Debian, with Linux 6.1.0-1-amd64"
