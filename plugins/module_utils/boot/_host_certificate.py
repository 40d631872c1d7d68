"""SSH host certificate of this machine and its renewal.

sshd's settings name the file since the enrolment. Only a new enrolment can replace an expired
certificate, because an expired certificate allows no login. For the same reason a renewal neither
shortens the validity nor changes the CA, which is the one that clients know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _ssh_certificate
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _sshd,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
FILE = "/etc/ssh/ssh_host_ed25519_key-cert.pub"


@dataclass(frozen=True)
class State:
    """key, installed: texts of the two files, None when missing. served: certificates that sshd's
    settings name. pending: whether sshd has not taken the certificate yet.
    """

    key: str | None
    installed: str | None
    served: tuple[str, ...]
    pending: bool


def observe(_params: _change.Params) -> State:
    shown = _command.run(["sshd", "-T"]).out.splitlines()
    served = tuple(
        line.split(None, 1)[1] for line in shown if line.lower().startswith("hostcertificate ")
    )
    return State(_host.read(KEY), _host.read(FILE), served, _sshd.pending(FILE))


def plan(params: _change.Params, state: State) -> _change.Plan:
    certificate = params["certificate"].strip()
    blockers = tuple(_blockers(certificate, params["node_id"], state))
    if blockers:
        return _change.Plan(blockers=blockers)
    if _words(state.installed) == _words(certificate) and not state.pending:
        return _change.Plan()
    step = _change.Step("install_certificate", FILE, _words(state.installed), _words(certificate))
    return _change.Plan((step,))


def apply(params: _change.Params, _step: _change.Step) -> None:
    _sshd.install(
        *(FILE, params["certificate"].strip() + "\n", "certificate_not_taken"),
        expected="sshd to take its new certificate",
        remedy="the earlier certificate is back in its place; repair sshd, then renew again",
    )


def facts(_params: _change.Params, state: State) -> dict[str, Any]:
    try:
        now, until = _dated(state.installed or "")
    except ValueError:
        # No valid certificate is installed; the plan is about to replace the file.
        return {"certificate": {}}
    return {
        "certificate": {
            "serial": str(now.serial),
            "principals": list(now.principals),
            "valid_until": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
    }


SUBJECT = _change.Subject(observe, plan, apply, facts)


def _blockers(text: str, node_id: str, state: State) -> Iterator[Refusal]:
    try:
        certificate, until = _dated(text)
    except ValueError as error:
        yield Refusal(
            "certificate_unreadable",
            expected="a host certificate with an end, one line of type and base64",
            found=str(error)[:200],
            remedy="pass the certificate as the reconciler signed it",
        )
        return
    if certificate.key != _key(state):
        yield Refusal(
            "certificate_of_another_key",
            expected=f"a certificate for the key in {KEY}",
            found="one for another key" if state.key else "no such key on this host",
            remedy="enrol the host again: only that tells the reconciler of a new key",
        )
    if node_id not in certificate.principals:
        yield Refusal(
            "certificate_of_another_node",
            expected=f"a certificate for {node_id}",
            found=f"one for {', '.join(certificate.principals) or 'everybody'}",
            remedy="ask the reconciler for the renewal: it certifies the name that it dials",
        )
    yield from _setbacks(certificate, until, state)
    if FILE not in state.served:
        yield Refusal(
            "certificate_not_served",
            expected=f"HostCertificate {FILE} in the settings of sshd",
            found=", ".join(state.served) or "no HostCertificate",
            remedy="enrol the host: its script writes /etc/ssh/sshd_config.d/60-gpuaas.conf",
        )


def _setbacks(
    certificate: _ssh_certificate.Certificate, until: datetime, state: State
) -> Iterator[Refusal]:
    """Refusals of a certificate with which clients would refuse this host earlier than now."""
    try:
        present, present_until = _dated(state.installed or "")
    except ValueError:
        return
    if until < present_until:
        # The host's clock may be wrong, so the certificate is not compared with it.
        yield Refusal(
            "certificate_older",
            expected=f"a certificate that is valid until {present_until} or longer",
            found=f"one until {until}",
            remedy="ask the reconciler for a new certificate: an earlier run's variables have an"
            " old one; to replace one that was made by hand, enrol the host again",
        )
    if certificate.authority != present.authority:
        yield Refusal(
            "certificate_of_another_authority",
            expected="a certificate of the CA that signed the present one",
            found="one of another CA",
            remedy="if the site's CA is another now, enrol the host again",
        )


def _dated(text: str) -> tuple[_ssh_certificate.Certificate, datetime]:
    """The certificate and its end. ValueError unless it is a host certificate that ends."""
    certificate = _ssh_certificate.parse(text)
    try:
        return certificate, datetime.fromtimestamp(certificate.valid_before, timezone.utc)
    except (ValueError, OverflowError, OSError) as beyond:
        # `ssh-keygen -V always:forever` writes the highest number there is.
        raise ValueError(f"an end at {certificate.valid_before}, which is no date") from beyond


def _key(state: State) -> tuple[bytes, ...] | None:
    try:
        return _ssh_certificate.key_parts(state.key or "")
    except ValueError:
        return None


def _words(text: str | None) -> str:
    """The certificate without its comment."""
    return " ".join((text or "").split()[:2])
