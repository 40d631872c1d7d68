"""NoCloud seed of a guest: three YAML documents on an ISO labelled `cidata`.

The documents are rendered as data, never by templates, as JSON text that YAML reads alike. The ISO
header contains the digest of the content, so that reading the file shows whether it is the right
seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# ISO 9660: the primary volume descriptor is sector 16; its application identifier has 128 bytes.
_APPLICATION = 16 * 2048 + 574
_MARK = "GPUAAS SEED "

_MAKERS = (("genisoimage",), ("xorrisofs",), ("mkisofs",))


def yaml(document: Any) -> str:
    """`document` as JSON-shaped text that YAML readers parse unchanged."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return "".join(character if _plain(character) else _escape(character) for character in text)


def files(
    user_data: Mapping[str, Any], meta_data: Mapping[str, Any], network: Mapping[str, Any]
) -> dict[str, str]:
    """The files of the seed by name."""
    for field, names in (("hostname", user_data), ("local-hostname", meta_data)):
        if field in names:
            _object_names.check_hostname(field, str(names[field]))
    contents = {
        "user-data": f"#cloud-config\n{yaml(user_data)}\n",
        "meta-data": f"{yaml(meta_data)}\n",
    }
    if network:
        contents["network-config"] = f"{yaml(network)}\n"
    return contents


def digest(content: Mapping[str, str]) -> str:
    """A SHA-256 over names and content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def present(path: str) -> str | None:
    """The digest in the ISO at `path`; "" for a foreign file, None if the file does not exist."""
    try:
        with _host.path(path).open("rb") as image:
            image.seek(_APPLICATION)
            text = image.read(128).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    return text[len(_MARK) :].lower() if text.startswith(_MARK) else ""


def make(path: str, content: Mapping[str, str]) -> None:
    """Write the ISO: readable by root only until libvirt gives it to the guest's QEMU."""
    target = _host.path(path)
    # QEMU's user must be able to traverse the directory, but not to list it.
    target.parent.mkdir(parents=True, exist_ok=True)
    target.parent.chmod(0o711)
    work = Path(tempfile.mkdtemp(prefix=".seed-", dir=target.parent))
    try:
        for name, text in content.items():
            (work / name).write_text(text)
        image = work / "seed.iso"
        mark = _MARK + digest(content).upper()
        _run_maker(["-quiet", "-volid", "cidata", "-joliet", "-rock", "-appid", mark], image, work)
        image.chmod(0o600)
        image.replace(target)
    finally:
        shutil.rmtree(work)


def _run_maker(options: list[str], image: Path, work: Path) -> None:
    names = sorted(str(file) for file in work.iterdir())
    for maker in _MAKERS:
        try:
            _command.run([*maker, *options, "-output", str(image), *names])
        except Refusal as refusal:
            if refusal.code != "command_missing":
                raise
        else:
            return
    raise Refusal(
        "command_missing",
        expected=f"one of {', '.join(maker[0] for maker in _MAKERS)} on this host",
        found="none of them",
        remedy="run the bootstrap playbook, which installs the packages of a slice host",
    )


def destroy(path: str) -> None:
    """Overwrite the seed and delete it. A guest that still has it open reads zeros from then on."""
    descriptor = os.open(_host.path(path), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        left = os.fstat(descriptor).st_size
        while left:
            left -= os.write(descriptor, bytes(min(left, 1 << 20)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _host.remove(path)


def path_of(allocation_id: str) -> str:
    return _object_names.seed_path(allocation_id)


def _plain(character: str) -> bool:
    return character == "\n" or " " <= character <= "~"


def _escape(character: str) -> str:
    """The character as a YAML escape. JSON's surrogate pairs are two characters in YAML, so none
    are used.
    """
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise _object_names.invalid("seed", "text without lone surrogates", repr(character))
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
