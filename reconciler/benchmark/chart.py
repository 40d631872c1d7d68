"""Pictures of a comparison: an SVG bar chart, and an HTML page that needs nothing else. Pure.

pygal draws the chart, with a script from its project's site for tooltips. Pages and viewers of the
chart must load nothing, so the script is removed and SVG titles serve as tooltips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

import pygal
from pygal.etree import etree
from pygal.style import Style

from reconciler.benchmark.compare import SIGNS, cell_text, figure, percent
from reconciler.model.storable import shown

_WIDTH, _ROW = 960, 28
# Height of title and axis together.
_FRAME = 140
_STYLE = Style(
    font_family="system-ui, sans-serif",
    background="#ffffff",
    plot_background="#ffffff",
    foreground="#1c2733",
    foreground_strong="#1c2733",
    foreground_subtle="#8a96a3",
    guide_stroke_color="#c8d0d8",
    label_font_size=13,
    major_label_font_size=13,
    title_font_size=15,
    no_data_font_size=15,
    opacity="1",
)
_LEGEND = ("better", "worse", "same within spread", "too noisy to tell")
_CSS = """inline:
.better, .worse, .same, .unclear { stroke: none }
.better { fill: #1f6fb4 } .worse { fill: #c4520e } .same, .unclear { fill: #9aa5b1 }
.missing, .incomparable { fill: none }
.reference { fill: none; stroke: #8a96a3; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  #chart-comparison .background { fill: #14191f }
  #chart-comparison text { fill: #e6ebf0 }
  .better { fill: #5aa9ea } .worse { fill: #f08a4b }
}
"""
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE_STYLE = """
:root { color-scheme: light dark; } body { font: 15px system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; } svg { max-width: 100%; height: auto; }
th, td { border-bottom: 1px solid #8a96a3; padding: .3rem .8rem; text-align: left; }
"""


def svg(comparison: Mapping[str, Any]) -> str:
    """The chart as a document."""
    return ET.tostring(_chart(comparison), encoding="unicode") + "\n"


def html(comparison: Mapping[str, Any]) -> str:
    """The page as a document, with chart, tables and notes."""
    root = ET.Element("html", {"lang": "en"})
    head, body = ET.SubElement(root, "head"), ET.SubElement(root, "body")
    policy = {"http-equiv": "Content-Security-Policy", "content": _PAGE_POLICY}
    ET.SubElement(head, "meta", {"charset": "utf-8"})
    ET.SubElement(head, "meta", policy)
    ET.SubElement(head, "title").text = "Benchmark comparison"
    ET.SubElement(head, "style").text = _PAGE_STYLE
    ET.SubElement(body, "h1").text = "Benchmark comparison"
    captures = comparison["captures"]
    names = ("label", "kind", "tuning", "vcpus", "hostname", "started_at")
    _add_table(body, names, [[each[name] for name in names] for each in captures])
    body.append(_chart(comparison))
    lines = []
    for row in comparison["rows"]:
        reference = row["reference_percent"]
        prototype = "" if reference is None else percent(reference)
        lines.append([row["metric"], row["unit"], *map(cell_text, row["cells"]), prototype])
    heads = ["metric", "unit", *(each["label"] for each in captures), "prototype"]
    _add_table(body, heads, lines)
    notes = ET.SubElement(body, "ul")
    for note in comparison["notes"]:
        ET.SubElement(notes, "li").text = shown(note, 500)
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def _add_table(body: ET.Element, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = ET.SubElement(body, "table")
    for kind, row in (("th", heads), *(("td", row) for row in rows)):
        line = ET.SubElement(table, "tr")
        for value in row:
            ET.SubElement(line, kind).text = shown(value)


def _chart(comparison: Mapping[str, Any]) -> ET.Element:
    """The chart as an element, with a bar per metric and capture other than the baseline."""
    baseline, *others = comparison["captures"]
    labels, bars, references = [], [], []
    for row in comparison["rows"]:
        for capture, cell in zip(others, row["cells"][1:], strict=True):
            labels.append(_label(row["metric"], capture["label"], cell))
            value = "" if cell["value"] is None else f"{figure(cell['value'])} {row['unit']}"
            bars.append(
                {
                    # Without a difference the length is 0: pygal needs a value to draw a label.
                    "value": cell["delta_percent"] or 0,
                    "node": {"class": cell["direction"]},
                    "tooltip": shown(f"{value} {cell['note']}".strip()),
                }
            )
            loss = row["reference_percent"] if capture["kind"] == "vm" else None
            dashed = {"class": "reference"}
            references.append(None if loss is None else {"value": loss, "node": dashed})
    drawn: list[Any] = [*bars, *filter(None, references)]
    reach = max([1.0, *(abs(bar["value"]) for bar in drawn)])
    parts = [f"{sign} {text}" for sign, text in zip(SIGNS.values(), _LEGEND, strict=True)]
    if any(references):
        parts.append("dashed: the prototype's loss")
    system = f"{baseline['kind']}, {baseline['vcpus']} CPUs, tuning {baseline['tuning']}"
    title = (f"Against {shown(baseline['label'], 60)}", shown(system), ", ".join(parts))
    chart = pygal.HorizontalBar(
        width=_WIDTH,
        height=_FRAME + _ROW * max(len(bars), 1),
        explicit_size=True,
        title="\n".join(title),
        range=(-reach, reach),
        max_scale=8,
        value_formatter=lambda value: f"{value:+.3g} %",
        show_legend=False,
        truncate_label=-1,
        no_data_text="no metric to compare",
        style=_STYLE,
        css=["file://style.css", "file://graph.css", _CSS],
        js=[],
    )
    # A fixed id, so that the same comparison gives the same file.
    chart.uuid = "comparison"
    # pygal draws from the bottom upwards.
    chart.x_labels = labels[::-1]
    chart.add("difference", bars[::-1])
    if any(references):
        chart.add("prototype", references[::-1])
    etree.to_etree()
    root: ET.Element = chart.render_tree()
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("script", ET.Comment):
                parent.remove(child)
    root.set("role", "img")
    root.set("aria-label", "Differences between benchmark captures in percent")
    return root


def _label(metric: str, capture: str, cell: Mapping[str, Any]) -> str:
    delta, direction = cell["delta_percent"], cell["direction"]
    if delta is None:
        result = shown(f"{direction} {cell['note']}", 50)
    else:
        result = f"{percent(delta)} {SIGNS[direction]}"
    return f"{shown(metric, 26)}  {shown(capture, 21)}  {result}"
