"""Bar chart of a comparison as SVG, with a bar per metric and capture beside the baseline.

pygal draws it, with a script from its project's site for tooltips. Pages and viewers of the chart
must load nothing, so the script is removed and SVG titles serve as tooltips.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree as ET

import pygal
from pygal.etree import etree
from pygal.style import Style

from reconciler.benchmark.text import SIGNS, figure, percent, plain

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


def svg(comparison: Mapping[str, Any]) -> str:
    """The chart as a document."""
    return ET.tostring(element(comparison), encoding="unicode") + "\n"


def element(comparison: Mapping[str, Any]) -> ET.Element:
    """The chart as an element of a page."""
    # From the bottom of the chart upwards.
    rows = list(_rows(comparison))[::-1]
    values = [row[name] for row in rows for name in ("delta_percent", "reference")]
    reach = max([1.0, *(abs(value) for value in values if value is not None)])
    chart = pygal.HorizontalBar(
        width=_WIDTH,
        height=_FRAME + _ROW * max(len(rows), 1),
        explicit_size=True,
        title="\n".join((*_title(comparison["captures"][0]), _legend(rows))),
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
    chart.x_labels = [_label(row) for row in rows]
    chart.add("difference", [_bar(row) for row in rows])
    if any(row["reference"] is not None for row in rows):
        chart.add("prototype", [_reference(row["reference"]) for row in rows])
    etree.to_etree()
    return _inert(chart.render_tree())


def _inert(root: ET.Element) -> ET.Element:
    """The drawing without scripts and comments."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("script", ET.Comment):
                parent.remove(child)
    root.set("role", "img")
    root.set("aria-label", "Differences between benchmark captures in percent")
    return root


def _title(baseline: Mapping[str, Any]) -> tuple[str, str]:
    system = f"{baseline['kind']}, {baseline['vcpus']} CPUs, tuning {baseline['tuning']}"
    return f"Against {plain(baseline['label'], 60)}", plain(system)


def _legend(rows: list[dict[str, Any]]) -> str:
    parts = [
        f"{SIGNS['better']} better",
        f"{SIGNS['worse']} worse",
        f"{SIGNS['same']} same within spread",
        f"{SIGNS['unclear']} too noisy to tell",
    ]
    if any(row["reference"] is not None for row in rows):
        parts.append("dashed: the prototype's loss")
    return ", ".join(parts)


def _rows(comparison: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row per metric and capture other than the baseline."""
    for row in comparison["rows"]:
        for index, cell in enumerate(row["cells"][1:], 1):
            capture = comparison["captures"][index]
            yield {
                **cell,
                "metric": row["metric"],
                "label": capture["label"],
                "unit": row["unit"],
                "reference": row["reference_percent"] if capture["kind"] == "vm" else None,
            }


def _label(row: Mapping[str, Any]) -> str:
    delta, direction = row["delta_percent"], row["direction"]
    if delta is None:
        result = plain(f"{direction} {row['note']}", 50)
    else:
        result = f"{percent(delta)} {SIGNS[direction]}"
    return f"{plain(row['metric'], 26)}  {plain(row['label'], 21)}  {result}"


def _bar(row: Mapping[str, Any]) -> dict[str, Any]:
    """A bar of length 0 without a difference, because pygal draws no labels without values."""
    value = "" if row["value"] is None else f"{figure(row['value'])} {row['unit']}"
    return {
        "value": row["delta_percent"] or 0,
        "node": {"class": row["direction"]},
        "tooltip": plain(f"{value} {row['note']}".strip()),
    }


def _reference(value: float | None) -> dict[str, Any] | None:
    return None if value is None else {"value": value, "node": {"class": "reference"}}
