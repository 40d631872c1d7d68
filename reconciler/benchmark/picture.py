"""A comparison as SVG: a bar per metric and capture, left or right of the baseline. Pure.

Built as a tree, never as text, so that a label can only ever be a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree as ET

from reconciler.benchmark.text import SIGNS, figure, percent, plain

_WIDTH, _TOP, _LINE = 960, 96, 22
_NAMES, _ZERO, _REACH = 24, 640, 190
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2733; }
.title { font-size: 17px; font-weight: 600; } .soft { fill: #5b6875; }
.axis { stroke: #8a96a3; } .reference { stroke: #8a96a3; stroke-dasharray: 3 3; }
.better { fill: #1f6fb4; } .worse { fill: #c4520e; } .same, .unclear { fill: #9aa5b1; }
.back { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0; } .soft { fill: #a3afbb; } .back { fill: #14191f; }
  .better { fill: #5aa9ea; } .worse { fill: #f08a4b; }
}
"""


def svg(comparison: Mapping[str, Any]) -> str:
    """The picture as a document of its own."""
    return ET.tostring(element(comparison), encoding="unicode") + "\n"


def element(comparison: Mapping[str, Any]) -> ET.Element:
    """The picture, for a page to contain."""
    lines = list(_lines(comparison))
    height = _TOP + _LINE * len(lines) + 24
    root = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_WIDTH} {height}",
            "width": str(_WIDTH),
            "height": str(height),
            "role": "img",
            "aria-label": "Differences between benchmark captures in percent",
        },
    )
    ET.SubElement(root, "style").text = _STYLE
    ET.SubElement(root, "rect", {"class": "back", "width": str(_WIDTH), "height": str(height)})
    _heading(root, comparison)
    scale = _REACH / max([1.0, *(abs(value) for line in lines for value in _values(line))])
    for number, line in enumerate(lines):
        _draw(root, line, _TOP + _LINE * number, scale)
    axis = {"x1": str(_ZERO), "x2": str(_ZERO), "y1": str(_TOP - 6), "y2": str(height - 18)}
    ET.SubElement(root, "line", {"class": "axis", **axis})
    return root


def _heading(root: ET.Element, comparison: Mapping[str, Any]) -> None:
    first = comparison["captures"][0]
    _text(root, _NAMES, 30, "Against " + plain(first["label"], 60), "title")
    what = f"{first['kind']}, {first['vcpus']} CPUs, tuning {first['tuning']}"
    _text(root, _NAMES, 50, plain(what), "soft")
    legend = f"{SIGNS['better']} better  {SIGNS['worse']} worse  {SIGNS['same']} same within spread"
    _text(root, _NAMES, 70, f"{legend}  {SIGNS['unclear']} too noisy to say", "soft")
    if any(row["reference_percent"] is not None for row in comparison["rows"]):
        _text(root, _ZERO, 70, "dashed: the prototype's loss", "soft")


def _lines(comparison: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One line per metric and capture other than the baseline."""
    for row in comparison["rows"]:
        for index, cell in enumerate(row["cells"][1:], 1):
            other = comparison["captures"][index]
            yield {
                **cell,
                "name": row["metric"] if index == 1 else "",
                "label": other["label"],
                "unit": row["unit"],
                "reference": row["reference_percent"] if other["kind"] == "vm" else None,
            }


def _values(line: Mapping[str, Any]) -> list[float]:
    return [line[name] for name in ("delta_percent", "reference") if line[name] is not None]


def _draw(root: ET.Element, line: Mapping[str, Any], top: int, scale: float) -> None:
    base = top + 15
    _text(root, _NAMES, base, plain(line["name"], 26))
    _text(root, _NAMES + 170, base, plain(line["label"], 21), "soft")
    delta = line["delta_percent"]
    if delta is None:
        _text(root, _ZERO + 8, base, plain(f"{line['direction']} {line['note']}", 50), "soft")
        return
    length = abs(delta) * scale
    left = _ZERO - length if delta < 0 else float(_ZERO)
    bar = ET.SubElement(
        root,
        "rect",
        {
            "class": line["direction"],
            "x": f"{left:.1f}",
            "y": str(top + 3),
            "width": f"{max(length, 1):.1f}",
            "height": str(_LINE - 7),
            "rx": "2",
        },
    )
    title = f"{figure(line['value'])} {line['unit']}"
    ET.SubElement(bar, "title").text = plain(f"{title} {line['note']}")
    if line["reference"] is not None:
        place = f"{_ZERO + line['reference'] * scale:.1f}"
        mark = {"x1": place, "x2": place, "y1": str(top), "y2": str(top + _LINE - 2)}
        ET.SubElement(root, "line", {"class": "reference", **mark})
    said = f"{percent(delta)} {SIGNS[line['direction']]}"
    if delta < 0:
        _text(root, left - 6, base, said, anchor="end")
    else:
        _text(root, left + length + 6, base, said)


def _text(
    root: ET.Element, x: float, y: float, text: str, style: str = "", anchor: str = "start"
) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    ET.SubElement(root, "text", place | ({"class": style} if style else {})).text = text
