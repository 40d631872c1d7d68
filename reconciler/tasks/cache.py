"""node.image_cache: an image is on the host before a tenant waits for it."""

from __future__ import annotations

from typing import Any

from reconciler.store import images
from reconciler.tasks.handler import Handler, Work
from reconciler.tasks.image import document


def variables(work: Work) -> dict[str, Any]:
    return {
        "slice_image": document(work.settings, images.get(work.conn, work.parameters["image_id"]))
    }


def succeed(_work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    return evidence


HANDLER = Handler("cache_image", variables, succeed)
