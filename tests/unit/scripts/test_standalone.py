"""The single-file programs are what the code gives, and they run with nothing of ours around."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import standalone


@pytest.fixture
def utils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of module utils to bundle from."""
    monkeypatch.setattr(standalone, "UTILS", tmp_path)
    return tmp_path


def util(folder: Path, name: str, *rows: str) -> None:
    (folder / f"{name}.py").write_text("\n".join(rows) + "\n")


def script(**change: object) -> standalone.Script:
    given = {"path": "x.sh", "entry": "_one:main", "about": "A program.\nOf two.", "marker": "MARK"}
    return standalone.Script(**(given | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("one", standalone.SCRIPTS, ids=lambda one: one.path)
def test_a_script_is_current(one: standalone.Script) -> None:
    """When this fails: python -m scripts.standalone."""
    file = standalone.ROOT / one.path
    assert file.read_text() == standalone.build(one)
    assert file.stat().st_mode & 0o111 == 0o111


def test_a_stale_script_is_named(tmp_path: Path) -> None:
    assert standalone.stale(tmp_path) == [one.path for one in standalone.SCRIPTS]


def test_it_runs_alone(utils: Path, tmp_path: Path) -> None:
    head = f"from {standalone.PACKAGE}"
    util(utils, "_one", "import sys", f"{head} import _two", f"{head}._three import say",
         "def main(words, environment):", "    say(_two.WORD + environment['W'] + words[0])",
         "    print(__loader__.get_data('note').decode(), end='')",
         "    return len(sys.stdin.read())")  # fmt: skip
    util(utils, "_two", r"WORD = 'a\\b'")
    util(utils, "_three", "say = print")
    util(utils, "_four", "raise SystemExit('not asked for')")
    (tmp_path / "note.txt").write_text("it's $HOME `x`\n")
    text = standalone.build(script(data={"note": str(tmp_path / "note.txt")}))
    assert "_four" not in text and "# A program.\n# Of two.\n" in text
    place = tmp_path / "elsewhere" / "x.sh"
    place.parent.mkdir()
    place.write_text(text)
    done = subprocess.run(
        ["sh", str(place), "$(id)"], input="abc", text=True, capture_output=True, check=False,
        cwd=place.parent, env={"PATH": "/usr/bin:/bin", "W": "w"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("a\\bw$(id)\nit's $HOME `x`\n", "")
    assert done.returncode == 3


def test_a_traceback_shows_the_line(utils: Path) -> None:
    util(utils, "_one", "def main(words, environment):", "    raise ValueError('x')  # here")
    done = subprocess.run(
        ["sh"], input=standalone.build(script()), text=True, capture_output=True, check=False
    )
    assert "# here" in done.stderr


def test_no_python_is_said_in_a_line(tmp_path: Path, utils: Path) -> None:
    util(utils, "_one", "def main(words, environment): return 0")
    done = subprocess.run(
        ["/bin/sh"], input=standalone.build(script()), text=True, capture_output=True, check=False,
        env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.startswith("MARK status=FAIL detail=Python") and done.returncode == 2


@pytest.mark.parametrize(
    "row",
    ["import yaml", "from ansible.module_utils.basic import AnsibleModule", "X = '''text'''"],
)
def test_what_cannot_stand_alone_is_refused(utils: Path, row: str) -> None:
    util(utils, "_one", row, "def main(words, environment): return 0")
    with pytest.raises(standalone.NotStandalone):
        standalone.build(script())


def test_an_entry_that_is_not_there_is_refused(utils: Path) -> None:
    util(utils, "_one", "other = 1")
    with pytest.raises(standalone.NotStandalone, match="no function main"):
        standalone.build(script())
