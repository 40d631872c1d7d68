"""No form of a secret is left; everything else is."""

from __future__ import annotations

import pytest

from reconciler.runs.scrub import GONE, scrub

SECRET = "planted5ecret-0123456789"
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\nb3BlbnNza\n-----END OPENSSH PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"password: {SECRET}",
        f"db_password={SECRET} next",
        f'"api_key": "{SECRET}"',
        f'{{\\"token\\": \\"{SECRET}\\"}}',
        f"'client_secret': '{SECRET} and more'",
        f"Authorization: Bearer {SECRET}",
        f"authorization: basic {SECRET}",
        f"https://images.example/a.raw?token={SECRET}&x=1",
        f"https://user:{SECRET}@images.example/a.raw",
        f"gpuaas_{SECRET}",
        f"token enrol_{SECRET}",
        f"eyJhbGciOiJSUzI1NiJ9.{SECRET}.sig",
        KEY,
        KEY[: len(KEY) - 10],
        KEY[40:],
        f"before\n{KEY}\nafter {KEY}",
    ],
)
def test_gone(text: str) -> None:
    result = scrub(text)
    assert SECRET not in result and "planted" not in result
    assert GONE in result


@pytest.mark.parametrize(
    "text",
    [
        "TASK [Wait until it is reachable] ****",
        "changed: [n1] => {'changed': true, 'fence': 3}",
        "https://images.example/a.raw",
        "secrets: {}",
        "the enrolment token has expired",
        "disk eui.5e0000000000a000: 0 bytes, mac 52:54:00:64:00:0a",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX tenant",
    ],
)
def test_left(text: str) -> None:
    assert scrub(text) == text


def test_twice_is_once_and_a_megabyte_is_quick() -> None:
    once = scrub(f"{KEY}\npassword={SECRET}")
    assert scrub(once) == once
    assert len(scrub("token " * 100_000 + "-----END " * 1000)) > 500_000
