"""Redfish sessions and trust, against a BMC that is a separate process behind TLS."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _errors
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _redfish_connection,
    _redfish_session,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_connection import Trust

from tests.standin import bmc as standin
from tests.standin import redfish

pytestmark = pytest.mark.covers("HOST-3")

SYSTEM = redfish.SYSTEM


def client(
    bmc: standin.Bmc, trust: Trust | None = None, *, timeout: float = 60
) -> _redfish_session.Client:
    account = _redfish_session.Account("root", standin.PASSWORD)
    return _redfish_session.Client(
        bmc.address, account, trust or Trust(ca_file=bmc.ca_file), timeout=timeout
    )


def refused(act: Callable[[], object]) -> _errors.Refusal:
    with pytest.raises(_errors.Refusal) as caught:
        act()
    assert standin.PASSWORD not in str(caught.value)
    return caught.value


def get(
    bmc: standin.Bmc, path: str = SYSTEM, *, trust: Trust | None = None, timeout: float = 60
) -> _errors.Refusal:
    def act() -> None:
        with client(bmc, trust, timeout=timeout) as session:
            session.get(path)

    return refused(act)


def test_one_session_for_everything_and_a_logout(bmc: standin.Bmc) -> None:
    with client(bmc) as session:
        assert session.get(SYSTEM)["PowerState"] == "On"
        session.get(f"{SYSTEM}/Bios")
        assert bmc.record()["open_sessions"] == 1
    assert session.opened == []
    assert bmc.record()["opened"] == 1


def test_without_a_request_nobody_logs_in(bmc: standin.Bmc) -> None:
    with client(bmc):
        pass
    assert bmc.record()["requests"] == []


@pytest.mark.parametrize("crash", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_logs_out_whatever_happens(bmc: standin.Bmc, crash: type[BaseException]) -> None:
    with pytest.raises(crash), client(bmc) as session:
        session.get(SYSTEM)
        raise crash


def test_a_wrong_password_is_tried_once(bmc: standin.Bmc) -> None:
    """After three wrong logins an iDRAC blocks the address."""
    bmc.begin(password="another", echo=True)
    refusal = get(bmc)
    assert (refusal.code, refusal.found) == ("bmc_login_refused", "HTTP 401 (IDRAC.2.8.RAC0212)")
    assert bmc.record()["wrong_logins"] == 1


def test_an_expired_session_is_replaced_and_both_are_closed(bmc: standin.Bmc) -> None:
    bmc.begin(expire_after=2)
    with client(bmc) as session:
        for _ in range(3):
            session.get(SYSTEM)
        assert len(session.opened) == 2
    assert (bmc.record()["opened"], session.opened) == (2, [])


def test_a_session_that_is_never_good_ends_after_the_second(bmc: standin.Bmc) -> None:
    """A BMC that forgets each token at once does not cause endless logins."""
    bmc.begin(password=standin.PASSWORD, expire_after=-1)
    assert get(bmc).code == "bmc_session_refused"
    assert bmc.record()["opened"] == 2


def test_waits_as_long_as_a_busy_bmc_asks(bmc: standin.Bmc) -> None:
    login = f"POST {redfish.SESSIONS}"
    bmc.begin(busy={login: 1}, retry_after="1")
    before = time.monotonic()
    with client(bmc) as session:
        session.get(SYSTEM)
    assert time.monotonic() - before >= 1
    assert bmc.count(login) == 2


def test_a_wait_past_the_deadline_is_not_begun(bmc: standin.Bmc) -> None:
    bmc.begin(busy={f"GET {SYSTEM}": 9}, retry_after="3600")
    before = time.monotonic()
    refusal = get(bmc)
    assert time.monotonic() - before < 30
    assert refusal.code == "bmc_busy"
    assert "HTTP 503 (IDRAC.2.8.RAC0218)" in refusal.found


def test_retry_after_may_be_a_date() -> None:
    def pause(text: str) -> float:
        return _redfish_session._pause(_redfish_connection.Answer(503, {"retry-after": text}, b""))

    later = format_datetime(datetime.now(UTC) + timedelta(seconds=300), usegmt=True)
    assert 200 < pause(later) <= 300
    assert pause("7") == 7
    assert pause("0") == pause("Wed, 21 Oct 2015 07:28:00 GMT") == 0.2
    assert pause("soon") == pause("") == pause("²") == 5


def test_a_bmc_that_drips_is_cut_off(bmc: standin.Bmc) -> None:
    """A socket's time limit restarts with every byte; the product's limit does not."""
    bmc.begin(drip=SYSTEM)
    before = time.monotonic()
    assert get(bmc, timeout=0.7).code == "bmc_unreachable"
    assert time.monotonic() - before < 30


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<html>login</html>", "18 bytes that are not JSON"),
        ("", "0 bytes that are not JSON"),
        ("[1]", "JSON that is not an object"),
        ("[" * 100_000, "100000 bytes that are not JSON"),
    ],
)
def test_garbage_is_no_answer(bmc: standin.Bmc, body: str, reason: str) -> None:
    bmc.begin(bodies={SYSTEM: body})
    refusal = get(bmc)
    assert (refusal.code, refusal.found) == ("bmc_answer_malformed", reason)


@pytest.mark.parametrize(
    "link",
    ["https://elsewhere.example/redfish/v1/x/../../..", "/etc", "/redfish/v1/a b", 7, "", "//["],
)
def test_links_stay_within_the_tree_of_this_bmc(bmc: standin.Bmc, link: object) -> None:
    with client(bmc) as session:
        if link == "https://elsewhere.example/redfish/v1/x/../../..":
            # Only the path of a link counts, so no request goes to another machine.
            assert session.path(link) == "/redfish/v1/x/../../.."
        else:
            assert refused(lambda: session.path(link)).code == "bmc_answer_malformed"


def test_a_missing_document_has_its_own_code(bmc: standin.Bmc) -> None:
    assert get(bmc, f"{SYSTEM}/Nothing").code == "bmc_answer_missing"


@pytest.mark.covers("P15")
def test_without_a_ca_an_unknown_certificate_is_refused_before_anything_is_sent(
    bmc: standin.Bmc,
) -> None:
    refusal = get(bmc, trust=Trust())
    assert (refusal.code, refusal.found) == ("tls_untrusted", "self-signed certificate")
    assert bmc.record()["requests"] == []


@pytest.mark.covers("P15")
def test_another_ca_and_another_name_are_refused(bmc: standin.Bmc, tmp_path: Path) -> None:
    other, _ = standin.authority(tmp_path, "other", "IP:127.0.0.1")
    assert get(bmc, trust=Trust(ca_file=str(other))).code == "tls_untrusted"
    account = _redfish_session.Account("root", standin.PASSWORD)
    named = _redfish_session.Client(f"localhost:{bmc.port}", account, Trust(ca_file=bmc.ca_file))
    refusal = refused(lambda: named.get(SYSTEM))
    assert refusal.code == "tls_untrusted"
    assert "ostname mismatch" in refusal.found
    assert bmc.record()["requests"] == []


def test_a_pinned_certificate_needs_no_ca(bmc: standin.Bmc) -> None:
    colons = ":".join(bmc.fingerprint[i : i + 2] for i in range(0, 64, 2)).upper()
    with client(bmc, Trust(fingerprint=colons)) as session:
        session.get(SYSTEM)


@pytest.mark.covers("P15")
def test_another_certificate_than_the_pinned_one_gets_no_password(bmc: standin.Bmc) -> None:
    refusal = get(bmc, trust=Trust(fingerprint="0" * 64))
    assert refusal.code == "tls_untrusted"
    assert bmc.fingerprint in refusal.found
    assert bmc.record()["requests"] == []


@pytest.mark.parametrize(
    "trust",
    [
        Trust(fingerprint="12:34"),
        Trust(ca_file="/nonexistent/ca.pem"),
        Trust(ca_file="/dev/null"),
        Trust(ca_file="/etc/hostname", fingerprint="0" * 64),
    ],
)
def test_trust_that_cannot_be_used_is_refused(bmc: standin.Bmc, trust: Trust) -> None:
    assert get(bmc, trust=trust).code == "trust_invalid"


def test_nobody_listening() -> None:
    nowhere = _redfish_session.Client(
        "127.0.0.1:9", _redfish_session.Account("root", "x"), Trust(), timeout=2
    )
    assert refused(lambda: nowhere.get(SYSTEM)).code == "bmc_unreachable"


@pytest.mark.parametrize(
    "address", ["https://10.0.0.1", "root@10.0.0.1", "10.0.0.1/redfish", "", "a:b:c", "a b", "h:x"]
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert refused(lambda: _redfish_connection.place(address)).code == "bmc_address_invalid"


def test_addresses_of_ipv6() -> None:
    assert _redfish_connection.place("[fd00::1]:8443") == _redfish_connection.Place("fd00::1", 8443)
    assert _redfish_connection.place("[fd00::1]").shown == "[fd00::1]"
    assert _redfish_connection.place("idrac-j22u05").port == 443


def test_message_ids_are_ids_only() -> None:
    infos = [{"MessageId": "IDRAC.2.14.SYS011"}, {"MessageId": f"x {standin.PASSWORD}"}, 3, {}]
    assert _redfish_session.message_ids({"error": {"@Message.ExtendedInfo": infos}}) == [
        "IDRAC.2.14.SYS011"
    ]
    assert _redfish_session.message_ids({"error": {"@Message.ExtendedInfo": 7}}) == []
    assert _redfish_session.message_ids({"error": "text"}) == []
