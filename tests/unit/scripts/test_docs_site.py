"""Documentation site: dead links and foreign content are named; the whole site is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import docs_site


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="deep/page.html#here">ok</a><a href="#top">ok</a>'
        '<a href="gone.html">1</a><a href="deep/page.html#gone">2</a>'
        '<a href="https://example.org/x">ok</a><script src="https://cdn.example/x.js"></script>'
    )
    (tmp_path / "deep" / "page.html").write_text(
        '<p id="here"><a href="../index.html">ok</a><a href="/index.html">ok</a>'
    )
    assert sorted(docs_site.broken(tmp_path)) == [
        "index.html loads https://cdn.example/x.js",
        "index.html: no anchor deep/page.html#gone",
        "index.html: no page gone.html",
    ]


def test_a_mention_of_a_page_is_a_link_outside_of_code() -> None:
    text = "See `docs/awx.md`, `ARCHITECTURE.md`.\n\n```\ncat `docs/awx.md`\n```\n"
    assert docs_site.linked("runbooks/leader.md", text) == (
        "See [awx](../awx.md), [architecture](../architecture.md).\n\n```\ncat `docs/awx.md`\n```\n"
    )


@pytest.mark.slow
def test_the_whole_site_is_built_without_a_problem() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.docs_site"],
        cwd=docs_site.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (docs_site.SITE / "collection" / "slice_lease_module.html").is_file()
