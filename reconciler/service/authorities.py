"""Check that this machine has the SSH authorities of the site.

All machines of a site share a pair of authorities. With other keys a service could not reach any
host of the site, and would enrol hosts that the other machines cannot reach.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection, Engine

from reconciler.db import settings as site
from reconciler.db.engine import reading, retrying
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.settings import Settings
from reconciler.trust.ca import authorities, open_trust

NAME = "ssh_authorities"


def adopt(settings: Settings, engine: Engine) -> None:
    """Create the site's authorities at its first start, or raise a Problem if they differ here."""
    with reading(engine) as conn:
        recorded = site.read(conn, NAME)
    if recorded is not None and not (settings.state_dir / "trust" / "host_ca").exists():
        raise _differ(settings, "no keys")
    local = authorities(open_trust(settings.state_dir))
    if recorded is None:
        recorded = retrying(engine, partial(_record, local))
    if recorded != local:
        raise _differ(settings, "other keys")


def _record(local: dict[str, str], conn: Connection) -> dict[str, str]:
    # Another machine may have recorded its authorities first.
    recorded: dict[str, str] | None = site.read(conn, NAME)
    if recorded is None:
        site.write(conn, NAME, local, Act("service", "the site's first start"))
    return recorded or local


def _differ(settings: Settings, found: str) -> Problem:
    return Problem(
        "authorities_differ",
        expected=f"the site's SSH authorities in {settings.state_dir / 'trust'}",
        found=found,
        remedy="copy host_ca*, user_ca* and operator* from a machine of the site, with their modes,"
        " or restore them from a backup",
    )
