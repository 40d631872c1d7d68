"""Single-file programs: built from the code, and run where nothing of the collection is."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import standalone

# Python of Ubuntu 22.04, in which MAAS commissions.
OLDEST = (3, 10)
# Newer names of the standard library that are easily used; an empty set is the whole module.
LATER: dict[str, set[str]] = {
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "logging": {"getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
    "re": {"NOFLAG"},
    "tomllib": set(),
    "typing": {
        "LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack",
        "assert_never", "assert_type", "dataclass_transform", "override", "reveal_type",
    },
}  # fmt: skip


def sources(script: standalone.Script) -> dict[str, str]:
    return standalone.closure(script.entry.partition(":")[0])


def later(text: str) -> Iterator[str]:
    """Names that a source takes from a newer standard library."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if LATER.get(a.name) == set())
        elif isinstance(node, ast.ImportFrom) and node.module in LATER:
            names = LATER[node.module]
            yield from (a.name for a in node.names if a.name in names or not names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            newer = LATER.get(node.value.id, set())
            yield from (f"{node.value.id}.{name}" for name in newer & {node.attr})


@pytest.fixture
def oldest(tmp_path: Path) -> Path:
    """A folder that has the oldest Python under the name of the usual one, and nothing else."""
    place = shutil.which("python3.10")
    if place is None:
        pytest.skip("needs a Python 3.10")
    # A version manager's stand-in needs the whole PATH, or has no such version after all.
    ask = [place, "-c", "import sys; print(sys.executable)"]
    python = subprocess.run(ask, text=True, capture_output=True, check=False)
    if python.returncode != 0:
        pytest.skip("needs a Python 3.10")
    folder = tmp_path / "oldest"
    folder.mkdir()
    (folder / "python3").symlink_to(python.stdout.strip())
    return folder


@pytest.fixture
def utils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of module utils to bundle from."""
    monkeypatch.setattr(standalone, "UTILS", tmp_path)
    return tmp_path


def util(folder: Path, name: str, *rows: str) -> None:
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(rows) + "\n")


def script(**change: object) -> standalone.Script:
    given = {"path": "x.sh", "entry": "_one:main", "about": "A program.\nOf two.", "marker": "MARK"}
    return standalone.Script(**(given | change))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every program, and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("build")
    assert standalone.write(folder) == [folder / script.path for script in standalone.SCRIPTS]
    return folder


@pytest.mark.parametrize("script", standalone.SCRIPTS, ids=lambda script: script.path)
def test_a_script_is_built_from_the_code(script: standalone.Script, built: Path) -> None:
    file = built / script.path
    assert file.read_text() == standalone.build(script)
    assert file.stat().st_mode & 0o111 == 0o111


def test_what_is_newer_than_its_sources_is_left_alone(built: Path) -> None:
    firmware, release = (built / script.path for script in standalone.SCRIPTS[:2])
    firmware.write_text("as it was")
    release.write_text("older than its sources")
    os.utime(release, (0, 0))
    standalone.write(built)
    assert firmware.read_text() == "as it was"
    assert release.read_text() == standalone.build(standalone.SCRIPTS[1])
    firmware.unlink()
    standalone.write(built)
    assert firmware.read_text() == standalone.build(standalone.SCRIPTS[0])


@pytest.mark.parametrize("script", standalone.SCRIPTS, ids=lambda script: script.path)
def test_the_wrapper_in_a_checkout_builds_and_runs_it(script: standalone.Script) -> None:
    (standalone.BUILD / script.path).unlink(missing_ok=True)
    done = subprocess.run(
        [standalone.ROOT / script.path, "--help"], text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and "GPUAAS_SLICE_" in done.stdout
    assert (standalone.BUILD / script.path).read_text() == standalone.build(script)


def test_the_network_alone_has_a_wrapper_of_its_own() -> None:
    script = standalone.ROOT / "scripts/ops/gpuaas_slice_host_net_baseline.sh"
    done = subprocess.run([script, "--help"], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Repair the network baseline" in done.stdout and "network [-h]" in done.stdout


@pytest.mark.covers("HOST-1", "HOST-4")
@pytest.mark.parametrize("script", standalone.SCRIPTS, ids=lambda script: script.path)
def test_a_script_needs_no_newer_python_than_commissioning_has(script: standalone.Script) -> None:
    texts = sources(script)
    for name, text in texts.items():
        ast.parse(text, filename=name, feature_version=OLDEST)
    assert {name: newer for name, text in texts.items() if (newer := list(later(text)))} == {}


def test_what_is_newer_is_found() -> None:
    newer = "import tomllib, datetime\nfrom enum import StrEnum\nnow = datetime.UTC\n"
    assert list(later(newer)) == ["tomllib", "StrEnum", "datetime.UTC"]


# Without `covers`, because the test is skipped, and shows nothing, where this Python is missing.
@pytest.mark.parametrize("script", standalone.SCRIPTS, ids=lambda script: script.path)
def test_a_script_runs_with_the_python_of_commissioning(
    script: standalone.Script, oldest: Path, built: Path
) -> None:
    """Every source is loaded, which runs its top-level code, and the program answers."""
    body = standalone.build(script).partition(f"3<<'{standalone._END}'\n")[2]
    program = body.partition(f"\n{standalone._END}\n")[0].rpartition("\nrun(")[0]
    load = "import importlib\nfor name in SOURCES: importlib.import_module(PACKAGE + name)\n"
    loaded = subprocess.run(
        [str(oldest / "python3"), "-B", "-I", "-"], input=f"{program}\n{load}", text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert (loaded.returncode, loaded.stderr) == (0, "")
    helped = subprocess.run(
        ["/bin/sh", str(built / script.path), "--help"], text=True, capture_output=True,
        check=False, env={"PATH": str(oldest)},
    )  # fmt: skip
    assert (helped.returncode, helped.stderr) == (0, "") and "GPUAAS_SLICE_" in helped.stdout


def test_it_runs_alone(utils: Path, tmp_path: Path) -> None:
    head = f"from {standalone.PACKAGE}"
    util(utils, "_one", "import sys", f"{head}.core import _two", f"{head}.core._three import say",
         "def main(words, environment):", "    say(_two.WORD + environment['W'] + words[0])",
         "    print(__loader__.get_data('note').decode(), end='')",
         "    return len(sys.stdin.read())")  # fmt: skip
    util(utils, "core._two", r"WORD = 'a\\b'")
    util(utils, "core._three", "say = print")
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


def metadata(text: str) -> dict[str, Any]:
    rows = text.partition("script metadata ---\n")[2].partition("# --- End MAAS")[0].splitlines()
    meta: dict[str, Any] = yaml.safe_load("\n".join(row.removeprefix("# ") for row in rows))
    return meta


@pytest.mark.covers("HOST-1")
def test_the_script_that_changes_the_bios_is_run_by_its_own_tag_only(tmp_path: Path) -> None:
    """MAAS identifies scripts by name, so a request for one script must not select the other."""
    place = tmp_path / "site" / standalone.APPLYING.path
    assert standalone.main(["--apply-bios", str(place)]) == 0
    assert place.stat().st_mode & 0o111 == 0o111
    applying = metadata(place.read_text())
    reading = metadata(standalone.build(standalone.FIRMWARE))
    assert f"{applying['name']}.sh" == place.name and applying["name"] != reading["name"]
    assert applying["tags"].split(",") == ["gpuaas-apply-bios", "noauto"]
    assert reading["tags"].split(",") == ["gpuaas"]
    same = ("script_type", "for_hardware", "timeout", "may_reboot")
    assert [applying[key] for key in same] == [reading[key] for key in same]
    assert standalone.APPLYING not in standalone.SCRIPTS, "none lies about to be uploaded"


@pytest.mark.covers("HOST-1", "ECO-3")
def test_maas_runs_its_script_on_machines_with_a_gpu_of_the_profile_only() -> None:
    """By the metadata that MAAS reads: YAML in comments, between two marks."""
    meta = metadata(standalone.build(standalone.FIRMWARE))
    profile = yaml.safe_load((standalone.ROOT / "profiles/xe9680l-h200.yml").read_text())
    assert meta["script_type"] == "commissioning" and meta["tags"] == "gpuaas"
    assert [meta["for_hardware"]] == [f"pci:{id}" for id in profile["gpu"]["ids"]]
    released = metadata(standalone.build(standalone.RELEASE))
    assert (released["script_type"], released["for_hardware"]) == ("release", meta["for_hardware"])
    # The script runs only in a release that requests it.
    assert released["tags"].split(",") == ["gpuaas", "noauto"] and "may_reboot" not in released
    two = yaml.safe_load(standalone.hardware({"gpu": {"ids": ["10de:2335", "10de:2330"]}}))
    assert two == ["pci:10de:2335", "pci:10de:2330"]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, "it's $HOME,,,8"),
        ({"OTHER": "x"}, ",,x,8"),
        ({"WORD": ""}, ",,,8"),
        ({"MORE": "y"}, ",y,,8"),
        ({"COUNT": "7"}, "it's $HOME,,,7"),
        ({"COUNT": ""}, "it's $HOME,,,"),
    ],
)
def test_settings_of_its_own_count_where_nobody_sets_any_of_their_part(
    utils: Path, given: dict[str, str], seen: str
) -> None:
    util(utils, "_one", "def main(words, environment):",
         "    names = ('WORD', 'MORE', 'OTHER', 'COUNT')",
         "    print(','.join(environment.get(name, '') for name in names))")  # fmt: skip
    parts = [{"WORD": "it's $HOME", "MORE": "", "OTHER": ""}, {"COUNT": "8"}]
    text = standalone.build(script(settings=parts))
    done = subprocess.run(
        ["sh"], input=text, text=True, capture_output=True, check=False,
        env={"PATH": "/usr/bin:/bin", **given},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{seen}\n", "")


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
    "row", ["import yaml", "from ansible.module_utils.basic import AnsibleModule", "X = '''text'''"]
)
def test_what_cannot_stand_alone_is_refused(utils: Path, row: str) -> None:
    util(utils, "_one", row, "def main(words, environment): return 0")
    with pytest.raises(standalone.NotStandalone):
        standalone.build(script())


def test_an_entry_that_is_not_there_is_refused(utils: Path) -> None:
    util(utils, "_one", "other = 1")
    with pytest.raises(standalone.NotStandalone, match="no function main"):
        standalone.build(script())
