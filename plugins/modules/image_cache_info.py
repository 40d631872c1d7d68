#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Images in the host's digest-checked cache."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_cache_info
short_description: List the images in a host's digest-checked cache
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Lists the images below C(/var/lib/gpuaas/images), and whether each is unchanged
    since its digest was checked. No image is read again.
  - Refuses with C(image_digest_invalid), C(file_unreadable).
options:
  digest:
    description: List this image only; C(sha256:) and the hex digest of the raw bytes.
    type: str
seealso:
  - module: gpuaas.slice.image_cache
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: List the cached images
  gpuaas.slice.image_cache_info:
  register: cache

- name: Name those that a launch would refuse
  ansible.builtin.debug:
    msg: "{{ cache.images | rejectattr('verified') | map(attribute='digest') }}"
"""

RETURN = r"""
images:
  description: The cached images, by digest.
  returned: success
  type: list
  elements: dict
  contains:
    digest:
      description: C(sha256:) and the hex digest in the file's name.
      type: str
    path:
      description: Path of the raw file.
      type: str
    size_bytes:
      description: Size of the file.
      type: int
    verified:
      description: Whether the file is unchanged since its bytes matched the digest.
      type: bool
  sample:
    - digest: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      path: /var/lib/gpuaas/images/<hex of the digest>.raw
      size_bytes: 1258291200
      verified: true
free_bytes:
  description: Free space for further images.
  returned: success
  type: int
  sample: 85899345920
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _download
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _image_cache


def look(params: _change.Params) -> dict[str, Any]:
    digests = [params["digest"]] if params["digest"] else _image_cache.cached()
    return {
        "images": [image for digest in digests for image in _images(digest)],
        "free_bytes": _download.free_bytes(f"{_image_cache.DIRECTORY}/image"),
    }


def _images(digest: str) -> list[dict[str, Any]]:
    """The image as a list, empty if it is not cached (any more)."""
    path = _image_cache.path_of(digest)
    stamp = _image_cache.stamp_of(path)
    if stamp is None:
        return []
    index = _image_cache.verified(path)
    return [
        {
            "digest": digest,
            "path": path,
            "size_bytes": stamp.size_bytes,
            "verified": index is not None and index.digest == digest,
        }
    ]


def main() -> None:
    module = AnsibleModule(argument_spec={"digest": {"type": "str"}}, supports_check_mode=True)
    _change.inform(module, look)


if __name__ == "__main__":
    main()
