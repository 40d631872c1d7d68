"""The services that this one leans on: the provider of identities, and AWX."""

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


def identities(settings: Settings) -> Iterator[Finding]:
    """Whether the provider answers with keys, now and by its own name."""
    if not settings.oidc_issuer:
        return
    try:
        keys = oidc.Verifier(provider(settings)).read()
    except oidc.UNREADABLE as failure:
        said = " ".join(str(failure).split())[:200]
        yield warn(
            "identity_provider",
            f"{settings.oidc_issuer}: {said or type(failure).__name__}",
            expected="a provider that publishes its keys under that very name",
            remedy="correct GPUAAS_OIDC_ISSUER, or GPUAAS_OIDC_CA_FILE for a CA of your own;"
            " until then none of its tokens counts, and those of `gpuaas token create` do",
        )
        return
    if keys:
        yield ok("identity_provider", f"{settings.oidc_issuer}: {len(keys)} keys")
        return
    yield warn(
        "identity_provider",
        f"{settings.oidc_issuer} publishes no key that counts",
        expected="a key for signatures with RSA, EC or Ed25519",
        remedy="give the provider's client such a key",
    )


def awx(settings: Settings) -> Iterator[Finding]:
    """Whether AWX answers us and has a job template for each playbook."""
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
    for playbook, one in wrong.items():
        yield refused("awx", one, f"{playbook}: {one.found}")
    if not wrong:
        yield ok("awx", f"{access.url}: {len(contract.PLAYBOOKS)} job templates as they must be")
