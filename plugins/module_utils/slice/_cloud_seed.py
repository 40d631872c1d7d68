"""NoCloud seed of one allocation's guest: three YAML documents on an ISO labelled `cidata`.

The documents are rendered as data, never by templates, as JSON text that YAML reads alike. The ISO
header contains the digest of the content, so that reading the file shows whether it is the right
seed. A guest that has read its seed needs it no more: then it is detached and overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _domain, _libvirt

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


def merged(user_data: Mapping[str, Any], *further: Mapping[str, Any]) -> dict[str, Any]:
    """Cloud-config with further documents after it. Of equal keys, the first stays.

    Lists of commands, packages and files are joined; of files with equal paths, the first stays.
    """
    joined = dict(user_data)
    for document in further:
        for key, value in document.items():
            before = joined.get(key, [])
            if key not in ("write_files", "runcmd", "packages"):
                joined.setdefault(key, value)
            elif not isinstance(value, list) or not isinstance(before, list):
                raise _object_names.invalid(key, "a list", type(value).__name__)
            else:
                taken = [file.get("path") for file in before if isinstance(file, dict)]
                more = [v for v in value if not (isinstance(v, dict) and v.get("path") in taken)]
                joined[key] = [*before, *more]
    return joined


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
    # Named by the slice, so that a killed run's draft is found: its content is secret.
    work = Path(tempfile.mkdtemp(prefix=f".{target.stem}-", dir=target.parent))
    try:
        for name, text in content.items():
            (work / name).write_text(text)
        image = work / "seed.iso"
        mark = _MARK + digest(content).upper()
        _run_maker(["-quiet", "-volid", "cidata", "-joliet", "-rock", "-appid", mark], image, work)
        image.chmod(0o600)
        # The digest in the header must not outlive the content over a loss of power.
        with image.open("rb") as made:
            os.fsync(made.fileno())
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


@dataclass(frozen=True)
class State:
    """digest: of the existing seed, None without a seed. drafts: folders of killed runs. defined,
    plugged: whether the domain's definition and the running guest have it; read for `detached`
    only.
    """

    digest: str | None
    drafts: tuple[str, ...]
    defined: bool = False
    plugged: bool = False


def observe(params: _change.Params) -> State:
    """State of the seed, for the states present, detached and absent."""
    _not_late(params)
    path = _object_names.seed_path(params["allocation_id"])
    digest, drafts = present(path), tuple(_object_names.seed_drafts(params["allocation_id"]))
    name = _object_names.domain_name(params["allocation_id"])
    if params["state"] != "detached":
        return State(digest, drafts)
    life, definitions = _libvirt.described(name, live=True)
    if life is None:
        return State(digest, drafts)
    defined, plugged = (path in _domain.parse(text)["seed"] for text in definitions)
    return State(digest, drafts, defined, life.active and plugged)


def plan(params: _change.Params, state: State) -> _change.Plan:
    path = _object_names.seed_path(params["allocation_id"])
    steps = [_change.Step("remove_draft", draft, "a killed run's", None) for draft in state.drafts]
    if params["state"] == "present":
        content = digest(_content(params))
        if state.digest != content:
            steps.append(_change.Step("write_seed", path, state.digest, content))
        return _change.Plan(tuple(steps))
    name = _object_names.domain_name(params["allocation_id"])
    if state.defined:
        steps.append(_change.Step("forget_seed", f"{name} definition", path, ""))
    if state.digest is not None:
        remove = "remove_seed" if params["state"] == "absent" else "destroy_seed"
        steps.append(_change.Step(remove, path, state.digest, None))
    if state.plugged:
        steps.append(_change.Step("unplug_seed", f"{name} disks", path, "", soft=True))
    return _change.Plan(tuple(steps))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    _not_late(params)
    name = _object_names.domain_name(params["allocation_id"])
    if step.name == "write_seed":
        make(step.subject, _content(params))
    elif step.name == "remove_draft":
        shutil.rmtree(_host.path(step.subject))
    elif step.name == "forget_seed":
        _libvirt.forget_disk(name, step.before)
    elif step.name == "unplug_seed":
        _libvirt.unplug_disk(name, step.before)
    elif step.name == "destroy_seed":
        destroy(step.subject)
    else:
        _host.remove(step.subject)
    return None


def _not_late(params: _change.Params) -> None:
    # A seed that a late run leaves behind belongs to no allocation, so it would never be removed.
    if params["state"] != "absent":
        _ledger.check_each(params.get("slots") or ())


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    gone = state.digest is None and not state.drafts
    if params["state"] != "detached":
        return {
            "seed": {"path": _object_names.seed_path(params["allocation_id"]), "present": not gone}
        }
    evidence = {"destroyed": gone, "in_definition": state.defined, "in_guest": state.plugged}
    return {"seed": evidence}


def _content(params: _change.Params) -> dict[str, str]:
    user_data, tenants = (_document(params, name) for name in ("user_data", "tenant_data"))
    documents = merged(user_data, params["runtime_data"], tenants)
    return files(documents, params["meta_data"], params["network_config"])


def _document(params: _change.Params, field: str) -> Mapping[str, Any]:
    try:
        document = json.loads(params.get(field) or "{}")
    except ValueError as error:
        # The text itself is secret, so the error names only the position.
        raise _object_names.invalid(field, "a JSON object", str(error)) from error
    if not isinstance(document, Mapping):
        raise _object_names.invalid(field, "a JSON object", type(document).__name__)
    return document


SUBJECT = _change.Subject(observe, plan, apply, facts)
