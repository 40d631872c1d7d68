"""Firmware of a machine before and after a tenant who was root, and its differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Sections of a host's discovery, and of its BMC's Redfish.
HOST = ("bios", "uefi", "nvme", "adapters", "dpu", "gpu", "bmc")
REDFISH = ("redfish_firmware", "redfish_users", "redfish_boot")
# Sections of Redfish that show the same as a section of the host.
_COVERED_BY = {
    "bios": REDFISH[:1],
    "nvme": REDFISH[:1],
    "adapters": REDFISH[:1],
    "gpu": REDFISH[:1],
    "bmc": REDFISH,
}
# A host's answer is bounded before it is stored: rows, entries of a section, characters of a text.
MOST_ROWS, MOST_ENTRIES, LONGEST = 100, 512, 300
_NOT_RECORDED = "not recorded"


def bounded(report: object, sections: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The known sections of a report and the reasons for those that could not be read."""
    read = _mapping(_mapping(report).get("sections"))
    kept = {name: _texts(read[name]) for name in sections if isinstance(read.get(name), Mapping)}
    reasons = _texts(_mapping(report).get("unreadable"))
    ours = {key: text for key, text in reasons.items() if key.split(" ")[0] in sections}
    return {"sections": kept, "unreadable": ours}


def merged(host: Mapping[str, Any], redfish: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The report of the host with that of its BMC."""
    return {
        part: {**_mapping(host.get(part)), **_mapping(redfish.get(part))}
        for part in ("sections", "unreadable")
    }


def of_bmc(report: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The part of a merged report that is the BMC's, None without any."""
    kept = {
        part: {key: value for key, value in rows.items() if key.split(" ")[0] in REDFISH}
        for part, rows in report.items()
    }
    return kept if any(kept.values()) else None


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], sections: tuple[str, ...] = HOST + REDFISH
) -> list[dict[str, str]]:
    """Differences by section and name. A value that a side has not read counts as different."""
    rows = [
        row
        for section in sections
        for row in _compare(section, before, after)
        if not (row["change"] == "not_compared" and _covered(section, before, after))
    ]
    if not _mapping(before.get("sections")):
        rows = [_row("", "", "not_compared", _NOT_RECORDED, "")]
    if len(rows) > MOST_ROWS:
        more = f"{len(rows) - MOST_ROWS} more differences"
        rows = [*rows[:MOST_ROWS], _row("", "", "more", "", more)]
    return rows


def approvable(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A plan of changes with the digest by which a person approves it; {} without a change.

    The host computes the same digest (`_bios.digest`) and changes nothing under another.
    """
    if not steps:
        return {}
    text = json.dumps(steps, sort_keys=True, separators=(",", ":"))
    digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return {"digest": digest, "differences": list(steps)}


def _compare(
    section: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    was, now = (_mapping(side.get("sections")).get(section) for side in (before, after))
    reasons = [_unread(section, side) for side in (before, after)]
    if was is None and now is None and not any(reasons):
        return
    if was is None or now is None:
        shown = [
            reason.get(section, "recorded" if values is not None else _NOT_RECORDED)
            for reason, values in zip(reasons, (was, now), strict=True)
        ]
        yield _row(section, "", "not_compared", *shown)
        return
    unread = {key.removeprefix(section).strip() for reason in reasons for key in reason}
    for name in sorted({*was, *now, *unread}):
        texts = [
            reason.get(f"{section} {name}".strip(), values.get(name, ""))
            for reason, values in zip(reasons, (was, now), strict=True)
        ]
        if name in unread:
            yield _row(section, name, "not_compared", *texts)
        elif was.get(name) != now.get(name):
            change = "added" if name not in was else "removed" if name not in now else "changed"
            yield _row(section, name, change, *texts)


def _unread(section: str, side: Mapping[str, Any]) -> dict[str, str]:
    reasons = _mapping(side.get("unreadable"))
    return {key: text for key, text in reasons.items() if key.split(" ")[0] == section}


def _covered(section: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    by = _COVERED_BY.get(section, ())
    read = [_mapping(side.get("sections")) for side in (before, after)]
    return bool(by) and all(name in side for name in by for side in read)


def _row(section: str, name: str, change: str, before: str, after: str) -> dict[str, str]:
    return {"section": section, "name": name, "change": change, "before": before, "after": after}


def _texts(values: object) -> dict[str, str]:
    """At most MOST_ENTRIES short texts. A name that is cut off stays distinct by its number."""
    texts = {}
    for number, (key, value) in enumerate(sorted(_mapping(values).items())):
        if number == MOST_ENTRIES:
            texts["…"] = f"{len(_mapping(values)) - MOST_ENTRIES} more entries"
            break
        name = str(key) if len(str(key)) <= LONGEST else f"{str(key)[:LONGEST]}… {number}"
        texts[name] = str(value)[:LONGEST]
    return texts


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
