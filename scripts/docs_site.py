"""Documentation site in build/site: the pages of docs/, and a page of each module and role.

`make docs-site`. antsibull-docs reads modules and roles. A link or an anchor that does not exist is
an error, and so is a page that is not in the navigation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docutils.core import publish_parts
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
# Pages outside of docs/, by their names in the site.
OTHERS = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
}
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_MENTION = re.compile(r"`(?:docs/([\w/-]+)\.md|(README|ARCHITECTURE|CONTRIBUTING)\.md)`")


def pages() -> dict[str, Path]:
    """Name of each page in the site, and its source."""
    documents = {file.relative_to(DOCS).as_posix(): file for file in sorted(DOCS.rglob("*.md"))}
    return documents | {name: ROOT / source for name, source in OTHERS.items()}


def linked(name: str, text: str) -> str:
    """Turn mentions of other pages, such as `docs/awx.md`, into links, but not in code blocks."""
    up = "../" * name.count("/")
    names = {Path(source).stem: target for target, source in OTHERS.items()}

    def link(mention: re.Match[str]) -> str:
        target = f"{mention[1]}.md" if mention[1] else names[mention[2]]
        return f"[{target.removesuffix('.md')}]({up}{target})"

    text = text.replace("](docs/", f"]({up}")
    kept = _FENCE.findall(text)
    prose = _MENTION.sub(link, _FENCE.sub("\0", text))
    return re.sub("\0", lambda _: kept.pop(0), prose)


def collection(folder: Path) -> list[dict[str, list[str]]]:
    """Write a page for each plugin and role of the collection; return their navigation."""
    made = ROOT / "build" / "site-collection"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(mode=0o755, parents=True)
    command = [str(Path(sys.executable).with_name("antsibull-docs")), "collection", "--use-current"]
    command += ["--squash-hierarchy", "--fail-on-error", "--output-format", "simplified-rst"]
    subprocess.run(
        [*command, "--dest-dir", str(made), "gpuaas.slice"],
        check=True,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "build" / "collections"),
        },
    )
    folder.mkdir()
    names: dict[str, list[str]] = {}
    for file in sorted(made.glob("*_*.rst")):
        kind = file.stem.rpartition("_")[2]
        heading = "Inventory plugins" if kind == "inventory" else f"{kind.capitalize()}s"
        names.setdefault(heading, []).append(f"collection/{file.stem}.md")
        parts = publish_parts(
            file.read_text(encoding="utf-8"),
            writer="html5",
            settings_overrides={
                "report_level": 3,
                "halt_level": 3,
                "file_insertion_enabled": False,
            },
        )
        # The texts of return values have the addresses of the collections' own site.
        body = re.sub(
            r"""href=(["'])(?:\.\./\.\./gpuaas/slice/)?(\w+)\.(?:rst|html)""",
            r"href=\1\2.html",
            parts["body"],
        )
        head = f"---\ntitle: {file.stem.removesuffix(f'_{kind}')}\n---\n"
        page = f"{head}<h1>{parts['title']}</h1>\n<div>\n{_one_block(body)}\n</div>\n"
        (folder / f"{file.stem}.md").write_text(page, encoding="utf-8")
    return [{kind: files} for kind, files in names.items()]


def _one_block(html: str) -> str:
    # Markdown ends a block of HTML at an empty line, inside <pre> too.
    return re.sub(r"\n(?=\s*\n)", "\n<!-- -->", html)


class _Page(HTMLParser):
    """Links, and what links may point to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "img", "script") and values.get("rel") != "canonical":
            self.loads += [values[name] for name in ("href", "src") if name in values]


def broken(site: Path) -> Iterator[str]:
    """Links of the site's pages that lead nowhere, and everything that they load from elsewhere."""
    files = {file: _Page(file) for file in sorted(site.rglob("*.html"))}
    for file, page in files.items():
        name = file.relative_to(site)
        yield from (f"{name} loads {load}" for load in page.loads if urlsplit(load).netloc)
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            base = site if parts.path.startswith("/") else file.parent
            path = unquote(parts.path).lstrip("/")
            target = (base / path).resolve() if path else file
            if not target.exists():
                yield f"{name}: no page {link}"
            elif (
                parts.fragment
                and target in files
                and unquote(parts.fragment) not in files[target].anchors
            ):
                yield f"{name}: no anchor {link}"


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for name, source in pages().items():
        target = SOURCE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(linked(name, source.read_text(encoding="utf-8")), encoding="utf-8")
    for image in DOCS.glob("*.png"):
        shutil.copy(image, SOURCE)
    added = collection(SOURCE / "collection")
    config = load_config(str(Path(__file__).with_suffix(".yml")))
    config.nav = [*(config.nav or []), {"Collection": added}]
    build(config)
    problems = list(broken(SITE))
    count = len(list(SITE.rglob("*.html")))
    sys.stdout.write("\n".join([*problems, f"{count} pages, {len(problems)} problems", ""]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
