"""Generator of docs/configuration.md from the settings.

`python -m reconciler.service.configuration` writes the page. A test compares it with the settings,
so every setting has a description.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic import IPvAnyAddress
from pydantic.fields import FieldInfo

from reconciler.settings import CONFIG_FILE, CONFIG_FILE_VARIABLE, PREFIX, PROJECT, Settings

PAGE = PROJECT / "docs" / "configuration.md"
_HEAD = f"""\
# Configuration

Reference of all settings, for operators of the reconciler. The service and every command that opens
its database read them.

Each setting is an environment variable. The file `{CONFIG_FILE}` may contain the same names, one
`NAME=value` per line; `{CONFIG_FILE_VARIABLE}` names another file. The environment overrides the
file, and the file overrides the default. `gpuaas doctor` reports refused values and unknown names.

This page is generated from `reconciler/settings.py` by
`python -m reconciler.service.configuration`; a test compares them.

| variable | default | allowed | meaning |
|---|---|---|---|
"""
# Variables of the commands, which are not settings of the service.
OTHERS = {
    CONFIG_FILE_VARIABLE: f"The file of settings, which must exist. Default: {CONFIG_FILE}.",
    f"{PREFIX}API": "Address of the service for commands. Default: `GPUAAS_LISTEN`.",
    f"{PREFIX}TOKEN_FILE": "A file with the token that the commands use.",
    f"{PREFIX}PROJECT": "The default project of commands.",
    f"{PREFIX}OIDC_CLIENT_ID": "Client id of `gpuaas login` at the provider (docs/access.md).",
}


# Values of reconciler/shipped.py in an installation without a checkout.
_INSTALLED = {
    "state_dir": "`/var/lib/gpuaas`",
    "collections_path": "the collection of this version",
    "profiles_dir": "the profiles of this version",
}


def page() -> str:
    """The whole document."""
    rows = [_row(name, field) for name, field in Settings.model_fields.items()]
    others = [f"- `{name}`: {text}" for name, text in OTHERS.items()]
    lines = [*rows, "", "Variables of the commands, read from the environment only:", "", *others]
    return _HEAD + "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{PREFIX}{name.upper()}` | {_default(name, field)} | {_allowed(field)} | {text} |"


def _default(name: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Path) and value.is_relative_to(PROJECT):
        return f"{_INSTALLED[name]}; in a checkout `{value.relative_to(PROJECT)}`"
    return "unset" if value in (None, "") else f"`{value}`"


def _allowed(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    limits = [_limit(rule) for rule in field.metadata]
    return " ".join([_kind(field), *filter(None, limits)])


def _kind(field: FieldInfo) -> str:
    kinds: dict[Any, str] = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "`true`, `false`",
        Path: "path",
        IPvAnyAddress: "IP address",
    }
    types = (field.annotation, *get_args(field.annotation))
    options = [option for option in types if option in kinds]
    return kinds[options[0]] if options else "text"


def _limit(rule: Any) -> str:
    for name, word in (("ge", "from"), ("gt", "above"), ("le", "to"), ("lt", "below")):
        if hasattr(rule, name):
            return f"{word} {getattr(rule, name)}"
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
