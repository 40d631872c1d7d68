"""State diagrams of the transition table (Mermaid).

`python -m scripts.state_diagram` writes the slot's diagram into ARCHITECTURE.md and all diagrams
into docs/states.md. A test compares both files with the table.
"""

from __future__ import annotations

from pathlib import Path

from reconciler.model.transitions import DEADLINES, ENTITIES, TABLE


def mermaid(entity: str) -> str:
    """Diagram of an entity; events between the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in TABLE:
        if row.entity == entity:
            arrows.setdefault((row.source, row.target), []).append(row.event)
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(ENTITIES[entity]))}"]
    lines += [f"    {a} --> {b}: {', '.join(names)}" for (a, b), names in arrows.items()]
    sources = {a for a, _ in arrows}
    lines += [f"    {state} --> [*]" for state in ENTITIES[entity] if state not in sources]
    return "\n".join(lines)


def section(entity: str) -> str:
    """Heading and diagram of an entity, then the sentence and time limit of each state."""
    title = entity.replace("_", " ").capitalize()
    lines = [f"### {title}", "", "```mermaid", mermaid(entity), "```", ""]
    for state in ENTITIES[entity]:
        deadline = DEADLINES.get((entity, state))
        limit = f" (at most {deadline.seconds} s)" if deadline else ""
        lines.append(f"- **{state}**{limit}: {state.meaning}")
    return "\n".join(lines)


def markdown() -> str:
    """Sections of every entity, for docs/states.md."""
    return "\n\n".join(section(entity) for entity in ENTITIES) + "\n"


def page(text: str) -> str:
    """ARCHITECTURE.md with the slot's section between the two `states` marks."""
    before, _, rest = text.partition("<!-- states -->")
    _, _, after = rest.partition("<!-- /states -->")
    return f"{before}<!-- states -->\n{section('slot')}\n<!-- /states -->{after}"


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    architecture = root / "ARCHITECTURE.md"
    architecture.write_text(page(architecture.read_text()))
    (root / "docs" / "states.md").write_text(f"# States\n\n{markdown()}")
