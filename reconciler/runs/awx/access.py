"""Where AWX is, and how it knows us."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.runs.errors import RunError
from reconciler.settings import Settings

_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True)
class AwxAccess:
    """url: of AWX itself, without /api. ca_file: the only one that may vouch for it; None: the
    system's. templates: what the name of a job template has before the name of its playbook.
    """

    url: str
    token_file: Path
    ca_file: Path | None = None
    templates: str = "gpuaas.slice."

    def token(self) -> str:
        """Read for each request, so that a token may be replaced while runs are under way."""
        try:
            text = self.token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as unreadable:
            raise _no_token(self.token_file, type(unreadable).__name__) from unreadable
        if not _TOKEN.fullmatch(text):
            raise _no_token(self.token_file, "none, or more than one line")
        return text

    def document(self) -> dict[str, Any]:
        """What a run keeps of it: paths, never the token."""
        return {
            "url": self.url,
            "token_file": str(self.token_file.resolve()),
            "ca_file": str(self.ca_file.resolve()) if self.ca_file else "",
            "templates": self.templates,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> AwxAccess:
        ca_file = Path(document["ca_file"]) if document["ca_file"] else None
        return cls(document["url"], Path(document["token_file"]), ca_file, document["templates"])


def awx_access(settings: Settings) -> AwxAccess:
    """The site's AWX, as the settings have it."""
    token_file = settings.awx_token_file or Path()
    prefix = settings.awx_template_prefix
    return AwxAccess(settings.awx_url, token_file, settings.awx_ca_file, prefix)


def _no_token(path: Path, found: str) -> RunError:
    return RunError(
        "awx_token_unreadable",
        expected=f"one token in {path}",
        found=found,
        remedy="write the OAuth2 token of AWX's service user there, readable by the reconciler",
    )
