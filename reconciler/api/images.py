"""The image catalogue, and the way by which hosts get the bytes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api import views
from reconciler.api.memberview import MemberImages
from reconciler.api.models import Bytes, Id, Label, Name, Reasoned
from reconciler.api.paging import Paging
from reconciler.api.security import Admin, Holder
from reconciler.db.engine import reading
from reconciler.model.errors import Problem
from reconciler.records import images
from reconciler.trust import downloads
from reconciler.trust.downloads import url as download_url

__all__ = ["download_url", "router"]

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
    minimum_disk_bytes: Bytes = 0
    guest_profile: Label = ""
    compression: Literal["none", "zstd"] = "none"
    url_digest: Annotated[str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""


@router.post("/admin/images", status_code=201)
def register(body: NewImage, context: Admin) -> JSONResponse:
    """Register an image; this record is the authority for its digest."""
    act = context.act(body.reason)
    values = body.model_dump(exclude={"reason"})
    downloads.refuse(body.url, body.size_bytes if body.compression == "none" else None)
    return context.write(
        lambda conn: views.record(images.register(conn, act, **values)), body=body, status=201
    )


@router.get("/admin/images")
def list_images(context: Admin, part: Paging) -> dict[str, Any]:
    """The catalogue."""
    page = part.page(images.ORDER)
    return part.told(images.ORDER, context.read(lambda conn: images.every(conn, page)))


@router.get("/images", response_model=MemberImages)
def offered(request: Request, _who: Holder, part: Paging) -> dict[str, Any]:
    """What a launch can name."""
    page = part.page(images.ORDER)
    with reading(request.app.state.engine) as conn:
        return part.told(images.ORDER, images.every(conn, page))


@router.get("/images/{digest}/content", response_class=FileResponse)
def content(
    digest: Id, request: Request, token: Annotated[str, Query(max_length=128)] = ""
) -> FileResponse:
    """The bytes of a registered file, for a host that holds its link."""
    settings = request.app.state.settings
    named = f"sha256:{digest.removeprefix('sha256:')}"
    # Judged before anything is looked up: without the token nobody learns what there is.
    if not downloads.allowed(settings, named, token):
        raise Problem(
            "token_invalid",
            401,
            expected="the download token of this image",
            found="none, or another one",
            remedy="start the task again; its run gets a valid link",
        )
    with reading(request.app.state.engine) as conn:
        image = _by_digest(conn, named)
    return FileResponse(downloads.file_of(image), media_type="application/octet-stream")


def _by_digest(conn: Connection, digest: str) -> dict[str, Any]:
    # The same bytes may be registered under several names; any of their files will do.
    for image in images.every(conn):
        if image["digest"] == digest and downloads.local(image["url"]) is not None:
            return image
    return {"digest": digest, "url": ""}
