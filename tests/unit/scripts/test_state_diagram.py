"""The diagrams in the documents are those of the code."""

from __future__ import annotations

from pathlib import Path

from scripts.state_diagram import markdown, page

ROOT = Path(__file__).resolve().parents[3]


def test_the_documents_show_the_states_of_the_code() -> None:
    """When this fails: python -m scripts.state_diagram."""
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    assert page(architecture) == architecture
    assert (ROOT / "docs" / "states.md").read_text() == f"# States\n\n{markdown()}"
