"""The site has one pair of SSH authorities, and every machine of it has the same.

A service with keys of its own would enrol hosts that no other can reach, and reach none itself.
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
    """Make the site's authorities, or see that this machine has them: Problem otherwise."""
    with reading(engine) as conn:
        known = site.read(conn, NAME)
    if known is not None and not (settings.state_dir / "trust" / "host_ca").exists():
        raise _others(settings, "none")
    own = authorities(open_trust(settings.state_dir))
    if known is None:
        known = retrying(engine, partial(_remember, own))
    if known != own:
        raise _others(settings, "others")


def _remember(own: dict[str, str], conn: Connection) -> dict[str, str]:
    # Another machine may have been quicker.
    known: dict[str, str] | None = site.read(conn, NAME)
    if known is None:
        site.write(conn, NAME, own, Act("service", "the site's first start"))
    return known or own


def _others(settings: Settings, found: str) -> Problem:
    return Problem(
        "authorities_differ",
        expected=f"the site's SSH authorities in {settings.state_dir / 'trust'}",
        found=found,
        remedy="copy host_ca*, user_ca* and operator* from a machine of the site, with their modes,"
        " or restore them from a backup",
    )
