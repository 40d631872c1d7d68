"""A tenant's own cloud-config, which the guest of a slice gets after ours.

Only keys that leave users, SSH, network and boot of the guest alone are taken. As YAML it could
hide its size behind aliases, or hold values that JSON, the database or Ansible cannot carry. All
are refused, because a run that broke on them after its clone would leave a blocked slot behind.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from reconciler.model.errors import Problem

HEADER = "#cloud-config"
LIMIT_BYTES = 16 * 1024
# Ansible's recursion over variables ends at about 70 lists in each other.
DEEPEST = 32
# Ansible takes a mapping with such a key for a value of its own, and fails on it.
_ANSIBLES_OWN = "__ansible"
# Errors of a reading of YAML, also those of PyYAML about a value with a tag of another form.
YAML_ERRORS = (
    *(yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError),
    *(LookupError, AttributeError),
)
# Joined with our own lists on the host.
LISTS = ("packages", "runcmd", "write_files")
KEYS = (
    *LISTS, "ca_certs", "final_message", "locale", "mounts", "ntp", "package_update",
    "package_upgrade", "swap", "timezone",
)  # fmt: skip


class _NotCarried(ValueError):
    """A form that does not reach the guest as it is. Its text quotes nothing of the document."""

    @classmethod
    def too_deep(cls) -> _NotCarried:
        return cls(f"more than {DEEPEST} lists in each other")


class _Loader(yaml.SafeLoader):
    """cloud-init's own reading of YAML, without aliases. The deeper a text, the longer the reading
    of each character takes, so it ends at the first node that is too deep.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _NotCarried("an alias (*name), which can hide any size")
        if self._depth > DEEPEST:
            raise _NotCarried.too_deep()
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def parse(text: str) -> dict[str, Any]:
    """The document in the text; {} for no text. Problem `user_data_too_large` or
    `user_data_invalid`, which quotes nothing of the text but its keys.
    """
    if not text:
        return {}
    size = len(text.encode(errors="surrogatepass"))
    if size > LIMIT_BYTES:
        raise Problem(
            "user_data_too_large",
            422,
            expected=f"at most {LIMIT_BYTES} bytes of user_data",
            found=f"{size} bytes",
            remedy="let a command in runcmd fetch what is larger",
        )
    if text.splitlines()[:1] != [HEADER]:
        raise _invalid(f"a first line {HEADER}", "another first line")
    try:
        document = _Loader(text).get_single_data()
        # Dates, binary data, NaN and lone surrogates are YAML, and no JSON.
        json.dumps(document, allow_nan=False).encode()
        _require_carried(document, DEEPEST)
    except _NotCarried as form:
        raise _invalid("YAML of texts, numbers, lists and mappings", str(form)) from None
    except YAML_ERRORS as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark else type(problem).__name__
        raise _invalid("YAML of texts, numbers, lists and mappings", f"an error: {place}") from None
    if not isinstance(document, dict):
        raise _invalid("a mapping", type(document).__name__)
    if others := sorted(str(key)[:64] for key in document if key not in KEYS):
        raise _invalid(f"only the keys {', '.join(sorted(KEYS))}", ", ".join(others[:16]))
    for key in LISTS:
        if not isinstance(document.get(key, []), list):
            raise _invalid(f"a list in {key}", type(document[key]).__name__)
    if not all(isinstance(file, dict) for file in document.get("write_files", [])):
        raise _invalid("a mapping for each file of write_files", "something else")
    # cloud-init makes no script of a list with anything else, so ours would not run either.
    if not all(isinstance(line, str | list | None) for line in document.get("runcmd", [])):
        raise _invalid(
            "a text or a list for each command of runcmd",
            "something else; quote a command that contains a colon and a space",
        )
    return document


def _require_carried(value: Any, deeper: int) -> None:
    """`_NotCarried`, or UnicodeEncodeError for a lone surrogate."""
    if isinstance(value, dict | list | tuple) and not deeper:
        raise _NotCarried.too_deep()
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or key.startswith(_ANSIBLES_OWN):
                raise _NotCarried("a key that is no text, or Ansible's own")
            _require_carried(key, deeper)
            _require_carried(item, deeper - 1)
    # Of YAML's pairs a tuple is made, and of that a list again.
    elif isinstance(value, list | tuple):
        for item in value:
            _require_carried(item, deeper - 1)
    # A lone surrogate does not encode, and PostgreSQL's documents hold no NUL.
    elif isinstance(value, str) and b"\0" in value.encode():
        raise _NotCarried("a text with NUL")


def _invalid(expected: str, found: str) -> Problem:
    return Problem(
        "user_data_invalid",
        422,
        expected=f"user_data in cloud-config: {expected}",
        found=found,
        remedy="see cloud-init's documentation; users, SSH keys and network come from the launch",
    )
