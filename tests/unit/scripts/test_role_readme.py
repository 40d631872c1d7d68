"""The READMEs of the roles document the roles' variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import role_readme

pytestmark = pytest.mark.covers("ECO-1")

ROLES = role_readme.roles()


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()) or {}


def test_every_role_has_argument_specifications() -> None:
    folders = {path for path in (role_readme.ROOT / "roles").iterdir() if path.is_dir()}
    assert set(ROLES) == folders


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_readme_is_current(role: Path) -> None:
    """When this fails: python -m scripts.role_readme."""
    assert (role / "README.md").read_text() == role_readme.readme(role)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_the_documented_defaults_are_the_real_ones(role: Path) -> None:
    specs = load(role / "meta" / "argument_specs.yml")["argument_specs"]
    options = {name: option for spec in specs.values() for name, option in spec["options"].items()}
    defaults = load(role / "defaults" / "main.yml")
    assert set(defaults) <= set(options), "a default that nobody documents"
    for name, option in options.items():
        if "default" in option:
            assert defaults[name] == option["default"], name
        assert not (option.get("required") and name in defaults), name


def test_markup_becomes_markdown() -> None:
    text = (
        "With C(a) or O(b=V(c\\)), see L(the\n docs,https://x/y), U(https://z) and I(not) B(now)."
    )
    assert role_readme.markdown("C(a|b) M(gpuaas.slice.slice_vm)") == (
        "`a|b` `gpuaas.slice.slice_vm`"
    )
    assert "[the docs](https://x/y), <https://z> and *not* **now**." in role_readme.markdown(text)
    assert role_readme.markdown("DEBIAN(12)") == "DEBIAN(12)"


def test_keys_of_dictionaries_and_every_kind_of_default(tmp_path: Path) -> None:
    role = tmp_path / "roles" / "shelf"
    (role / "meta").mkdir(parents=True)
    (role / "defaults").mkdir()
    options = {
        "shelf_size": {"type": "int", "required": True, "description": "How big."},
        "shelf_books": {
            "type": "list", "elements": "dict", "description": ["One.", "Two."],
            "options": {"title": {"description": "a|b", "choices": ["x", "y"], "default": "x"}},
        },
        "shelf_names": {"type": "list", "elements": "str", "description": "Long."},
        "shelf_label": {"description": "Empty.", "default": ""},
    }  # fmt: skip
    main = {"short_description": "A shelf", "description": "It stands.", "options": options}
    specs = {"argument_specs": {"main": main, "fall": main | {"options": {}}}}
    (role / "meta" / "argument_specs.yml").write_text(yaml.safe_dump(specs, sort_keys=False))
    (role / "defaults" / "main.yml").write_text(yaml.safe_dump({"shelf_names": ["n" * 70]}))
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks" / "read.yml").write_text("name: gpuaas.slice.shelf\n")
    (tmp_path / "playbooks" / "other.yml").write_text("name: gpuaas.slice.shelf_life\n")
    text = role_readme.readme(role)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `shelf_size` | int | **required** | How big. |",
        "| `shelf_books` | list of dict |  | One. Two. |",
        "| `shelf_books[].title` | str | `x` | a\\|b One of `x`, `y`. |",
        "| `shelf_names` | list of str | see `defaults/main.yml` | Long. |",
        '| `shelf_label` | str | `""` | Empty. |',
    ]
    assert "## fall" in text
    assert text.endswith("In use in `gpuaas.slice.read`.\n")
