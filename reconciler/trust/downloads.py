"""Links with which a host may fetch one image, and the files behind them."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from reconciler.model.errors import Problem, not_found
from reconciler.settings import Settings
from reconciler.trust.ca import Trust, derived_key, open_trust


def url(settings: Settings, image: Mapping[str, Any]) -> str:
    """Where a host fetches the image: here for files of ours, otherwise where it was registered.

    The same for the same image every time and on every machine of the site, since a run's variables
    may not change. So the link does not expire; it opens this one digest.
    """
    if urlsplit(image["url"]).scheme != "file":
        return str(image["url"])
    digest = image["digest"].removeprefix("sha256:")
    base = f"{settings.api_url}/api/v1/images/{digest}/content"
    return f"{base}?token={_token(settings, image['digest'])}"


def allowed(settings: Settings, digest: str, token: str) -> bool:
    """Whether the token opens the image of this digest."""
    return hmac.compare_digest(_token(settings, digest).encode(), token.encode())


def file_of(url: str, digest: str) -> Path:
    """The registered file; Problem image_file_missing unless it is still a plain file."""
    path = local(url)
    if path is None or not _is_file(path):
        raise not_found("image_file", digest)
    return path


def local(text: str) -> Path | None:
    """The path of a file URL; None for other URLs."""
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    return Path(unquote(parts.path))


def refuse(text: str, size: int | None) -> None:
    """Raise unless the URL can be served: a plain file of the right size, or an http URL."""
    try:
        path = local(text)
    except ValueError as error:
        raise _invalid("a URL that can be taken apart", f"{text}: {error}") from error
    if path is None:
        return
    if not path.is_absolute() or urlsplit(text).netloc or not _is_file(path):
        raise _invalid("a file URL of a plain file that the reconciler can read", text)
    found = path.stat().st_size
    if size is not None and found != size:
        raise _invalid(f"a file of {size} bytes", f"{text} with {found} bytes")


def _is_file(path: Path) -> bool:
    # Not through a link: what was registered is what is sent.
    return path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)


def _token(settings: Settings, digest: str) -> str:
    trust = Trust(settings.state_dir.resolve() / "trust")
    if not trust.user_authority.exists():
        trust = open_trust(settings.state_dir)
    # Of the site, not of this machine: a worker makes the link, any machine's API is asked.
    key = derived_key(trust, "image links")
    return hmac.new(key, f"image {digest}".encode(), hashlib.sha256).hexdigest()


def _invalid(expected: str, found: str) -> Problem:
    return Problem(
        "image_file_invalid",
        422,
        expected=expected,
        found=found,
        remedy="correct the URL or the size; nothing was registered",
    )
