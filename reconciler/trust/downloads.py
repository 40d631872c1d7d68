"""Links with which a host may fetch an image, and the files behind them."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import threading
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from reconciler.model.errors import Problem
from reconciler.settings import Settings

# A host downloads at the start of its run; with AWX the run may wait before it starts.
LINK_S = 86_400
_ZSTD = b"\x28\xb5\x2f\xfd"
# Hashing a large image takes minutes and a thread of the API's 40.
_hashing = threading.BoundedSemaphore(2)


def url(settings: Settings, image: Mapping[str, Any], key: bytes, begun_at: float) -> str:
    """Where a host fetches the image: here for files of ours, otherwise where it was registered.

    begun_at: the start of the task's attempt. The link is the same for the whole attempt, because
    the variables of a run may not change.
    """
    if urlsplit(image["url"]).scheme != "file":
        return str(image["url"])
    digest, expires_at = image["digest"], int(begun_at) + LINK_S
    base = f"{settings.api_url}/api/v1/images/{digest.removeprefix('sha256:')}/content"
    name = f"{image['id']}.{expires_at}"
    return f"{base}?token={name}.{_mac(key, digest, name)}"


def image_of(key: bytes, digest: str, token: str, now: float) -> str | None:
    """Id of the image that the token of a link opens; None unless it is valid for this digest."""
    name, _, mac = token.rpartition(".")
    if not hmac.compare_digest(_mac(key, digest, name).encode(), mac.encode()):
        return None
    image_id, _, expires_at = name.rpartition(".")
    return image_id if now < int(expires_at) else None


def local(text: str) -> Path | None:
    """The path of a file URL; None for other URLs."""
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    return Path(unquote(parts.path))


def open_file(folder: Path, text: str) -> BufferedReader | None:
    """The plain file of a file URL below the folder, opened for reading; None for any other.

    No link is followed below the folder, neither of the file nor of a folder, so nothing outside is
    ever looked at.
    """
    path = local(text)
    for base in (folder, folder.resolve()):
        if path is not None and path.is_relative_to(base) and ".." not in path.parts:
            break
    else:
        return None
    *folders, name = path.relative_to(base).parts or (".",)
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in folders:
            parent = descriptor
            try:
                descriptor = os.open(part, os.O_PATH | os.O_DIRECTORY | flags, dir_fd=parent)
            finally:
                os.close(parent)
        try:
            # Without O_NONBLOCK the opening of a named pipe would wait for a writer.
            file = os.open(
                name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags, dir_fd=descriptor
            )
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        return None
    return os.fdopen(file, "rb")


def check_source(
    folder: Path, text: str, *, digest: str, size_bytes: int, compression: str, url_digest: str
) -> str:
    """Digest of a compressed file, or url_digest for other sources. Problem `image_file_invalid`
    unless a file URL names a file with the content that the other values describe.

    A file outside of the folder is refused like a file that does not exist.
    """
    try:
        path = local(text)
    except ValueError as error:
        raise _invalid("a URL that can be taken apart", f"{text}: {error}") from error
    if path is None:
        return url_digest
    file = None if urlsplit(text).netloc else open_file(folder, text)
    if file is None:
        expected = f"a file URL of a plain file in {folder} that the reconciler can read"
        raise _invalid(expected, text)
    raw = compression == "none"
    with file:
        size = os.fstat(file.fileno()).st_size
        valid = size == size_bytes if raw else file.read(len(_ZSTD)) == _ZSTD
        actual = _sha256(file) if valid else ""
    if not actual or actual != (digest if raw else url_digest or actual):
        expected = "the size and the SHA-256" if raw else "zstd, with the SHA-256 in url_digest"
        raise _invalid(f"the file to have the registered content ({expected})", f"{text}: another")
    return url_digest if raw else actual


def _sha256(file: BufferedReader) -> str:
    if not _hashing.acquire(blocking=False):
        raise Problem(
            "image_check_busy",
            503,
            expected="at most two registrations of image files at the same time",
            found="two others that are being read",
            remedy="try again when they have ended",
        )
    try:
        file.seek(0)
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    finally:
        _hashing.release()


def _mac(key: bytes, digest: str, name: str) -> str:
    return hmac.new(key, f"image {digest} {name}".encode(), hashlib.sha256).hexdigest()


def _invalid(expected: str, found: str) -> Problem:
    return Problem(
        "image_file_invalid",
        422,
        expected=expected,
        found=found,
        remedy="put the file into the folder of GPUAAS_IMAGES_DIR, or correct the URL, the size or"
        " the digest; nothing was registered",
    )
