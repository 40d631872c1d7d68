"""Rendering of pages: the template environment and its filters."""

from __future__ import annotations

import json
import re
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from reconciler.api.models import UNPRINTED
from reconciler.model import states

HERE = Path(__file__).parent
# Shown instead of control characters and of marks that turn the direction of a text, in which a
# host or a guest would have another word shown than it wrote. Members' texts have none.
UNSHOWN = "\N{REPLACEMENT CHARACTER}"
_CONTROLS = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f{UNPRINTED}]")
HTMX = "htmx-4.0.1.min.js"
SSE = "hx-sse-4.0.1.min.js"
# Characters of a document. Printing takes time, in which the process answers nobody, and nesting
# can make what is printed fifty times as long as what was sent.
_PRINTED = 64 << 10
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# The colour of a state. The word is always there too.
_TONES = {
    "good": "available ready active succeeded healthy recovered applied pass PASS ok running"
    " normal done",
    "busy": "reserved provisioning releasing cleanup requested bootstrapping verifying cleaning"
    " confirming opened removing converting_to_slice converting_to_baremetal waiting enrolling"
    " starting stopping deploying reconciling accepted",
    "warn": "draining maintenance degraded WARN warn canceled stopped warning drain drained",
    "bad": "cleanup_blocked unreachable failed evicted lost FAIL fail blocked error dead_letter",
}
_TONE = {word: tone for tone, words in _TONES.items() for word in words.split()}
# The sentence of each state of a node or a slot.
_MEANING = {
    member.value: member.meaning
    for kind in (states.NodeState, states.NodeMode, states.SlotState)
    for member in kind
}


def _state(word: Any) -> Markup:
    text = str(word)
    return Markup('<span class="state {}">{}</span>').format(
        _TONE.get(text, "idle"), text.replace("_", " ")
    )


def _when(text: str | None) -> Markup | str:
    """A time in UTC and how far it is from now."""
    if not text:
        return "—"
    at = datetime.fromisoformat(text)
    distance = (at - datetime.now(UTC)).total_seconds()
    words = _duration(abs(distance))
    relative = f"in {words}" if distance > 0 else f"{words} ago"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        text, at.strftime("%Y-%m-%d %H:%M:%S UTC"), relative
    )


def _stamp(text: str | None) -> Markup | str:
    """A time in UTC."""
    if not text:
        return "—"
    at = datetime.fromisoformat(text)
    return Markup('<time datetime="{}">{}</time>').format(text, at.strftime("%Y-%m-%d %H:%M:%S"))


def _duration(seconds: float) -> str:
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= size:
            return (
                f"{seconds / size:.1f} {unit}" if size == _DAY else f"{seconds // size:.0f} {unit}"
            )
    return f"{seconds:.0f} s"


def size(count: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f}".removesuffix(".0") + f" {units[power]}"


def _document(value: Any) -> str:
    """A document as JSON, as much as fits on a page."""
    parts, length = [], 0
    for part in json.JSONEncoder(indent=2, sort_keys=True).iterencode(value):
        parts.append(part)
        length += len(part)
        if length > _PRINTED:
            return "".join(parts)[:_PRINTED] + "\n… The API has the rest."
    return "".join(parts)


def _as_typed(text: Any) -> Markup:
    """A value of a form's field as a person typed it, for a field. What `render` replaces becomes a
    reference: sent again, a field with replacements would be accepted.
    """
    return Markup("").join(map(_referenced, str(text)))


def _referenced(char: str) -> str:
    # Browsers read references to NUL and to C1 controls as other characters.
    if not _CONTROLS.match(char) or char == "\0" or "\x80" <= char <= "\x9f":
        return char
    return Markup("&#{};").format(ord(char))


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "state": _state,
        "when": _when,
        "stamp": _stamp,
        "as_typed": _as_typed,
        "size": size,
        "duration": _duration,
        "document": _document,
    }
    environment.globals |= {
        "new_key": lambda: str(uuid.uuid4()),
        "meaning": lambda word: _MEANING.get(str(word), ""),
        "scripts": (HTMX, SSE),
        "states": states,
    }
    return environment


_TEMPLATES = _environment()


def render(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """The page of a template."""
    page = _TEMPLATES.get_template(template).render(values)
    return HTMLResponse(_CONTROLS.sub(UNSHOWN, page), status)


def render_block(template: str, name: str, **values: Any) -> str:
    """A block of a template by itself, as a stream sends it."""
    macros = _TEMPLATES.get_template("macros.html").make_module(values)
    page = _TEMPLATES.get_template(template)
    parts = page.blocks[name](page.new_context({**values, "ui": macros}))
    return _CONTROLS.sub(UNSHOWN, "".join(parts))
