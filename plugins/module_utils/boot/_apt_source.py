"""Signed apt repository with a key that is trusted for that repository alone.

The key is verified by its fingerprint. The fingerprint comes from the operator, not from the server
that provides the key. Every setting that lets apt take an unsigned package is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _openpgp
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _download,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

SOURCES = "/etc/apt/sources.list.d"
KEYRINGS = "/usr/share/keyrings"

# No user part, because everybody can read a password in a source file.
_URI = re.compile(r"(https?://[A-Za-z0-9.\[\]:-]+|file://)(/[A-Za-z0-9._~%+/-]*)?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_ONE_LINE = re.compile(r"\s*deb(?:-src)?\s+(?:\[([^\]]*)\]\s*)?(\S+)")
# A key with many signatures has some hundred kilobytes.
_LARGEST_KEY = 1 << 20
_NO = ("no", "false", "without", "off", "disable", "0")
# Source options and apt settings that allow a package without a signature.
_OPEN_OPTIONS = ("trusted", "allow-insecure", "allow-weak", "allow-downgrade-to-insecure")
_OPEN_SETTINGS = (
    "APT::Get::AllowUnauthenticated",
    "Acquire::AllowInsecureRepositories",
    "Acquire::AllowWeakRepositories",
    "Acquire::AllowDowngradeToInsecureRepositories",
)


@dataclass(frozen=True)
class State:
    """keys: fingerprints in the managed keyring. source: text of the managed file, None if absent.

    elsewhere: other files that name the same repository. open_doors: sources and settings that
    allow unsigned packages. The managed file is not among them, because a wrong one is rewritten.
    """

    keys: tuple[str, ...]
    source: str | None
    elsewhere: tuple[str, ...]
    open_doors: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A stanza or line of apt's sources."""

    file: str
    uris: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


def observe(params: _change.Params) -> State:
    keyring, uri = keyring_path(params), str(params["uri"]).rstrip("/")
    ring = _host.path(keyring)
    others = [source for source in sources() if source.file != source_path(params)]
    doors = [
        f"{source.file}: {key}={value}"
        for source in others
        for key, value in source.options
        if key.lower() in _OPEN_OPTIONS and value.lower() not in _NO
    ]
    return State(
        keys=tuple(key.fingerprint for key in _openpgp.keys(ring)) if ring.is_file() else (),
        source=_text(source_path(params)),
        elsewhere=tuple(
            sorted(
                {source.file for source in others if uri in (u.rstrip("/") for u in source.uris)}
            )
        ),
        open_doors=(*doors, *_open_settings()),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    blockers = [*_invalid(params), *_unsafe(params, state)]
    steps = []
    fingerprint = _openpgp.normal(params["fingerprint"])
    if state.keys != (fingerprint,):
        before, after = list(state.keys), [fingerprint]
        steps.append(_change.Step("trust_key", keyring_path(params), before=before, after=after))
    expected = stanza(params)
    if state.source != expected:
        step = _change.Step(
            "write_source", source_path(params), before=state.source, after=expected
        )
        # A new source comes after its key. An edited source may accept any package, so it is
        # corrected first, even if the key is unavailable.
        steps.insert(0 if state.source is not None else len(steps), step)
    return _change.Plan(tuple(steps), tuple(blockers))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "write_source":
        _host.write(step.subject, step.after)
        return None
    fingerprint = _openpgp.normal(params["fingerprint"])
    fetched = f"{_host.STATE_DIRECTORY}/fetched-{params['name']}.key"
    try:
        _fetch_key(params["key_url"], fetched)
        armoured = _openpgp.only(_host.path(fetched), fingerprint)
    finally:
        _host.remove(fetched)
    _host.write(step.subject, armoured)
    return {"fingerprint": fingerprint}


def _fetch_key(url: str, target: str) -> None:
    try:
        _download.fetch(url, target, compression="none", size_bytes=_LARGEST_KEY)
    except Refusal as refusal:
        large = refusal.code == "image_too_large"
        raise Refusal(
            "key_not_valid" if large else "key_unreachable",
            expected=f"a key of at most {_LARGEST_KEY} bytes at {_download.shown(url)}",
            found=refusal.found,
            remedy="correct where the key comes from (key_url), or the host's way to it",
        ) from refusal


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "source": source_path(params),
        "keyring": keyring_path(params),
        "trusted_keys": list(state.keys),
    }


def keyring_path(params: _change.Params) -> str:
    return f"{KEYRINGS}/{params['name']}.asc"


def source_path(params: _change.Params) -> str:
    return f"{SOURCES}/{params['name']}.sources"


def stanza(params: _change.Params) -> str:
    """Content of the managed source file. Signed-By limits the key to it."""
    rows = [
        "Types: deb",
        f"URIs: {params['uri']}",
        f"Suites: {params['suite']}",
        f"Components: {' '.join(params['components'])}",
        f"Architectures: {' '.join(params['architectures'])}",
        f"Signed-By: {keyring_path(params)}",
    ]
    return "\n".join(rows) + "\n"


def sources() -> Iterator[Source]:
    """All sources from which apt reads packages."""
    folder = _host.path(SOURCES)
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    for path in ("/etc/apt/sources.list", *(f"{SOURCES}/{name}" for name in names)):
        text = _text(path) or ""
        if path.endswith(".list"):
            yield from _lines(path, text)
        elif path.endswith(".sources"):
            yield from _stanzas(path, text)


def _lines(path: str, text: str) -> Iterator[Source]:
    for row in text.splitlines():
        match = _ONE_LINE.match(row)
        if match:
            words = (match[1] or "").split()
            options = tuple((key, value) for key, _sep, value in (w.partition("=") for w in words))
            yield Source(path, (match[2],), options)


def _stanzas(path: str, text: str) -> Iterator[Source]:
    for block in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for row in block.splitlines():
            if row.startswith("#"):
                continue
            if row[:1].isspace():
                fields[name] = f"{fields.get(name, '')} {row.strip()}"
            elif ":" in row:
                name, _sep, value = row.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() not in _NO and "uris" in fields:
            yield Source(path, tuple(fields["uris"].split()), tuple(fields.items()))


def _open_settings() -> list[str]:
    settings = []
    for row in _command.run(["apt-config", "dump"]).out.splitlines():
        key, _sep, rest = row.partition(" ")
        value = rest.rstrip(";").strip('"')
        if key in _OPEN_SETTINGS and value and value.lower() not in _NO:
            settings.append(f"apt setting {key}={value}")
    return settings


def _invalid(params: _change.Params) -> list[Refusal]:
    blockers = []
    if not _openpgp.FINGERPRINT.fullmatch(_openpgp.normal(params["fingerprint"])):
        blockers.append(
            Refusal(
                "fingerprint_invalid",
                expected="the key's whole fingerprint, 40 or 64 hexadecimal digits",
                found=repr(params["fingerprint"])[:100],
                remedy="take it from the publisher's site, not from the place the key comes from",
            )
        )
    words: Sequence[tuple[str, re.Pattern[str]]] = [
        (params["uri"], _URI),
        *(
            (word, _WORD)
            for word in (
                params["name"], params["suite"], *params["components"], *params["architectures"]
            )
        ),
    ]  # fmt: skip
    blockers += [
        Refusal(
            "source_invalid",
            expected="a repository as http, https or file without credentials, and plain words",
            found=repr(word)[:200],
            remedy="correct the repository's name, uri, suite, components and architectures",
        )
        for word, pattern in words
        if not pattern.fullmatch(word)
    ]
    return blockers


def _unsafe(params: _change.Params, state: State) -> list[Refusal]:
    blockers = []
    if state.open_doors:
        blockers.append(
            Refusal(
                "unauthenticated_source",
                expected="apt to take signed packages only",
                found="; ".join(state.open_doors),
                remedy="remove the option or setting; sign the repository that needs it",
            )
        )
    if state.elsewhere:
        blockers.append(
            Refusal(
                "source_defined_elsewhere",
                expected=f"{params['uri']} in {source_path(params)} alone, under its own key",
                found=", ".join(state.elsewhere),
                remedy="remove the other entry: apt would refuse both or use its trust",
            )
        )
    return blockers


def _text(absolute: str) -> str | None:
    path = _host.path(absolute)
    return path.read_text(errors="replace") if path.is_file() else None
