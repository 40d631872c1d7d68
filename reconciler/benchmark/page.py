"""HTML page of a comparison: chart, table and notes, without a script or anything to load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from reconciler.benchmark.chart import element
from reconciler.benchmark.text import cell, percent, plain

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; } body { font: 15px system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; } svg { max-width: 100%; height: auto; }
th, td { border-bottom: 1px solid #8a96a3; padding: .3rem .8rem; text-align: left; }
"""


def html(comparison: Mapping[str, Any]) -> str:
    """The page as a document."""
    root = ET.Element("html", {"lang": "en"})
    head, body = ET.SubElement(root, "head"), ET.SubElement(root, "body")
    ET.SubElement(head, "meta", {"charset": "utf-8"})
    ET.SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    ET.SubElement(head, "title").text = "Benchmark comparison"
    ET.SubElement(head, "style").text = _STYLE
    ET.SubElement(body, "h1").text = "Benchmark comparison"
    captures = comparison["captures"]
    names = ("label", "kind", "tuning", "vcpus", "hostname", "started_at")
    _table(body, names, [[each[name] for name in names] for each in captures])
    body.append(element(comparison))
    heads = ["metric", "unit", *(each["label"] for each in captures), "prototype"]
    _table(body, heads, [_line(row) for row in comparison["rows"]])
    notes = ET.SubElement(body, "ul")
    for note in comparison["notes"]:
        ET.SubElement(notes, "li").text = plain(note, 500)
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def _line(row: Mapping[str, Any]) -> list[str]:
    reference = row["reference_percent"]
    text = "" if reference is None else percent(reference)
    return [row["metric"], row["unit"], *(cell(each) for each in row["cells"]), text]


def _table(body: ET.Element, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = ET.SubElement(body, "table")
    line = ET.SubElement(table, "tr")
    for name in heads:
        ET.SubElement(line, "th").text = plain(name)
    for row in rows:
        line = ET.SubElement(table, "tr")
        for value in row:
            ET.SubElement(line, "td").text = plain(value)
