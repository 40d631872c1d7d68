"""Tuning profiles that an operator opted in to on this host, recorded on the host.

The record is on the host because no other place keeps the opt-in. Later runs have only the hardware
profile, and must neither miss nor undo the opt-in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.boot._tuning_profiles import PROFILES
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

FILE = "/etc/gpuaas/tuning.json"
SETTING = "GPUAAS_SLICE_TUNING"
# `none` means "no tuning". An empty string cannot mean it, because templates render an undefined
# variable as an empty string.
NOTHING = "none"

_UNREADABLE = "tuning_record_unreadable"
_REPAIR = (
    "nothing was done; repair the file, or bootstrap the host again with"
    f" {SETTING} naming the profiles, or {NOTHING}"
)


def recorded() -> tuple[str, ...] | None:
    """The recorded names; None without a record. An unreadable record raises a Refusal."""
    record = _host.document(FILE, code=_UNREADABLE, remedy=_REPAIR)
    if record is None:
        return None
    names = record.get("profiles")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise Refusal(
        _UNREADABLE,
        expected=f"a list of names as `profiles` in {FILE}",
        found=f"{FILE}: {json.dumps(names)}",
        remedy=_REPAIR,
    )


def names(profiles: Sequence[str], opted_in: Sequence[str] | None = None) -> list[str]:
    """The hardware profile's names plus the opted-in names, by default those of the record."""
    more = (recorded() or ()) if opted_in is None else opted_in
    return list(dict.fromkeys([*profiles, *more]))


def unknown(profiles: Sequence[str]) -> list[Refusal]:
    """Unknown names in the record; a newer release may have written them."""
    unknown_names = [name for name in profiles if name not in PROFILES]
    if not unknown_names:
        return []
    return [
        Refusal(
            "tuning_unknown",
            expected=f"{', '.join(PROFILES)} in the hardware profile and in {FILE}",
            found=", ".join(unknown_names),
            remedy="nothing was done; run a release that knows the name, or bootstrap the host"
            f" with {SETTING} naming the profiles, or {NOTHING}",
        )
    ]


def text(opted_in: Sequence[str]) -> str:
    """Content of the record."""
    return json.dumps({"profiles": list(opted_in)}) + "\n"


def setting(value: str) -> list[str] | None:
    """Profiles in the operator's setting; None when it is empty."""
    chosen = list(dict.fromkeys(name for name in value.split(",") if name))
    if chosen == [NOTHING]:
        return []
    wrong = [name for name in chosen if name not in PROFILES]
    if wrong:
        raise Refusal(
            "setting_invalid",
            expected=f"{SETTING} of {', '.join(PROFILES)}, or {NOTHING} alone",
            found=", ".join(wrong),
            remedy="nothing was done; correct the setting",
        )
    return chosen or None
