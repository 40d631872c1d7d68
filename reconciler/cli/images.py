"""`gpuaas images`: the image catalogue, and the image caches of hosts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import typer

from reconciler.cli import output, tasks
from reconciler.cli.nodes import Node, Wait
from reconciler.cli.options import file_invalid
from reconciler.cli.session import client
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Images for virtual machines.")

Compression = Annotated[
    Literal["none", "zstd"], typer.Option(help="How the file is packed; hosts unpack it.")
]
Runtime = Annotated[
    list[str] | None,
    typer.Option(help="What it contains, such as driver-570-server; may be repeated."),
]


@app.command("list")
def list_images() -> None:
    """List the images that a launch can name."""
    columns: tuple[str, ...] = ("id", "name", "version", "contains", "size_bytes", "digest")
    try:
        images = list(client().items("/admin/images"))
        columns = (*columns, "compression")
    except Problem as problem:
        if problem.code != "role_required":
            raise
        images = list(client().items("/images"))
    if output.in_json(images):
        return
    # `gpuaas catalog` shows what each offer needs in the same words.
    output.rows([row | {"contains": ", ".join(row["runtime"])} for row in images], *columns)


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(help="An http(s) URL, or a file in GPUAAS_IMAGES_DIR of the reconciler."),
    ],
    *,
    name: Annotated[str, typer.Option(help="Name by which launches ask for it.")],
    version: Annotated[str, typer.Option(help="Version; a launch gets the newest of a name.")],
    digest: Annotated[str, typer.Option(help="sha256:… of the raw image.")] = "",
    size: Annotated[int, typer.Option(help="Bytes of the raw image.")] = 0,
    compression: Compression = "none",
    runtime: Runtime = None,
) -> None:
    """Register an image. For a raw file on this machine, digest and size are computed."""
    file = None if "://" in source else Path(source).resolve()
    if file is not None and compression == "none" and not digest:
        digest, size = _measure(file)
    if not digest or not size:
        raise typer.BadParameter("--digest and --size of the raw image are needed")
    _register(
        name=name,
        version=version,
        digest=digest,
        size_bytes=size,
        url=source if file is None else file.as_uri(),
        compression=compression,
        runtime=runtime or [],
    )


@app.command("import")
def import_image(
    source: Annotated[
        Path,
        typer.Argument(help="A raw or qcow2 file, or an OCI image (folder or tar) with a disk."),
    ],
    *,
    name: Annotated[str, typer.Option(help="Name by which launches ask for it.")],
    version: Annotated[str, typer.Option(help="Version; a launch gets the newest of a name.")],
    source_digest: Annotated[
        str, typer.Option(help="sha256:… that the file, or the OCI manifest, must have.")
    ] = "",
    max_gib: Annotated[int, typer.Option(min=1, help="Largest raw image.")] = 64,
    compression: Compression = "none",
    runtime: Runtime = None,
) -> None:
    """Convert a disk into GPUAAS_IMAGES_DIR of this machine, and register it."""
    from reconciler.images.convert import convert
    from reconciler.settings import Settings

    image = convert(
        source,
        Settings().images_dir,
        limit_bytes=max_gib << 30,
        source_digest=source_digest,
        compression=compression,
    )
    try:
        _register(
            name=name,
            version=version,
            digest=image.digest,
            size_bytes=image.size_bytes,
            url=image.file.absolute().as_uri(),
            compression=compression,
            runtime=runtime or [],
        )
    except Problem as problem:
        # After a lost connection the service may have registered it.
        if 400 <= problem.status < 500:
            image.discard()
        raise


@app.command()
def cache(
    node: Node,
    image: Annotated[str, typer.Argument(help="The image's id, or its name[:version].")],
    wait: Wait = True,
) -> None:
    """Copy an image into a host's cache in advance of a launch."""
    body = {"image_id": _image_id(image)}
    tasks.run(f"/admin/nodes/{node}/image-cache", body, wait=wait)


def _register(**body: object) -> None:
    # The service reads the whole file before it answers.
    output.record(client().post("/admin/images", body, timeout_s=3600))


def _image_id(image: str) -> str:
    """The id of an image. A name without version means the newest, as in a launch."""
    catalogue = list(client().items("/admin/images"))
    if any(row["id"] == image for row in catalogue):
        return image
    name, _, version = image.partition(":")
    matching = [row for row in catalogue if row["name"] == name and version in ("", row["version"])]
    if not matching:
        raise Problem(
            "image_not_found",
            404,
            expected="the id, the name or name:version of an image in the catalogue",
            found=f"{image!r}, which no image has",
            remedy="see `gpuaas images list`, or register it with `gpuaas images add`",
        )
    return str(max(matching, key=lambda row: row["created_at"])["id"])


def _measure(file: Path) -> tuple[str, int]:
    try:
        with file.open("rb") as handle:
            return f"sha256:{hashlib.file_digest(handle, 'sha256').hexdigest()}", handle.tell()
    except OSError as error:
        raise file_invalid(
            file, error.strerror, "a raw image that can be read", "correct the path"
        ) from error
