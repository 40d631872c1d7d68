"""Images: the catalogue, and downloads of registered files by hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api import problems
from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Bytes, Id, Label, Moment, Name, Reasoned
from reconciler.api.security import Admin, Holder
from reconciler.db import schema
from reconciler.db.engine import reading
from reconciler.model.errors import Problem, not_found
from reconciler.records import images
from reconciler.trust import downloads

router = APIRouter(tags=["images"])

Digest = Annotated[str, StringConstraints(max_length=128)]
Url = Annotated[
    str, StringConstraints(max_length=2000, pattern=r"^(https?://[!-~]+|file:///[!-~]+)$")
]


class NewImage(Reasoned):
    """digest and size_bytes are of the raw image, also when the file is compressed."""

    name: Name
    version: Name
    digest: Digest
    size_bytes: Annotated[Bytes, Field(gt=0)]
    url: Url
    minimum_disk_bytes: Bytes = Field(
        default=0,
        description="Has no effect, so a value is refused with `field_without_effect`.",
        json_schema_extra={"deprecated": True},
    )
    guest_profile: Label = ""
    compression: Literal["none", "zstd"] = "none"
    url_digest: Annotated[str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""


class MemberImage(Answer):
    """An image without its source: the URL may hold a secret or name a path of the operators."""

    id: str
    name: str
    version: str
    digest: str
    size_bytes: int
    minimum_disk_bytes: int
    created_at: Moment


class MemberImages(PageOf[MemberImage]):
    """One page of the catalogue for members."""


class Image(MemberImage):
    """An image; its digest is that of the raw bytes."""

    url: str
    url_digest: str
    compression: str
    guest_profile: str


@router.post("/admin/images", status_code=201, response_model=Image)
def register(body: NewImage, context: Admin) -> JSONResponse:
    """Register an image; this record is the authority for its digest."""
    problems.require_default(body, "minimum_disk_bytes", "launches do not compare it with a disk")
    values = body.model_dump(exclude={"reason", "minimum_disk_bytes"})
    downloads.refuse(body.url, body.size_bytes if body.compression == "none" else None)
    return context.write(
        lambda conn, act: Image.of(images.register(conn, act, **values)), body=body, status=201
    )


@router.get("/admin/images")
def list_images(context: Admin, paging: Paging) -> PageOf[Image]:
    """The catalogue."""
    return context.page(paging, images.ORDER, images.every, Image.of)


@router.get("/images", response_model=MemberImages)
def offered(context: Holder, paging: Paging) -> PageOf[MemberImage]:
    """The images that a launch can name."""
    return context.page(paging, images.ORDER, images.every, MemberImage.of)


@router.get("/images/{digest}/content", response_class=FileResponse)
def content(
    digest: Id, request: Request, token: Annotated[str, Query(max_length=128)] = ""
) -> FileResponse:
    """The bytes of a registered file, for a host that holds its download token."""
    settings = request.app.state.settings
    digest = f"sha256:{digest.removeprefix('sha256:')}"
    # Checked before the look-up: callers without the token must not learn which images exist.
    if not downloads.allowed(settings, digest, token):
        raise Problem(
            "token_invalid",
            401,
            expected="the download token of this image",
            found="none, or another one",
            remedy="start the task again; its run gets a valid link",
        )
    with reading(request.app.state.engine) as conn:
        image = _local_image(conn, digest)
    return FileResponse(
        downloads.file_of(image.url, image.digest), media_type="application/octet-stream"
    )


def _local_image(conn: Connection, digest: str) -> schema.Image:
    # The same bytes may be registered under several names; any local file of them serves.
    for image in images.every(conn):
        if image.digest == digest and downloads.local(image.url) is not None:
            return image
    raise not_found("image_file", digest)
