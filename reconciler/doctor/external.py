"""Checks of external services: the OpenID provider and AWX."""

from __future__ import annotations

from collections.abc import Iterator

from reconciler.api.security import provider
from reconciler.doctor.finding import Finding, ok, refused, warn
from reconciler.runs import contract
from reconciler.runs.awx import request
from reconciler.runs.awx.client import Client, awx_access
from reconciler.runs.spec import RunError
from reconciler.settings import Settings
from reconciler.trust import oidc


def identity_provider(settings: Settings) -> Iterator[Finding]:
    """The OpenID provider publishes usable keys under the configured issuer."""
    if not settings.oidc_issuer:
        return
    try:
        keys = oidc.Verifier(provider(settings)).read()
    except oidc.UNREADABLE as failure:
        text = " ".join(str(failure).split())[:200]
        yield warn(
            "identity_provider",
            f"{settings.oidc_issuer}: {text or type(failure).__name__}",
            expected="a provider that publishes its keys under this issuer",
            remedy="correct GPUAAS_OIDC_ISSUER, or GPUAAS_OIDC_CA_FILE for a private CA;"
            " until then only tokens of `gpuaas token create` are accepted",
        )
        return
    if keys:
        yield ok("identity_provider", f"{settings.oidc_issuer}: {len(keys)} keys")
        return
    yield warn(
        "identity_provider",
        f"{settings.oidc_issuer} publishes no usable key",
        expected="a key for signatures with RSA, EC or Ed25519",
        remedy="configure such a key for the client at the provider",
    )


def awx(settings: Settings) -> Iterator[Finding]:
    """AWX answers and has a job template for each playbook."""
    if settings.launcher != "awx":
        return
    access = awx_access(settings)
    wrong: dict[str, RunError] = {}
    try:
        with Client(access) as client:
            for playbook in contract.PLAYBOOKS:
                try:
                    request.find_template(client, access, playbook)
                except RunError as refusal:
                    if not refusal.code.startswith("awx_template_"):
                        raise
                    wrong[playbook] = refusal
    except RunError as away:
        yield refused("awx", away, f"{away.code}: {away.found}")
        return
    for playbook, problem in wrong.items():
        yield refused("awx", problem, f"{playbook}: {problem.found}")
    if not wrong:
        yield ok("awx", f"{access.url}: {len(contract.PLAYBOOKS)} job templates as required")
