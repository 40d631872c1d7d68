#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Image of slices in the host's digest-checked cache."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_cache
short_description: Keep a slice image in the host's digest-checked cache
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Fetches an image, unpacks it, computes the sha256 of its raw bytes and puts it under
    C(/var/lib/gpuaas/images) when it matches.
  - Keeps an index beside it, with a hash of every chunk and the attributes that show whether the
    file was changed since. A changed file is fetched again.
  - Of two simultaneous runs for the same image, the first fetches it and the second waits for it.
  - Takes no more bytes than the image has, whatever the source sends or the packed file holds.
  - Refuses with C(image_digest_mismatch), C(image_digest_invalid), C(image_unreachable),
    C(image_too_large), C(image_no_room).
options:
  name:
    description: Name in the catalogue, for messages.
    type: str
    required: true
  digest:
    description: C(sha256:) and the hex digest of the raw bytes, from the catalogue.
    type: str
    required: true
  size_bytes:
    description: Size of the raw image. Needed with O(state=present).
    type: int
    default: 0
  url:
    description: Source of the image, with the scheme http, https or file. Needed when the image is
      not cached yet.
    type: str
    default: ""
  compression:
    description: Compression of the source.
    type: str
    choices: [none, zstd]
    default: none
  state:
    description: Whether the image is in the cache.
    type: str
    choices: [present, absent]
    default: present
requirements:
  - zstd, for compressed images
seealso:
  - module: gpuaas.slice.image_cache_info
  - module: gpuaas.slice.image_clone
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Cache the slice image
  gpuaas.slice.image_cache:
    name: H200-ubuntu-24.04-gpuaas-slice
    digest: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    size_bytes: 1258291200
    url: https://images.example.org/h200-slice.raw.zst
    compression: zstd
"""

RETURN = r"""
path:
  description: Path of the cached image, also when it is not cached.
  returned: always
  type: str
  sample: /var/lib/gpuaas/images/<hex of the digest>.raw
cached:
  description: Whether the image is cached and verified.
  returned: always
  type: bool
  sample: true
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _download, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _image_cache

# How long another run may fetch and unpack an image.
_FETCH_S = 4 * 3600.0


@dataclass(frozen=True)
class State:
    """there: the image, or a part of it. verified: it is unchanged since it was checked."""

    path: str
    there: bool
    verified: bool
    free_bytes: int


def observe(params: _change.Params) -> State:
    path = _image_cache.path_of(params["digest"])
    index = _image_cache.verified(path)
    return State(
        path=path,
        there=bool(_image_cache.files(path)),
        verified=index is not None and index.stamp.size_bytes == params["size_bytes"],
        free_bytes=_download.free_bytes(path),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params["state"] == "absent":
        gone = _change.Step("forget_image", state.path, before=params["digest"])
        return _change.Plan(steps=(gone,) if state.there else ())
    if state.verified:
        return _change.Plan()
    fetch = _change.Step("fetch_image", state.path, after=params["digest"])
    return _change.Plan(steps=(fetch,), blockers=tuple(_blockers(params, state)))


def _blockers(params: _change.Params, state: State) -> list[Refusal]:
    if not params["url"] or params["size_bytes"] <= 0:
        return [
            Refusal(
                "image_source_missing",
                expected=f"url and size_bytes for the image {params['name']}, which is not cached",
                found=f"url {params['url']!r}, size_bytes {params['size_bytes']}",
                remedy="take both from the image catalogue",
            )
        ]
    needed = params["size_bytes"]
    if params["compression"] != "none":
        # The packed and the raw file exist side by side for a while.
        needed += _download.packed_limit(params["size_bytes"])
    if state.free_bytes >= needed:
        return []
    return [
        Refusal(
            "image_no_room",
            expected=f"{needed} bytes free for {state.path}",
            found=f"{state.free_bytes} bytes",
            remedy="remove images that are not used any more (state: absent)",
        )
    ]


def apply(params: _change.Params, step: _change.Step) -> None:
    if step.name == "forget_image":
        _image_cache.forget(step.subject)
        return
    _image_cache.forget(step.subject)
    draft = f"{step.subject}.part"
    try:
        _download.fetch(
            params["url"],
            draft,
            compression=params["compression"],
            size_bytes=params["size_bytes"],
        )
        _image_cache.admit(draft, step.subject, params["digest"], params["size_bytes"])
    finally:
        _host.remove(draft)


def facts(_params: _change.Params, state: State) -> dict[str, Any]:
    return {"path": state.path, "cached": state.verified}


def _locked(params: _change.Params) -> AbstractContextManager[None]:
    """Lock: a single run at a time works on an image. Volatile files of a host lie under /run."""
    name = _image_cache.hexadecimal(params["digest"])
    # The other run may fetch the same image.
    return _host.locked(f"/run/gpuaas/images/{name}", mode=0o700, wait_s=_FETCH_S)


SUBJECT = _change.Subject(observe, plan, apply, facts, exclusive=_locked)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "digest": {"type": "str", "required": True},
            "size_bytes": {"type": "int", "default": 0},
            "url": {"type": "str", "default": "", "no_log": True},
            "compression": {"type": "str", "choices": ["none", "zstd"], "default": "none"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    _change.run(module, SUBJECT)


if __name__ == "__main__":
    main()
