"""A tenant's cloud-config: taken as cloud-init reads it, or refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.model import cloud_config
from reconciler.model.errors import Problem

pytestmark = pytest.mark.covers("SLICE-3")

GOOD = """#cloud-config
packages: [htop]
write_files:
- {path: /etc/mine, content: "{{ x }}", permissions: 0644}
runcmd:
- [touch, /mine]
"""


def test_a_document_is_taken_as_cloud_init_reads_it() -> None:
    file = {"path": "/etc/mine", "content": "{{ x }}", "permissions": 0o644}
    document = {"packages": ["htop"], "write_files": [file], "runcmd": [["touch", "/mine"]]}
    assert cloud_config.parse(GOOD) == document
    assert cloud_config.parse("") == cloud_config.parse("#cloud-config\n{}") == {}


BAD = {
    "a script": "#!/bin/sh\nreboot\n",
    "MIME": "Content-Type: multipart/mixed\n",
    "include": "#include\nhttps://example.org/\n",
    "no header": "runcmd: []\n",
    "header later": "\n#cloud-config\nruncmd: []\n",
    "template": "## template: jinja\n#cloud-config\nruncmd: []\n",
    "broken": "#cloud-config\nruncmd: [canary\n",
    "list": "#cloud-config\n- canary\n",
    "nothing": "#cloud-config\n",
    "alias": "#cloud-config\nruncmd: &a [x]\npackages: *a\n",
    "bomb": "#cloud-config\na: &a [x, x]\nb: &b [*a, *a]\nruncmd: [*b, *b]\n",
    "object": "#cloud-config\nruncmd: !!python/object/apply:os.system [canary]\n",
    "date": "#cloud-config\nruncmd: [2026-11-23]\n",
    "binary": "#cloud-config\nruncmd: [!!binary aGk=]\n",
    "not a number": "#cloud-config\nswap: {size: .nan}\n",
    "number as key": "#cloud-config\nswap: {1: 2}\n",
    "deep": "#cloud-config\nruncmd: " + "[" * 8000,
    "deeper than Ansible goes": "#cloud-config\nruncmd: " + "[" * 33 + "canary" + "]" * 33,
    "deep mappings": "#cloud-config\nswap: " + "{a: " * 33 + "canary" + "}" * 33,
    "Ansible's own key": "#cloud-config\nruncmd: [{__ansible_type: canary}]\n",
    "Ansible's own key in pairs": "#cloud-config\nruncmd: !!pairs [a: {__ansible_type: canary}]\n",
    "a number without end": "#cloud-config\nruncmd: [" + "1:" * 5000 + "1.5]\n",
    "NUL": '#cloud-config\nruncmd: ["\\0"]\n',
    "NUL in a key": '#cloud-config\nswap: {"\\0": canary}\n',
    "surrogate": '#cloud-config\nruncmd: ["\\ud800"]\n',
    "two documents": "#cloud-config\n{}\n---\n{}\n",
    "no list": "#cloud-config\nruncmd: {a: canary}\n",
    "command with a colon": "#cloud-config\nruncmd:\n- curl -H Accept: canary\n",
    "file": "#cloud-config\nwrite_files: [canary]\n",
    **{
        f"{tag} of another form": f"#cloud-config\nlocale: !!{tag} {value}\n"
        for tag, value in (("bool", "canary"), ("timestamp", "canary"), ("int", "''"))
    },
}


@pytest.mark.covers("P2")
@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_no_cloud_config_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(Problem) as problem:
        cloud_config.parse(text)
    refusal = problem.value
    assert (refusal.code, refusal.status) == ("user_data_invalid", 422)
    assert refusal.expected and refusal.found and refusal.remedy
    assert "canary" not in str(refusal)


def test_what_follows_a_text_that_is_too_deep_is_not_read() -> None:
    """Its scanner would look at every open list for each character."""
    deep = "[" * 40 + "]" * 40
    with pytest.raises(Problem) as problem:
        cloud_config.parse(f"#cloud-config\nruncmd: {deep}\nswap: ]\n")
    assert problem.value.found == "more than 32 lists in each other"


@pytest.mark.parametrize(
    "key",
    ["users", "ssh_authorized_keys", "network", "bootcmd", "power_state", "apt", "hostname",
     "disable_root", "cloud_final_modules", "merge_how"],
)  # fmt: skip
def test_keys_of_ours_are_refused_by_name(key: str) -> None:
    with pytest.raises(Problem, match="user_data_invalid") as problem:
        cloud_config.parse(f"#cloud-config\n{key}: []\n")
    assert problem.value.found == key


@pytest.mark.parametrize("character", ["x", "é", "𝄞"])
def test_16_kib_is_the_limit_in_bytes(character: str) -> None:
    frame = '#cloud-config\nfinal_message: "{}"\n'
    size = len(character.encode())
    fits = (cloud_config.LIMIT_BYTES - len(frame) + 2) // size
    assert cloud_config.parse(frame.format(character * fits))
    with pytest.raises(Problem, match="user_data_too_large"):
        cloud_config.parse(frame.format(character * (fits + 1)))


@pytest.mark.covers("P2")
@given(st.text(max_size=200))
def test_any_text_is_refused_or_is_json(text: str) -> None:
    try:
        document = cloud_config.parse(f"#cloud-config\n{text}")
    except Problem:
        return
    assert set(document) <= set(cloud_config.KEYS)
    json.dumps(document, allow_nan=False).encode()
