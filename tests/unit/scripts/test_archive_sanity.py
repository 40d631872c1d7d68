"""Settings of pip that `scripts/sanity` hands to ansible-test."""

from __future__ import annotations

import configparser
import re

from scripts import archive_sanity


def test_the_variables_of_pip_become_its_file() -> None:
    text = archive_sanity.pip_configuration(
        {"PIP_INDEX_URL": "https://index/simple", "PIP_FIND_LINKS": "a\n b", "HOME": "/x"}
        | {"PIP_CONFIG_FILE": "/etc/pip.conf", "SSL_CERT_FILE": "/ca.pem"}
    )
    parsed = configparser.RawConfigParser()
    parsed.read_string(text)
    assert dict(parsed["global"]) == {
        "cert": "/ca.pem", "find-links": "a b", "index-url": "https://index/simple",
    }  # fmt: skip
    conf = archive_sanity.pip_configuration({"PIP_CERT": "/mine.pem", "SSL_CERT_FILE": "/ca.pem"})
    assert conf == "[global]\ncert = /mine.pem\n"


def test_the_wanted_pip_is_found_in_ansible_test() -> None:
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", archive_sanity.pinned_pip())
