"""Image cache: fetched once, verified by digest, and refused when the bytes differ."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _image_cache
from ansible_collections.gpuaas.slice.plugins.modules import image_cache, image_cache_info

pytestmark = pytest.mark.covers("SLICE-2")

MIB = 1 << 20
CONTENT = os.urandom(3 * MIB) + bytes(6 * MIB) + os.urandom(700)
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def cache(url: str = "", **other: Any) -> _change.Outcome:
    params = {
        "name": "slice",
        "digest": DIGEST,
        "size_bytes": len(CONTENT),
        "url": url,
        "compression": "none",
        "state": "present",
    } | other
    return _change.drive(image_cache.SUBJECT, params, check_mode=False)


def failure(outcome: _change.Outcome) -> str:
    return outcome.failure.code


@pytest.fixture
def source(tree: Path) -> str:
    (tree / "images").mkdir()
    (tree / "images/slice.raw").write_bytes(CONTENT)
    return "file:///images/slice.raw"


@pytest.fixture
def server(source: str, tree: Path) -> Iterator[str]:
    ended = threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *request: Any) -> None:
            super().__init__(*request, directory=str(tree / "images"))

        def do_GET(self) -> None:
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/slice.raw")
                self.end_headers()
            elif self.path == "/away":
                self.send_response(302)
                self.send_header("Location", "ftp://127.0.0.1/slice.raw")
                self.end_headers()
            elif self.path.startswith("/to?"):
                self.send_response(302)
                self.send_header("Location", unquote(self.path.partition("?")[2]))
                self.end_headers()
            elif self.path == "/cut":
                self.send_response(200)
                self.send_header("Content-Length", str(len(CONTENT)))
                self.end_headers()
                self.wfile.write(CONTENT[:MIB])
            elif self.path.startswith("/drip"):
                # A header without an end.
                with contextlib.suppress(OSError):
                    while not ended.wait(0.02):
                        self.wfile.write(b"x")
            else:
                super().do_GET()

        def log_message(self, *_message: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        ended.set()
        served.shutdown()
        thread.join()


def test_an_image_is_fetched_once_and_kept_with_its_index(source: str) -> None:
    outcome = cache(source)
    assert outcome.failure is None and outcome.facts["cached"]
    path = outcome.facts["path"]
    place = _host.path(path)
    assert place.read_bytes() == CONTENT
    assert place.stat().st_blocks * 512 < len(CONTENT) and place.stat().st_mode & 0o777 == 0o444
    index = _image_cache.verified(path)
    assert index.digest == DIGEST
    assert [bool(chunk) for chunk in index.chunks] == [True, False, True]
    assert not cache().changed


def test_a_file_that_was_touched_is_fetched_again(source: str) -> None:
    place = _host.path(cache(source).facts["path"])
    place.chmod(0o644)
    with place.open("r+b") as handle:
        handle.write(b"x")
    assert failure(cache()) == "image_source_missing"
    assert cache(source).changed and place.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"digest": "sha256:" + "0" * 64}, "image_digest_mismatch"),
        ({"size_bytes": len(CONTENT) + 1}, "image_digest_mismatch"),
        ({"size_bytes": len(CONTENT) - 1}, "image_too_large"),
        ({"size_bytes": 4096}, "image_too_large"),
    ],
)
def test_another_image_never_enters_the_cache(
    source: str, wrong: dict[str, Any], code: str
) -> None:
    outcome = cache(source, **wrong)
    assert failure(outcome) == code
    assert list(_host.path(_image_cache.DIRECTORY).iterdir()) == []


@pytest.mark.parametrize("digest", ["", "sha256:../../etc/shadow", "md5:" + "0" * 64])
def test_a_digest_that_is_none_names_no_file(tree: Path, digest: str) -> None:
    with pytest.raises(image_cache.Refusal, match="image_digest_invalid"):
        cache(digest=digest)


def test_over_http_with_a_redirect(server: str) -> None:
    assert cache(f"{server}/moved").facts["cached"]


def test_a_source_that_never_ends_is_left_in_time(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache._download, "_TOTAL_S", 0.3)
    outcome = cache(f"{server}/drip?token=secret")
    assert failure(outcome) == "image_unreachable"
    assert "no end within 0.3 s" in str(outcome.failure) and "secret" not in str(outcome.failure)
    assert list(_host.path(_image_cache.DIRECTORY).iterdir()) == []


def test_of_two_at_once_one_fetches_and_the_other_finds_it(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def fetch(_url: str, target: str, **_how: Any) -> None:
        fetched.append(target)
        # Long enough for the other process to start as well, if the lock let it.
        time.sleep(0.2)
        place = _host.path(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(CONTENT)

    monkeypatch.setattr(image_cache._download, "fetch", fetch)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(cache, [source, source]))
    assert [outcome.failure for outcome in outcomes] == [None, None]
    assert sorted(outcome.changed for outcome in outcomes) == [False, True]
    assert len(fetched) == 1 and all(outcome.facts["cached"] for outcome in outcomes)


def test_sources_that_give_nothing(server: str) -> None:
    assert failure(cache(f"{server}/none?token=secret")) == "image_unreachable"
    away = cache(f"{server}/away")
    assert "a redirect from http" in str(away.failure)
    outcome = cache("file:///images/none")
    assert failure(outcome) == "image_unreachable"
    assert failure(cache("ftp://example.org/x")) == "image_unreachable"
    assert "secret" not in str(cache(f"{server}/none?token=secret").failure)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_download_that_is_cut_off_is_not_the_fault_of_the_catalogue(
    server: str, compression: str
) -> None:
    """Its task is tried again, because the code is one of the transient errors."""
    outcome = cache(f"{server}/cut", compression=compression)
    assert failure(outcome) == "image_unreachable"
    assert f"{len(CONTENT) - MIB} bytes too early" in outcome.failure.found
    assert list(_host.path(_image_cache.DIRECTORY).iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1/a?t=secret",
        "http://127.0.0.1:port/?t=secret",
        "http://127.0.0.1/a b?t=secret",
        "http://127.0.0.1/\xe9?t=secret",
        "http://root:secret@\u2100/",
    ],
)
def test_an_invalid_url_is_refused_without_its_secrets(server: str, url: str) -> None:
    sources = [url]
    # Headers have no such character.
    if "\u2100" not in url:
        sources.append(f"{server}/to?{quote(url)}")
    for source in sources:
        outcome = cache(source)
        assert failure(outcome) == "image_unreachable"
        assert "an invalid URL" in outcome.failure.found
        assert "secret" not in str(outcome.failure)


def test_a_packed_image_is_unpacked(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = _host.path(_image_cache.path_of(DIGEST))
    draft = place.with_name(place.name + ".part")

    def zstd(argv: list[str], **_how: Any) -> _command.Result:
        assert "zstd" in argv and argv[-3] == str(draft)
        draft.write_bytes(Path(argv[-1]).read_bytes())
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", zstd)
    assert cache(source, compression="zstd").facts["cached"]
    assert [file.name for file in place.parent.glob("*.zst")] == []


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs the program zstd")
@pytest.mark.parametrize("size", [len(CONTENT), len(CONTENT) - 1, 4096])
def test_a_packed_image_unpacks_to_its_size_and_no_further(source: str, size: int) -> None:
    folder = _host.path("/images")
    subprocess.run(["zstd", "-q", str(folder / "slice.raw")], check=True)
    outcome = cache(f"{source}.zst", compression="zstd", size_bytes=size)
    if size == len(CONTENT):
        assert outcome.failure is None
        assert _host.path(outcome.facts["path"]).read_bytes() == CONTENT
    else:
        assert failure(outcome) == "image_too_large"
        assert list(_host.path(_image_cache.DIRECTORY).iterdir()) == []


def test_a_packed_source_without_an_end_is_left(source: str, tree: Path) -> None:
    (tree / "images/endless").symlink_to("/dev/zero")
    outcome = cache("file:///images/endless", compression="zstd", size_bytes=4096)
    assert failure(outcome) == "image_too_large"
    assert list(_host.path(_image_cache.DIRECTORY).iterdir()) == []


def test_no_room(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache._download, "free_bytes", lambda _target: 4096)
    assert failure(cache(source)) == "image_no_room"


def test_the_index_of_an_image_is_not_kept_before_its_bytes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power it would vouch for a file with holes, and every launch would fail."""
    synced, sync = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = _image_cache.path_of(DIGEST)
    draft = _host.path(f"{path}.part")
    draft.parent.mkdir(parents=True)
    draft.write_bytes(CONTENT)
    _image_cache.admit(f"{path}.part", path, DIGEST, len(CONTENT))
    index = _host.path(path.replace(".raw", ".index.json")).stat().st_ino
    assert synced.index(_host.path(path).stat().st_ino) < synced.index(index)


def test_an_image_is_forgotten(source: str) -> None:
    cache(source)
    # Left by a killed download.
    _host.path(f"{_image_cache.path_of(DIGEST)}.part").write_bytes(b"x")
    assert cache(state="absent").changed
    assert not cache(state="absent").changed
    assert list(_host.path(_image_cache.DIRECTORY).iterdir()) == []


@pytest.mark.covers("ECO-1")
def test_the_list_of_images_says_which_are_as_they_were_verified(source: str, tree: Path) -> None:
    assert image_cache_info.look({"digest": None})["images"] == []
    path = cache(source).facts["path"]
    folder = _host.path(path).parent
    other = "sha256:" + "0" * 64
    # An interrupted download, and a file that was never verified.
    (folder / f"{DIGEST[7:]}.raw.part").write_bytes(b"x")
    (folder / f"{other[7:]}.raw").write_bytes(b"xyz")
    answer = image_cache_info.look({"digest": None})
    assert answer["images"] == [
        {"digest": other, "path": str(Path(path).with_name(f"{other[7:]}.raw")), "size_bytes": 3,
         "verified": False},
        {"digest": DIGEST, "path": path, "size_bytes": len(CONTENT), "verified": True},
    ]  # fmt: skip
    assert answer["free_bytes"] > 0
    # The index of another image proves nothing.
    index = folder / f"{DIGEST[7:]}.index.json"
    kept = index.read_text()
    index.write_text(kept.replace(DIGEST, other))
    (image,) = image_cache_info.look({"digest": DIGEST})["images"]
    assert not image["verified"]
    index.write_text(kept)
    _host.path(path).chmod(0o644)
    (image,) = image_cache_info.look({"digest": DIGEST})["images"]
    assert not image["verified"]


@pytest.mark.covers("ECO-1")
def test_the_list_of_images_is_of_a_digest_or_refused(tree: Path) -> None:
    with pytest.raises(image_cache.Refusal, match="image_digest_invalid"):
        image_cache_info.look({"digest": "sha256:../../etc/shadow"})
    _host.path(_image_cache.DIRECTORY).parent.mkdir(parents=True)
    _host.path(_image_cache.DIRECTORY).write_text("")
    with pytest.raises(image_cache.Refusal, match="file_unreadable"):
        image_cache_info.look({"digest": None})
