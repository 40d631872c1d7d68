"""A catalogue entry as the run contract wants it."""

from __future__ import annotations

from typing import Any

from reconciler.api.images import download_url
from reconciler.settings import Settings


def document(settings: Settings, image: dict[str, Any]) -> dict[str, Any]:
    """name, version, digest and size of the raw image, and where the host may fetch it."""
    return {
        "name": image["name"],
        "version": image["version"],
        "digest": image["digest"],
        "size_bytes": image["size_bytes"],
        "url": download_url(settings, image),
        "compression": image["compression"],
    }
