"""Removal of secrets from Ansible's output. Our modules print none; a host may print anything.

Secrets are recognised by form, not by value: the reader of the output does not know the secrets of
the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable

GONE = "[removed]"

_WORDS = "password|passwd|passphrase|secret|token|api_?key|private_?key|credential|signature"
# Hosts write this text, so every pattern is linear in its length. It begins at the start of a run
# of characters, takes the run as a whole (possessively), and never returns to it. Only sets of
# characters are possessive: before Python 3.11.5 a possessive group misses what it should match.
_NAME = rf"(?<![\w.-])(?=[\w.-]*?(?:{_WORDS}))[\w.-]++"
# A complete key, and a key of which the beginning or the end of the text has cut off a part.
_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\A(?:(?!-----BEGIN).)*-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (_KEY, GONE),
    # Our own tokens, and tokens of a web login.
    (re.compile(r"\b(?:gpuaas|enrol)_[A-Za-z0-9_-]{20,}+"), GONE),
    (re.compile(r"(?<![\w-])(?=[\w-]*?\beyJ[\w-]{8})[\w-]++\.[\w-]++\.[\w-]*+"), GONE),
    (re.compile(r"(?i)\b(bearer|basic)\s++[A-Za-z0-9+/=._~-]{8,}+"), rf"\1 {GONE}"),
    # Links: the user part, and the query, which may hold a signature.
    (re.compile(r"((?<!\w)\w++://)[^\s/@\"']++@"), rf"\1{GONE}@"),
    (
        re.compile(r"((?<!\w)\w++://[^\s?\"']++)(\?[^\s\"'\\]++)?"),
        lambda link: f"{link[1]}?{GONE}" if link[2] else link[1],
    ),
    # name: value and name=value, quoted or not; in JSON also with the quotes escaped.
    (re.compile(rf"(?i)({_NAME}\\?[\"']?\s*+[:=]\s*+)(\\?[\"'])(?!\2).+?(\2)"), rf"\1\2{GONE}\3"),
    (re.compile(rf"(?i)({_NAME}\s*+[:=]\s*+)(?![\"'\\\[{{])[^\s,;}}\]]++"), rf"\1{GONE}"),
)


def scrub(text: str) -> str:
    """The text without anything that has the form of a secret."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
