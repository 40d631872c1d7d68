"""The catalogue, and download links that open one image each."""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from starlette.testclient import TestClient

from reconciler.api.images import OpenFile
from reconciler.db.engine import transaction
from reconciler.records import images
from reconciler.settings import Settings
from reconciler.trust import downloads
from tests.unit.reconciler.api.stack import ACT, IMAGE, Stack

PROFILES = Path(__file__).resolve().parents[4] / "profiles"
CONTENT = b"raw image" * 1000
ZSTD = b"\x28\xb5\x2f\xfd" + CONTENT


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def file(new: Stack) -> Path:
    path = new.settings.images_dir / "an image.raw"
    path.write_bytes(CONTENT)
    return path


def registration(file: Path, **changes: Any) -> dict[str, Any]:
    digest = sha256(CONTENT)
    return {**IMAGE, "digest": digest, "size_bytes": len(CONTENT), "url": file.as_uri(), **changes}


def link_of(
    stack: Stack, image: dict[str, Any], begun_at: float = 0, settings: Settings | None = None
) -> str:
    """The link as a run gets it."""
    with transaction(stack.engine) as conn:
        key = images.link_key(conn)
    return downloads.url(settings or stack.settings, image, key, begun_at or time.time())


def test_a_host_fetches_with_its_link(new: Stack, file: Path) -> None:
    image = new.client("admin").post("admin/images", json=registration(file)).json()
    link = link_of(new, image, 1e10)
    assert link == link_of(new, image, 1e10), "a run's variables may not change"
    assert link.startswith("http://198.51.100.1:8080/api/v1/images/")
    opened = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        answer = new.client().get(link)
        assert (answer.status_code, answer.content) == (200, CONTENT)
    assert len(list(Path("/proc/self/fd").iterdir())) < opened + 5


def test_a_link_opens_nothing_else(new: Stack, file: Path) -> None:
    admin = new.client("admin")
    before = new.client().get(f"images/{sha256(CONTENT)}/content", params={"token": "x.9.x"})
    assert before.json()["code"] == "token_invalid", "no link was ever made"
    image = admin.post("admin/images", json=registration(file)).json()
    other = admin.post("admin/images", json=IMAGE | {"name": "other"}).json()
    token = link_of(new, image).partition("token=")[2]
    name, expires_at, mac = token.split(".")
    for digest, given in (
        (image["digest"], ""),
        (image["digest"], token[:-1] + "g"),
        (image["digest"], "\N{SNOWMAN}"),
        (image["digest"], f"{name}.{int(expires_at) + 1}.{mac}"),
        (image["digest"], f"{other['id']}.{expires_at}.{mac}"),
        (image["digest"], link_of(new, image, time.time() - 86_500).partition("token=")[2]),
        (other["digest"], token),
        ("sha256:unknown", token),
    ):
        answer = new.client().get(f"images/{digest}/content", params={"token": given})
        assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    assert link_of(new, other) == IMAGE["url"]


def test_the_key_of_links_is_not_that_of_the_ssh_authority(new: Stack, file: Path) -> None:
    new.client().post("nodes/none/enrol", json={})
    image = new.client("admin").post("admin/images", json=registration(file)).json()
    authority = new.settings.state_dir / "trust" / "user_ca"
    authority.parent.mkdir(exist_ok=True)
    authority.write_bytes(b"a key")
    key = hmac.new(b"a key", b"gpuaas image links", hashlib.sha256).digest()
    for name in ("", f"{image['id']}.{int(time.time()) + 60}."):
        text = f"image {image['digest']}" + (f" {name[:-1]}" if name else "")
        token = name + hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        path = f"images/{image['digest']}/content"
        assert new.client().get(path, params={"token": token}).status_code == 401


def test_a_link_serves_the_file_that_it_was_made_for(new: Stack, file: Path) -> None:
    """The same raw bytes are registered twice: as they are, and compressed."""
    packed = file.with_name("packed.zst")
    packed.write_bytes(ZSTD)
    admin = new.client("admin")
    plain = admin.post("admin/images", json=registration(file)).json()
    body = registration(packed, name="a", compression="zstd")
    compressed = admin.post("admin/images", json=body).json()
    assert compressed["digest"] == plain["digest"]
    assert compressed["url_digest"] == sha256(ZSTD)
    for image, content in ((plain, CONTENT), (compressed, ZSTD)):
        assert new.client().get(link_of(new, image)).content == content


def test_what_was_registered_is_what_is_sent(new: Stack, file: Path, tmp_path: Path) -> None:
    image = new.client("admin").post("admin/images", json=registration(file)).json()
    file.unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    link = link_of(new, image)
    for _ in ("missing", "a link"):
        answer = new.client().get(link)
        assert (answer.status_code, answer.json()["code"]) == (404, "image_file_not_found")
        file.unlink(missing_ok=True)
        file.symlink_to(secret)


def test_a_name_that_changes_while_its_file_is_sent(file: Path, tmp_path: Path) -> None:
    opened = downloads.open_file(file.parent, file.as_uri())
    assert opened is not None
    (tmp_path / "secret").write_bytes(b"secret")
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    assert TestClient(OpenFile(opened)).get("/").content == CONTENT
    assert opened.closed


def _outside(_folder: Path, secret: Path) -> str:
    return secret.as_uri()


def _dots(folder: Path, secret: Path) -> str:
    way = os.path.relpath(secret, folder).replace("..", "%2e%2e")
    return f"{folder.as_uri()}/{way}"


def _link(folder: Path, secret: Path) -> str:
    (folder / "link").symlink_to(secret)
    return (folder / "link").as_uri()


def _linked_folder(folder: Path, secret: Path) -> str:
    (folder / "folder").symlink_to(secret.parent)
    return (folder / "folder" / secret.name).as_uri()


def _pipe(folder: Path, _secret: Path) -> str:
    os.mkfifo(folder / "pipe")
    return (folder / "pipe").as_uri()


def _absent(_folder: Path, secret: Path) -> str:
    return secret.with_name("nothing").as_uri()


WAYS = (_outside, _dots, _link, _linked_folder, _pipe)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize(
    "way",
    [
        *WAYS,
        _absent,
        lambda *_: "file:///proc/self/environ",
        lambda *_: "file:///dev/zero",
        lambda folder, _: folder.as_uri(),
        lambda folder, _: f"{folder.as_uri()}/",
        lambda folder, _: f"{folder.as_uri()}/a%00b",
        lambda folder, _: f"{folder.as_uri()}/{'x' * 1000}",
    ],
)
def test_nothing_outside_of_the_folder_is_served_or_told_of(
    new: Stack, tmp_path: Path, way: Callable[[Path, Path], str], compression: str
) -> None:
    """The caller knows size and digest of the file, which is the service's own key."""
    secret = new.settings.state_dir / "trust" / "user_ca"
    secret.parent.mkdir(exist_ok=True)
    secret.write_bytes(CONTENT if compression == "none" else ZSTD)
    url = way(new.settings.images_dir, secret)
    admin = new.client("admin")
    answer = admin.post("admin/images", json=registration(secret, url=url, compression=compression))
    absent = (new.settings.images_dir / "absent").as_uri()
    other = admin.post("admin/images", json=registration(secret, url=absent))
    assert answer.json()["code"] == "image_file_invalid"
    parts = ("code", "expected", "found", "remedy")
    shown, expected = ([response.json()[part] for part in parts] for response in (answer, other))
    assert [text.replace(url, "URL") for text in shown] == [
        text.replace(absent, "URL") for text in expected
    ]
    assert admin.get("admin/images").json()["items"] == []


def test_a_record_from_before_the_folder_opens_nothing(new: Stack, tmp_path: Path) -> None:
    (tmp_path / "user_ca").write_bytes(CONTENT)
    with transaction(new.engine) as conn:
        image = images.register(conn, ACT, **registration(tmp_path / "user_ca"))
    answer = new.client().get(link_of(new, vars(image)))
    assert (answer.status_code, answer.json()["code"]) == (404, "image_file_not_found")


@pytest.mark.parametrize(
    "change",
    [{"size_bytes": len(CONTENT) + 1}, {"digest": f"sha256:{'0' * 64}"}, {"compression": "zstd"}],
)
def test_another_content_is_refused_without_its_size(
    new: Stack, file: Path, change: dict[str, Any]
) -> None:
    answer = new.client("admin").post("admin/images", json=registration(file, **change)).json()
    assert answer["code"] == "image_file_invalid"
    assert str(len(CONTENT)) not in answer["detail"]
    assert sha256(CONTENT) not in answer["detail"]


def test_a_large_file_holds_neither_the_database_nor_other_requests(
    new: Stack, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Semaphore(0), threading.Event()
    digest = hashlib.file_digest

    def slow(*arguments: Any) -> Any:
        reading.release()
        assert go_on.wait(30)
        return digest(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", slow)
    admin, body = new.client("admin"), registration(file)
    with ThreadPoolExecutor(2) as pool:
        names = ("a", "b")
        answers = [
            pool.submit(new.client("admin").post, "admin/images", json=body | {"name": name})
            for name in names
        ]
        try:
            assert all(reading.acquire(timeout=30) for _ in names)
            assert admin.post("admin/projects", json={"id": "p", "name": "p"}).status_code == 201
            third = admin.post("admin/images", json=body)
            assert (third.status_code, third.json()["code"]) == (503, "image_check_busy")
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in answers] == [201, 201]
    assert admin.post("admin/images", json=body).status_code == 201


@pytest.mark.parametrize("change", [{"url": "https://images.example/2"}, {"guest_profile": "x"}])
def test_a_registered_image_is_not_silently_kept_as_it_is(
    new: Stack, change: dict[str, Any]
) -> None:
    admin = new.client("admin")
    first = admin.post("admin/images", json=IMAGE | {"name": "moved"})
    assert admin.post("admin/images", json=IMAGE | {"name": "moved"}).json() == first.json()
    answer = admin.post("admin/images", json=IMAGE | {"name": "moved"} | change)
    assert (answer.status_code, answer.json()["code"]) == (409, "image_exists")
    assert next(iter(change)) in answer.json()["found"]


@pytest.mark.parametrize("folder", [".", "..", "images", "/", "/proc/self", "/dev/shm/images"])
def test_the_folder_of_images_and_the_state_folder_are_apart(tmp_path: Path, folder: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("", "link"):
        with pytest.raises(ValidationError, match="GPUAAS_IMAGES_DIR"):
            Settings(state_dir=tmp_path, images_dir=tmp_path / name / folder)


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


def test_a_compressed_file_has_its_own_size_and_digest(new: Stack, file: Path) -> None:
    file.write_bytes(ZSTD)
    admin = new.client("admin")
    body = registration(file, compression="zstd", size_bytes=1 << 30)
    wrong = admin.post("admin/images", json=body | {"url_digest": sha256(CONTENT)})
    assert wrong.json()["code"] == "image_file_invalid"
    assert admin.post("admin/images", json=body).json()["url_digest"] == sha256(ZSTD)


def test_every_machine_of_a_site_makes_the_same_link(
    new: Stack, file: Path, tmp_path: Path
) -> None:
    """A worker makes it, the API of another machine is asked."""
    image = new.client("admin").post("admin/images", json=registration(file)).json()
    there = Settings(state_dir=tmp_path / "there", public_url=new.settings.public_url)
    assert new.client().get(link_of(new, image, settings=there)).content == CONTENT
    strange = downloads.url(new.settings, image, b"of another site", time.time())
    assert new.client().get(strange).status_code == 401


def test_a_member_sees_what_a_launch_can_name_and_not_where_it_comes_from(
    new: Stack, file: Path
) -> None:
    made = new.client("admin").post("admin/images", json=registration(file)).json()
    listed = new.client("member").get("images").json()
    assert listed == new.client("admin").get("images").json()
    names = ("id", "name", "version", "digest", "size_bytes", "minimum_disk_bytes")
    names += ("runtime", "created_at")
    item = {name: made[name] for name in names} | {"refusal": None}
    assert listed == {"items": [item], "next": None}


def sizes_refused(stack: Stack, folder: Path, **profiles: tuple[list[int], bool]) -> list[str]:
    """Codes by which the image is refused for one GPU and for two, "" where it is not. profiles:
    numbers of GPUs that each sells, and whether it needs a driver in the image.
    """
    profile = yaml.safe_load((PROFILES / "lab.yml").read_text())
    vm, gpu = profile["vm"], profile["gpu"]
    baked = vm | {"guest_runtime": vm["guest_runtime"] | {"driver": "570-server"}}
    for name, (counts, driver) in profiles.items():
        sections = {"gpu": gpu | {"counts": counts}, "vm": baked if driver else vm}
        document = profile | sections | {"name": name}
        (folder / f"{name}.yml").write_text(yaml.safe_dump(document))
    stack.settings = stack.settings.model_copy(update={"profiles_dir": folder})
    codes = []
    for gpus in (1, 2):
        query = {"sku": "lab-edu-slice", "gpus": gpus}
        (image,) = stack.client("member").get("images", params=query).json()["items"]
        codes.append((image["refusal"] or {}).get("code", ""))
    return codes


def test_an_image_is_offered_for_the_sizes_of_hardware_that_takes_it(
    new: Stack, tmp_path: Path
) -> None:
    """Of two profiles of an SKU, the profile that sells two GPUs needs a driver in the image."""
    new.client("admin").post("admin/images", json=IMAGE)
    codes = sizes_refused(new, tmp_path, lab=([1], False), two=([2], True))
    assert codes == ["", "image_runtime_missing"]


def test_hardware_that_no_host_has_takes_no_image(selling: Stack, tmp_path: Path) -> None:
    codes = sizes_refused(selling, tmp_path, lab=([1], True), two=([1, 2], False))
    assert codes == ["image_runtime_missing", ""]
