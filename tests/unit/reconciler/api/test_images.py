"""The catalogue, and download links that open one image each."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from reconciler.settings import Settings
from reconciler.trust.downloads import url as download_url
from tests.unit.reconciler.api.stack import IMAGE, Stack

CONTENT = b"raw image" * 1000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "an image.raw"
    path.write_bytes(CONTENT)
    return path


def registration(file: Path, **changes: Any) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    return {**IMAGE, "digest": digest, "size_bytes": len(CONTENT), "url": file.as_uri(), **changes}


def test_a_host_fetches_with_its_link(new: Stack, file: Path) -> None:
    image = new.client("admin").post("admin/images", json=registration(file)).json()
    link = download_url(new.settings, image)
    assert link == download_url(new.settings, image), "a run's variables may not change"
    assert link.startswith("http://198.51.100.1:8080/api/v1/images/")
    answer = new.client().get(link)
    assert (answer.status_code, answer.content) == (200, CONTENT)


def test_a_link_opens_nothing_else(new: Stack, file: Path) -> None:
    admin = new.client("admin")
    image = admin.post("admin/images", json=registration(file)).json()
    other = admin.post("admin/images", json=IMAGE | {"name": "other"}).json()
    token = download_url(new.settings, image).partition("token=")[2]
    for digest, given in (
        (image["digest"], ""),
        (image["digest"], token[:-1] + "g"),
        (image["digest"], "\N{SNOWMAN}"),
        (other["digest"], token),
        ("sha256:unknown", token),
    ):
        answer = new.client().get(f"images/{digest}/content", params={"token": given})
        assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    assert download_url(new.settings, other) == IMAGE["url"]


def test_what_was_registered_is_what_is_sent(new: Stack, file: Path, tmp_path: Path) -> None:
    image = new.client("admin").post("admin/images", json=registration(file)).json()
    file.unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    link = download_url(new.settings, image)
    for _ in ("missing", "a link"):
        answer = new.client().get(link)
        assert (answer.status_code, answer.json()["code"]) == (404, "image_file_not_found")
        file.unlink(missing_ok=True)
        file.symlink_to(secret)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"size_bytes": 1}, "image_file_invalid"),
        ({"url": "file:///nowhere.raw"}, "image_file_invalid"),
        ({"url": "file:///dev/zero"}, "image_file_invalid"),
        ({"url": "file://host/image.raw"}, "request_invalid"),
        ({"url": "http://[1/image.raw"}, "image_file_invalid"),
        ({"url": "ftp://images.example/x"}, "request_invalid"),
        ({"digest": "md5:0"}, "digest_invalid"),
        ({"compression": "gzip"}, "request_invalid"),
        ({"minimum_disk_bytes": 1 << 30}, "field_without_effect"),
    ],
)
def test_bad_images(new: Stack, file: Path, change: dict[str, Any], code: str) -> None:
    admin = new.client("admin")
    assert admin.post("admin/images", json=registration(file, **change)).json()["code"] == code
    assert admin.get("admin/images").json()["items"] == []


def test_a_compressed_file_has_its_own_size(new: Stack, file: Path) -> None:
    body = registration(file, compression="zstd", size_bytes=1 << 30)
    assert new.client("admin").post("admin/images", json=body).status_code == 201


def test_every_machine_of_a_site_makes_the_same_link(
    new: Stack, file: Path, tmp_path: Path
) -> None:
    """A worker makes it, the API of another machine is asked."""
    image = new.client("admin").post("admin/images", json=registration(file)).json()
    there = tmp_path / "there"
    (there / "trust").mkdir(parents=True)
    strange = download_url(Settings(state_dir=there, public_url=new.settings.public_url), image)
    assert new.client().get(strange).status_code == 401
    # What docs/operations.md says: the site's authorities are copied to each machine.
    for key in (new.settings.state_dir / "trust").iterdir():
        shutil.copy2(key, there / "trust" / key.name)
    theirs = download_url(Settings(state_dir=there, public_url=new.settings.public_url), image)
    assert new.client().get(theirs).content == CONTENT


def test_a_member_sees_what_a_launch_can_name_and_not_where_it_comes_from(
    new: Stack, file: Path
) -> None:
    made = new.client("admin").post("admin/images", json=registration(file)).json()
    found = new.client("member").get("images").json()
    assert found == new.client("admin").get("images").json()
    told = ("id", "name", "version", "digest", "size_bytes", "minimum_disk_bytes", "created_at")
    assert found == {"items": [{name: made[name] for name in told}], "next": None}
