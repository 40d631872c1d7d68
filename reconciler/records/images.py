"""Image catalogue. Its digests are the authority for the bytes of an image."""

from __future__ import annotations

import re

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Image, images
from reconciler.model.act import Act
from reconciler.model.errors import Problem

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
) -> Image:
    """Add an image. The bytes of a version never change: another digest needs another version."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise Problem(
            "digest_invalid",
            422,
            expected="sha256: and 64 lowercase hexadecimal digits",
            found=repr(digest),
            remedy="give the SHA-256 of the raw image",
        )
    same = sa.select(images).where(images.c.name == name, images.c.version == version)
    existing = rows.first(conn, same, Image)
    if existing is not None and existing.digest == digest:
        return existing
    if existing is not None:
        raise Problem(
            "image_exists",
            409,
            expected=f"{name} {version} with digest {existing.digest}",
            found=digest,
            remedy="register the new bytes under a new version",
        )
    record = rows.add(
        conn,
        Image,
        {
            "id": rows.new_id(),
            "name": name,
            "version": version,
            "digest": digest,
            "size_bytes": size_bytes,
            "minimum_disk_bytes": size_bytes,
            "url": url,
            "url_digest": url_digest,
            "compression": compression,
            "guest_profile": guest_profile,
        },
    )
    journal.audit(conn, act, "admin.image.registered", "image", record.id, detail={"name": name})
    return record


def get(conn: sa.Connection, id: str) -> Image:
    """The image with an id."""
    return rows.get(conn, Image, id)


def every(conn: sa.Connection, page: Page | None = None) -> list[Image]:
    """Images in the order of name and version."""
    return rows.every(conn, part(sa.select(images), ORDER, page), Image)
