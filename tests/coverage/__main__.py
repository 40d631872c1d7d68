"""Write docs/*-coverage.md; with --check only say which of them is not current.

Either way it fails when no test shows a row: what has no test is not promised.
"""

from __future__ import annotations

import sys

from tests.coverage.marks import ROOT, collect, marked
from tests.coverage.page import markdown, unshown
from tests.coverage.rows import DOCUMENTS


def main(argv: list[str]) -> int:
    files = collect(marked())
    stale: list[str] = []
    missing: list[str] = []
    for document in DOCUMENTS:
        path, text = ROOT / document.path, markdown(document, files)
        missing += unshown(document, files)
        if not path.exists() or path.read_text() != text:
            stale.append(document.path)
            if "--check" not in argv:
                path.write_text(text)
    if "--check" in argv and stale:
        print(f"not current: {', '.join(stale)}; run python -m tests.coverage", file=sys.stderr)
        return 1
    if missing:
        print(f"shown by no test: {', '.join(missing)}; mark one with covers", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
