"""Images: the catalogue, and downloads of registered files by hosts."""

from __future__ import annotations

import os
from io import BufferedReader
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, StringConstraints
from starlette.types import Receive, Scope, Send

from reconciler.api import problems
from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Bytes, Filter, Id, Label, Moment, Name, Reasoned
from reconciler.api.security import Admin, Holder
from reconciler.db import clock
from reconciler.db import settings as site
from reconciler.db.engine import reading
from reconciler.db.schema import Image as Row
from reconciler.model.errors import Problem, not_found
from reconciler.profiles import profile_offers
from reconciler.records import fleet, images
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
    runtime: Annotated[list[Name], Field(max_length=16)] = Field(
        default=[],
        description="What the image contains: driver-VERSION, cuda-VERSION, rdma, nvlink-disabled,"
        " worker-kit.",
    )
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
    runtime: list[str]
    created_at: Moment


class OfferedImage(MemberImage):
    """An image as a launch can name it."""

    refusal: dict[str, str] | None = Field(
        description="Why a slice of `sku` with `gpus` GPUs is not launched from it: code, expected,"
        " found, remedy. Null when it is, or when no SKU was named."
    )


class MemberImages(PageOf[OfferedImage]):
    """One page of the catalogue for members."""


class Image(MemberImage):
    """An image; its digest is that of the raw bytes."""

    url: str
    url_digest: str
    compression: str
    guest_profile: str


class OpenFile(FileResponse):
    """The content of an open file, whatever its name leads to meanwhile."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        number = file.fileno()
        super().__init__(
            f"/proc/self/fd/{number}",
            stat_result=os.fstat(number),
            media_type="application/octet-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


@router.post("/admin/images", status_code=201, response_model=Image)
def register(body: NewImage, context: Admin) -> JSONResponse:
    """Register an image; this record is the authority for its digest."""
    problems.require_default(body, "minimum_disk_bytes", "launches do not compare it with a disk")
    values = body.model_dump(exclude={"reason", "minimum_disk_bytes"})
    images.require_digest(body.digest)
    # Before the transaction, and in a thread of its own: reading a large file takes minutes.
    names = ("digest", "size_bytes", "compression", "url_digest")
    described = {name: values[name] for name in names}
    values["url_digest"] = downloads.check_source(
        context.settings.images_dir, body.url, **described
    )
    return context.write(
        lambda conn, act: Image.of(images.register(conn, act, **values)), body=body, status=201
    )


@router.get("/admin/images")
def list_images(context: Admin, paging: Paging) -> PageOf[Image]:
    """The catalogue."""
    return context.page(paging, images.ORDER, images.every, Image.of)


@router.get("/images", response_model=MemberImages)
def offered(
    context: Holder,
    paging: Paging,
    *,
    sku: Filter = None,
    gpus: Annotated[int, Query(ge=1, le=1024, description="GPUs in one slice.")] = 1,
) -> PageOf[OfferedImage]:
    """The images that a launch can name, judged for a slice of an SKU as a launch would."""
    offers = profile_offers(context.settings.profiles_dir) if sku else {}
    # A launch chooses hardware of the SKU that sells this size and takes the image.
    sold = {name: o for name, o in offers.items() if o.sku == sku and not o.refusal(gpus)}
    present = context.read(fleet.disk_sizes) if sold else {}
    # Before the first slot of any, all of them count.
    alike = [sold[name] for name in sold if name in present] or [*sold.values()]

    def judged(image: Row) -> OfferedImage:
        named = f"{image.name} {image.version}"
        problems = [offer.image_problem(named, image.runtime, gpus) for offer in alike]
        unfit = problems[0] if problems and all(problems) else None
        return OfferedImage.of(image, refusal=unfit.to_dict() if unfit else None)

    return context.page(paging, images.ORDER, images.every, judged)


@router.get("/images/{digest}/content", response_class=FileResponse)
def content(
    digest: Id, request: Request, token: Annotated[str, Query(max_length=128)] = ""
) -> FileResponse:
    """The bytes of a registered file, for a host that holds its download token."""
    settings = request.app.state.settings
    digest = f"sha256:{digest.removeprefix('sha256:')}"
    with reading(request.app.state.engine) as conn:
        key = site.read(conn, images.LINK_KEY)
        # Checked before the look-up: callers without the token must not learn which images exist.
        image_id = key and downloads.image_of(bytes.fromhex(key), digest, token, clock.read(conn))
        if not image_id:
            raise Problem(
                "token_invalid",
                401,
                expected="the download token of this image",
                found="none, another one, or one that has expired",
                remedy="request the work again; its run gets a valid link",
            )
        image = images.get(conn, image_id)
    file = downloads.open_file(settings.images_dir, image.url)
    if file is None:
        raise not_found("image_file", digest)
    return OpenFile(file)
