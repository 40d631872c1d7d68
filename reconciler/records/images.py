"""Image catalogue. Its digests are the authority for the bytes of an image."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Image, images, settings
from reconciler.model.act import Act
from reconciler.model.errors import Problem

# Name of the stored setting with the key of image links.
LINK_KEY = "image_link_key"
ORDER = Order(images, ("name", "version"))


def register(
    conn: sa.Connection,
    act: Act,
    *,
    name: str,
    version: str,
    digest: str,
    size_bytes: int,
    url: str,
    guest_profile: str = "",
    compression: str = "none",
    url_digest: str = "",
    runtime: Sequence[str] = (),
) -> Image:
    """Add an image. The bytes of a version never change: another digest needs another version.

    runtime: drivers and tools in the image by which guests compute, such as driver-570-server.
    """
    require_digest(digest)
    same = sa.select(images).where(images.c.name == name, images.c.version == version)
    values = {
        "digest": digest,
        "size_bytes": size_bytes,
        "url": url,
        "url_digest": url_digest,
        "compression": compression,
        "guest_profile": guest_profile,
        "runtime": sorted(set(runtime)),
    }
    existing = rows.first(conn, same, Image)
    if existing is not None:
        others = [field for field, value in values.items() if getattr(existing, field) != value]
        if not others:
            return existing
        raise Problem(
            "image_exists",
            expected=f"{name} {version} as it is registered, with digest {existing.digest}",
            found=f"another {', '.join(others)}",
            remedy="register it under a new version",
        )
    values |= {"name": name, "version": version, "minimum_disk_bytes": size_bytes}
    record = rows.add(conn, Image, {"id": rows.new_id(), **values})
    journal.audit(conn, act, "admin.image.registered", "image", record.id, detail={"name": name})
    return record


def require_digest(digest: str) -> None:
    """Problem `digest_invalid` for a text that is no SHA-256."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise Problem(
            "digest_invalid",
            422,
            expected="sha256: and 64 lowercase hexadecimal digits",
            found=repr(digest),
            remedy="give the SHA-256 of the raw image",
        )


def link_key(conn: sa.Connection) -> bytes:
    """Key that signs the links of images, the same for every machine of the site.

    It opens image files and nothing else, so it is stored in the database, in no audit entry.
    """
    query = sa.select(settings.c.value).where(settings.c.name == LINK_KEY)
    value = conn.execute(query).scalar_one_or_none()
    if value is None:
        row = {"name": LINK_KEY, "value": secrets.token_hex(32), "changed_at": clock.now()}
        # Two workers can make the first link at the same time; the first key counts.
        insert = rows.conflict_insert(conn.dialect.name, settings)
        conn.execute(insert.values(**row).on_conflict_do_nothing())
        value = conn.execute(query).scalar_one()
    return bytes.fromhex(value)


def get(conn: sa.Connection, id: str) -> Image:
    """The image with an id."""
    return rows.get(conn, Image, id)


def every(conn: sa.Connection, page: Page | None = None) -> list[Image]:
    """Images in the order of name and version."""
    return rows.every(conn, part(sa.select(images), ORDER, page), Image)
