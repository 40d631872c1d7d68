"""Download of a file or image onto the host: http, https or a local file, plain or zstd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

# No byte for this long means a dead source; a lower value fails on busy links.
_SILENCE_S = 60
# A source may send a byte now and then for ever.
_TOTAL_S = 7200
_UNPACK_S = 3600
_BLOCK = 1 << 20
_REDIRECTS = 5
_OK, _MOVED = 200, (301, 302, 303, 307, 308)


def fetch(url: str, target: str, *, compression: str, size_bytes: int) -> None:
    """Write the unpacked content of `url` to `target`, a sparse file.

    size_bytes: of the unpacked image. A larger source is refused (`image_too_large`) before the
    excess bytes are written; the caller removes the partial file.
    """
    limit = packed_limit(size_bytes) if compression == "zstd" else size_bytes
    place = _host.path(target)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    packed = place.with_suffix(".zst") if compression == "zstd" else place
    try:
        with packed.open("wb") as sink, _ending(url):
            left = limit
            for block in _blocks(url):
                left -= len(block)
                if left < 0:
                    raise _too_large(url, limit)
                _write_sparse(sink, block)
            sink.truncate()
        if packed is not place:
            place.unlink(missing_ok=True)
            _unpack(packed, place, url, size_bytes)
    finally:
        if packed is not place:
            packed.unlink(missing_ok=True)


@contextlib.contextmanager
def _ending(url: str) -> Iterator[None]:
    """Refuse the source after `_TOTAL_S`, whether it is silent in its name, TLS or content."""

    def late(*_: object) -> None:
        raise _unreachable(url, f"no end within {_TOTAL_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _TOTAL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def packed_limit(size_bytes: int) -> int:
    """Largest zstd output for `size_bytes` of incompressible data, with a margin."""
    return size_bytes + size_bytes // 128 + _BLOCK


def _unpack(packed: Path, place: Path, url: str, size_bytes: int) -> None:
    # A few packed bytes can expand to more than any disk holds, so the kernel stops zstd at the
    # size.
    limited = ["prlimit", f"--fsize={size_bytes}", "--core=0", "--"]
    unpack = ["zstd", "-d", "-q", "--sparse", "-o", str(place), "--", str(packed)]
    done = _command.run([*limited, *unpack], ok=(0, -signal.SIGXFSZ), timeout=_UNPACK_S)
    if done.rc != 0:
        raise _too_large(url, size_bytes)


def _write_sparse(sink: IO[bytes], block: bytes) -> None:
    if any(block[:4096]) or block.count(0) != len(block):
        sink.write(block)
    else:
        sink.seek(len(block), os.SEEK_CUR)


def _blocks(url: str) -> Iterator[bytes]:
    # With TLS and the parsers of mail it takes longer to load than all else, and a host that has
    # the image does not need it.
    import http.client as http  # noqa: PLC0415

    kinds = {"http": http.HTTPConnection, "https": http.HTTPSConnection}
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "file"):
            raise _unreachable(url, f"the scheme {parts.scheme!r}")
        if parts.scheme == "file":
            with _host.path(unquote(parts.path)).open("rb") as source:
                yield from _read(source)
        else:
            yield from _http_blocks(url, kinds)
    except OSError as failed:
        raise _unreachable(url, f"{type(failed).__name__}: {failed}") from failed
    except (ValueError, http.HTTPException) as failed:
        # The text may quote an invalid URL whole, with a login and a query.
        reason = f"an invalid URL, redirect or answer: {type(failed).__name__}"
        raise _unreachable(url, reason) from failed


def _http_blocks(url: str, kinds: Mapping[str, type[HTTPConnection]]) -> Iterator[bytes]:
    for _hop in range(_REDIRECTS):
        parts = urlsplit(url)
        connection = kinds[parts.scheme](parts.hostname or "", parts.port, timeout=_SILENCE_S)
        try:
            target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
            connection.request("GET", target, headers={"User-Agent": "gpuaas-slice"})
            with contextlib.closing(connection.getresponse()) as answer:
                if answer.status in _MOVED:
                    url = urljoin(url, answer.getheader("Location") or "")
                    if urlsplit(url).scheme not in ("https", parts.scheme):
                        raise _unreachable(url, f"a redirect from {parts.scheme} to this address")
                    continue
                if answer.status != _OK:
                    raise _unreachable(url, f"HTTP status {answer.status}")
                yield from _read(answer)
                if answer.length:
                    # http.client takes a connection that was lost for the end of the content.
                    raise _unreachable(url, f"an end {answer.length} bytes too early")
                return
        finally:
            connection.close()
    raise _unreachable(url, f"more than {_REDIRECTS} redirects")


def _read(source: IO[bytes] | HTTPResponse) -> Iterator[bytes]:
    while block := source.read(_BLOCK):
        yield block


def shown(url: str) -> str:
    """The URL without login and query, which may be secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid URL"
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


def _too_large(url: str, limit: int) -> Refusal:
    return Refusal(
        "image_too_large",
        expected=f"at most {limit} bytes from {shown(url)}",
        found="more; the rest was not taken",
        remedy="correct the size in the image catalogue, or the source",
    )


def _unreachable(url: str, found: str) -> Refusal:
    return Refusal(
        "image_unreachable",
        expected=f"the image at {shown(url)}",
        found=found,
        remedy="check the source in the image catalogue and the host's way to it",
    )


def free_bytes(target: str) -> int:
    """Free space on the filesystem of `target`."""
    folder = _host.path(target).parent
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
