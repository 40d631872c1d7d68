"""The lab's end of the trusted channel, against a host that is played by a thread."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import userdata
from lab.command import LabError

Reply = Callable[[dict[str, str]], bytes]


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Callable[[Reply], Path]]:
    """Starts the host's end: a single connection and delivery, answered by `reply`."""
    path = tmp_path / "userdata.sock"
    threads: list[threading.Thread] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve(reply: Reply) -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as stream:
                connection.sendall(reply(json.loads(stream.readline())))

        def start(reply: Reply) -> Path:
            threads.append(threading.Thread(target=serve, args=(reply,)))
            threads[-1].start()
            return path

        yield start
        for thread in threads:
            thread.join(60)


def test_the_answer_is_the_exit_code_and_the_output(channel: Callable[[Reply], Path]) -> None:
    def reply(delivery: dict[str, str]) -> bytes:
        body = {"id": delivery["id"], "exit": 3, "output": delivery["script"]}
        return json.dumps(body).encode() + b"\n"

    answer = userdata.deliver(channel(reply), "#!/bin/sh\nexit 3\n", timeout=60)
    assert answer == userdata.Answer(3, "#!/bin/sh\nexit 3\n")


def test_the_rest_of_another_answer_is_skipped(channel: Callable[[Reply], Path]) -> None:
    def reply(delivery: dict[str, str]) -> bytes:
        latest = json.dumps({"id": delivery["id"], "exit": 0, "output": "mine"}).encode()
        other = json.dumps({"id": "another", "exit": 1, "output": "not mine"}).encode()
        return b'tput": "cut"}\n' + other + b"\n" + latest + b"\n"

    assert userdata.deliver(channel(reply), "#!/bin/sh\n", timeout=60).output == "mine"


def test_a_script_needs_its_interpreter(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="#!"):
        userdata.deliver(tmp_path / "none", "echo hello", timeout=1)


def test_a_lab_that_is_down_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="is the lab up"):
        userdata.deliver(tmp_path / "none", "#!/bin/sh\n", timeout=1)
