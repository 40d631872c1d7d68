"""Which QEMU is new enough."""

from __future__ import annotations

import pytest

from lab import qemu
from lab.command import LabError


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("QEMU emulator version 7.2.17 (Debian 1:7.2+dfsg-7+deb12u13)", (7, 2)),
        ("QEMU emulator version 8.2.2 (Debian 1:8.2.2+ds-0ubuntu1.7)", (8, 2)),
        ("QEMU emulator version 11.1.3", (11, 1)),
    ],
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert qemu.parse_version(text) == version


def test_an_unknown_answer_is_quoted() -> None:
    with pytest.raises(LabError, match="what"):
        qemu.parse_version("what?")
