"""Write docs/*-coverage.md; with --check only say which of them is not current."""

from __future__ import annotations

import sys

from tests.coverage.marks import ROOT, collect, marked
from tests.coverage.page import markdown
from tests.coverage.rows import DOCUMENTS


def main(argv: list[str]) -> int:
    files = collect(marked())
    stale = []
    for document in DOCUMENTS:
        path, text = ROOT / document.path, markdown(document, files)
        if not path.exists() or path.read_text() != text:
            stale.append(document.path)
            if "--check" not in argv:
                path.write_text(text)
    if "--check" in argv and stale:
        print(f"not current: {', '.join(stale)}; run python -m tests.coverage", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
