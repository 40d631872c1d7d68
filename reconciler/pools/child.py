"""The runner of a worker: a child process that is replaced when a call kills it or hangs."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from reconciler.model.errors import Problem
from reconciler.model.jobs import Call, Outcome
from reconciler.pools.processes import MARK, NAME, SHIPPED, has_onnx
from reconciler.pools.runner import DIGEST, LONGEST, MODEL_FILE, memory_exceeded

# Time to load the models, some of which are large.
START_S = 300.0
# Outcomes wait so long for others, with which they share a transaction.
_GATHER_S = 0.005
# Not with -m, which would give functions another InputError than the one that is caught.
_MAIN = "import sys; from reconciler.pools.runner import main; main(sys.argv[2:])"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
# The runner gets nothing of the service's environment, which may hold the database's password.
_ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH"),
    *("CUDA_VISIBLE_DEVICES", MARK),
)


class _Entry(NamedTuple):
    """A job of the runner. came: when it came there, on the monotonic clock."""

    number: int
    job: Call
    came: float


class Runner:
    """models: FILE.onnx or MODULE:FUNCTION by name. folder: where they are, if not in the present
    one. Only the main thread may use it, because Linux ends the process together with the thread
    that has started it.

    Jobs wait in a socket of messages, so that the process runs them without a pause. This side has
    the other end of it, too, and can take back those that have not begun.
    """

    def __init__(
        self, models: Mapping[str, str], memory_mib: int, folder: Path | None = None
    ) -> None:
        self._models = dict(models)
        self._folder = folder
        # SHA-256 of the models' files, from when they are loaded. The shipped model is the
        # release's, and may be another after an upgrade.
        self.digests: dict[str, str] = {}
        self._memory = str(memory_mib)
        self._process: subprocess.Popen[bytes] | None = None
        # Jobs without an outcome. The first `_sent` of them are in the socket or have left it.
        self._jobs: deque[_Entry] = deque()
        self._sent = 0
        self._numbers = count()
        # The first job has run since then at the most. lag_s: time from arrival to outcome.
        self._began = 0.0
        self.lag_s = 0.0
        # How long the models took to load, and until when a project lets others go first.
        self._load_s = 0.0
        self._behind: dict[str, float] = {}
        self._buffer = bytearray(LONGEST)

    def __len__(self) -> int:
        return len(self._jobs)

    def first(self) -> Call | None:
        """The job that runs."""
        return self._jobs[0].job if self._jobs else None

    def waits_s(self) -> float:
        """How long a job has waited for its turn behind the one that runs."""
        return time.monotonic() - self._jobs[1].came if len(self._jobs) > 1 else 0.0

    def behind(self) -> set[str]:
        """Projects that let others go first, because a call of theirs has cost the process.

        It lasts as long as the call and the loading of the models that follows. So a project gets
        half of the time of a worker at most in this way, however little time it allows its calls.
        """
        now = time.monotonic()
        self._behind = {id: until for id, until in self._behind.items() if until > now}
        return set(self._behind)

    def start(self) -> None:
        """Start the process and load its models; Problem `model_unusable` when that fails."""
        self.stop()
        began = time.monotonic()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._near, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        far = self._far.fileno()
        words = []
        for name, target in self._models.items():
            path, _, given = target.partition(DIGEST)
            digest = self.digests.get(name, given)
            words.append(f"{name}={path}" + (f"{DIGEST}{digest}" if digest else ""))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, "--", str(far), self._memory, *words],
            env=environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=2,  # What functions print belongs in the log.
            pass_fds=[far],
            # With the processes that functions start, which end with it.
            process_group=0,
        )
        self._end = os.pidfd_open(self._process.pid)
        self._poll = select.poll()
        for file in (self._near.fileno(), self._end):
            self._poll.register(file, select.POLLIN)
        ready = self._receive(self._near) if self._poll.poll(START_S * 1000) else None
        if ready and "changed" in ready:
            self.stop()
            expected, digest = ready["changed"]
            raise Problem(
                "model_changed",
                expected=expected,
                found=digest,
                remedy="put the file back, or start the pool again for the new one",
            )
        if ready is None:
            self.stop()
            raise Problem(
                "model_unusable",
                expected="models that can be loaded",
                found=f"an error, which is above in the log, or no end within {START_S:.0f} s",
                remedy="correct --model, or install what the model needs",
            )
        self._load_s = time.monotonic() - began
        # The next process gets the same files or none.
        self.digests = {
            name: digest
            for name, digest in ready["digests"].items()
            if digest and self._models[name] not in SHIPPED.values()
        }

    def stop(self) -> None:
        """End the process, whatever it does, and those that its functions have started. Its jobs
        stay here.
        """
        if self._process is not None:
            self._kill()
            self._process.wait()
            os.close(self._end)
            self._near.close()
            self._far.close()
            self._process, self._sent = None, 0

    def _kill(self) -> None:
        """Kill the process with those that its functions have started. Until it has been waited
        for, no other group of processes gets its id.
        """
        assert self._process is not None  # noqa: S101
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A function may have moved it to another group of the session.
            self._process.kill()

    def send(self, jobs: Sequence[Call]) -> None:
        """Have jobs run behind those that are there."""
        now = time.monotonic()
        self._jobs.extend(_Entry(next(self._numbers), job, now) for job in jobs)
        self._push()

    def recall(self) -> list[Call]:
        """Take back the jobs that have not begun."""
        # The process goes on meanwhile, so that it may begin a job between two that come back.
        begun = {entry.number for entry in islice(self._jobs, self._sent)}
        if self._process is not None:
            while request := self._receive(self._far):
                begun.remove(request["number"])
        back = [entry.job for entry in self._jobs if entry.number not in begun]
        self._jobs = deque(entry for entry in self._jobs if entry.number in begun)
        self._sent = len(begun)
        return back

    def drop(self) -> list[Call]:
        """Give up all jobs, the one that runs included."""
        if self._sent:
            self._blame(self._jobs[0].job)
        self.stop()
        dropped = [entry.job for entry in self._jobs]
        self._jobs.clear()
        return dropped

    def outcomes(self, seconds: float, enough: int) -> list[tuple[Call, Outcome]]:
        """Outcomes, in the order of the jobs: as soon as there are enough, a moment after the first
        one, or after so many seconds. 0: those that are there.
        """
        ended: list[tuple[Call, Outcome]] = []
        until = time.monotonic() + seconds
        while len(ended) < enough and self._jobs:
            # They are recorded before the models load again, which may take long or fail.
            if (ended or not seconds) and not self.lives():
                break
            self._push()
            limit = min(until, self._began + self._jobs[0].job.timeout_s)
            left = limit - time.monotonic()
            events = self._poll.poll(max(left, 0) * 1000)
            if self._read(ended):
                self._began = time.monotonic()
                until = min(until, self._began + _GATHER_S)
            elif events or limit < until:
                ended.append(self._broken(late=not events))
                break
            elif left <= 0:
                break
        return ended

    def _push(self) -> None:
        """Hand over jobs while there is room for them."""
        if not self.lives():
            self.start()
        for number, job, _ in islice(self._jobs, self._sent, None):
            request = {"number": number, "model": job.model, "input": job.input}
            try:
                self._near.send(json.dumps(request).encode(), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not self._sent:
                self._began = time.monotonic()
            self._sent += 1

    def lives(self) -> bool:
        """Whether the process is there. If it ends between jobs, none of them is to blame."""
        if not self._sent and self._process is not None:
            # Not poll(), which would wait for it.
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._process.pid, how) is not None:
                self.stop()
        return self._process is not None

    def _read(self, ended: list[tuple[Call, Outcome]]) -> bool:
        """Read the answers that are there; whether there were any."""
        any_answer = False
        while self._sent and (answer := self._receive(self._near)):
            any_answer = True
            # A function may have copied the process; only the first answer to a job counts.
            if answer["number"] == self._jobs[0].number:
                result = answer.get("result")
                failure = None if "result" in answer else answer["error"]
                if answer["ends"]:
                    self._blame(self._jobs[0].job)
                ended.append(self._pop(Outcome(result, failure, answer.get("permanent", False))))
                if answer["ends"]:
                    self.stop()  # The jobs behind it run in the next process.
        return any_answer

    def _receive(self, end: socket.socket) -> Any:
        """The next message for an end of the socket; None without one."""
        try:
            size = end.recv_into(self._buffer, flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        return json.loads(self._buffer[:size])

    def _pop(self, outcome: Outcome) -> tuple[Call, Outcome]:
        entry = self._jobs.popleft()
        self._sent -= 1
        self.lag_s = time.monotonic() - entry.came
        return entry.job, outcome

    def _broken(self, *, late: bool) -> tuple[Call, Outcome]:
        """The outcome of a job that has hung or ended the process, which is ended in any case."""
        assert self._process is not None  # noqa: S101
        # If it has ended already, this ends the rest of its group and leaves its status.
        self._kill()
        code = None if late else self._process.wait()
        self._blame(self._jobs[0].job)
        ended = self._pop(Outcome(error=_ended(self._jobs[0].job, code)))
        self.stop()
        return ended

    def _blame(self, job: Call) -> None:
        """Note the cost of the running call, with the loading of the models that follows."""
        now = time.monotonic()
        cost = now - self._began + self._load_s
        # Counted from when the models are there again.
        self._behind[job.project_id] = now + self._load_s + cost


def _ended(job: Call, code: int | None) -> dict[str, str]:
    """The error of a call. code: exit status of its process; None for a call that took too long."""
    if code is None:
        return {
            "code": "timed_out",
            "expected": f"an answer within {job.timeout_s} s",
            "found": "none",
            "remedy": "send a smaller input, or allow more time",
        }
    if code == -signal.SIGKILL:
        return memory_exceeded()
    return {
        "code": "runner_ended",
        "expected": "the model to answer",
        "found": f"the end of its process, status {code}",
        "remedy": "ask the operators for the worker's log",
    }


def parse(words: Sequence[str], folder: Path | None = None) -> dict[str, str]:
    """The targets of NAME=FILE.onnx and NAME=MODULE:FUNCTION; Problem `model_unusable` for others.
    Without words: the model that is shipped. folder: where files are, if not in the present one.
    """
    models: dict[str, str] = {}
    for word in words or [f"{name}={target}" for name, target in SHIPPED.items()]:
        name, _, target = word.partition("=")
        path, at, digest = target.partition(DIGEST)
        is_onnx = path.endswith(MODEL_FILE)
        if is_onnx and not has_onnx():
            raise Problem(
                "model_unusable",
                422,
                expected=f"onnxruntime, which model {name} needs",
                found="an installation without it",
                remedy="install the packages of requirements.lock, or the extra"
                " gpuaas-slice[worker]; functions (MODULE:FUNCTION) run without it",
            )
        usable = Path(folder or "", path).is_file() if is_onnx else _FUNCTION.fullmatch(path)
        if at and not _DIGEST.fullmatch(digest):
            usable = None
        if not NAME.fullmatch(name) or name in models or not usable:
            raise Problem(
                "model_unusable",
                422,
                expected="NAME=FILE.onnx, which exists, or NAME=MODULE:FUNCTION, each name once;"
                f" {DIGEST} and 64 digits behind it for a file that must be as it is",
                found=word,
                remedy="give --model once for each model",
            )
        models[name] = target
    return models
