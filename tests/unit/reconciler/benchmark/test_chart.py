"""Chart and page: well-formed, to scale, and inert with any text in a capture."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from reconciler.benchmark import chart
from reconciler.benchmark.compare import compare, figure, percent
from reconciler.model.storable import shown
from tests.unit.reconciler.benchmark.conftest import made, tree
from tests.unit.reconciler.benchmark.test_compare import BARE, SLICE

pytestmark = pytest.mark.covers("HOST-12")

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    "</text></svg><script>alert(1)</script>\"' onload=x <img src=//evil>"
    "\x1b[2J\x00\u202e\ud800 &amp;"
)


class Page(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_bars_are_to_scale() -> None:
    root = tree(chart.svg(compare([BARE, SLICE])))
    bars = [each for each in root.iter(f"{SVG}g") if each.get("class") == "bar"]
    areas = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "background"]
    shown, dashed = {}, []
    for bar in bars:
        rectangle = bar.find(f"{SVG}rect")
        assert rectangle is not None
        if rectangle.get("class") == "reference":
            dashed.append(rectangle)
            continue
        value = re.sub(r" .*", "", bar.findtext(f"{SVG}title") or "")
        shown[value] = float(rectangle.get("width", "0"))
    assert len(shown) == 6
    side = min(float(each.get("width", "0")) for each in areas) / 2
    assert shown["223"] == pytest.approx(side, rel=0.05), "the largest difference fills its side"
    assert shown["8,300"] == pytest.approx(shown["223"] * 17 / 43, abs=0.1)
    texts = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert any("-43.0 % \u25bc" in text and "slice-vm-j22u15-s01" in text for text in texts)
    assert len(dashed) == 4


def test_a_missing_figure_is_named() -> None:
    text = chart.svg(compare([made("a", {"gpu.fp64": [1.0]}), made("b", {})]))
    assert "missing unavailable: tool_missing" in text
    assert 'class="better"' not in text


def test_a_chart_is_reproducible() -> None:
    """The same captures make the same file."""
    text = chart.svg(compare([BARE, SLICE]))
    assert text == chart.svg(compare([BARE, SLICE]))
    assert text.startswith("<svg")
    assert "<!--" not in text and "<script" not in text
    assert not re.search(r"(src|href)=|url\(|@import", text)


def test_no_difference_at_all() -> None:
    tree(chart.svg(compare([made("a", {}), made("b", {})])))


@pytest.mark.parametrize("count", [2, 3])
def test_foreign_text_stays_text(count: int) -> None:
    captures = [made(HOSTILE[:100], {"cpu.integer": [float(each + 1)]}) for each in range(count)]
    for each in captures:
        each["host"]["hostname"] = each["host"]["cpu_model"] = HOSTILE
        each["probes"][0]["tool"]["version"] = each["probes"][0]["metrics"][0]["unit"] = HOSTILE
    captures[1]["probes"][0]["tool"]["version"] = HOSTILE[::-1]
    captures[1]["host"]["cpu_model"] = HOSTILE[::-1]
    comparison = compare(captures)
    shown = chart.svg(comparison)
    drawn = tree(shown)
    kinds = {each.tag.removeprefix(SVG) for each in drawn.iter()}
    assert kinds <= {"svg", "defs", "style", "g", "path", "rect", "text", "title", "desc"}
    assert not any(name.startswith("on") for each in drawn.iter() for name in each.attrib)
    text = chart.html(comparison)
    read = Page(text)
    assert {"script", "img", "iframe"}.isdisjoint(read.tags)
    names = {name for name, _ in read.attributes}
    assert not any(name.startswith("on") or name in ("href", "src") for name in names)
    for document in (shown, text):
        document.encode()
        assert "<script" not in document
        assert not set(document) & set("\x00\x1b\u202e")


def test_a_page_is_complete_and_loads_nothing() -> None:
    text = chart.html(compare([BARE, SLICE]))
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
    for word in ("baremetal-j22u15", "-17.0 % worse", "rdma.write", "-43.0 %"):
        assert word in text


def test_figures() -> None:
    assert [figure(value) for value in (0.01234, 33.456, 168113.0)] == ["0.0123", "33.5", "168,113"]
    assert [percent(value) for value in (-43.04, 0.0, -0.01, 2.16)] == [
        "-43.0 %",
        "+0.0 %",
        "+0.0 %",
        "+2.2 %",
    ]
    assert shown("a\nb\x1b") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
