"""Process that runs functions for a worker: a message of JSON in, a message of JSON out.

It has neither the database nor its secrets. A call that crashes it, exceeds its memory or takes
too long costs this process, not the worker.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from reconciler.model.storable import STORABLE, storable_text, stored_size, unstorable

RESULT_BYTES = 64 << 10
# More than any message has, whose texts may consist of escaped characters.
LONGEST = 256 << 10
MODEL_FILE = ".onnx"
# Between a target and the SHA-256 of its file.
DIGEST = "@sha256:"
_DETAIL = 2_000
_PR_SET_PDEATHSIG = 1

Function = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class InputError(Exception):
    """An input that the model cannot take; its texts are shown to the job's owner."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; found {found}")
        # Functions also give the value that they found.
        self.expected = str(expected)
        self.found = str(found)


class ChangedError(Exception):
    """The file of a model differs from the registered file: expected and found digest."""


def load(target: str, digest: str = "") -> tuple[Function, str]:
    """The function MODULE:NAME, or that of a model in FILE.onnx, and the SHA-256 of the file, ""
    for a module that is not in the working folder.

    digest: `ChangedError` for a file with another digest, of which nothing is loaded then.
    """
    module = target.partition(":")[0]
    file = Path(target if target.endswith(MODEL_FILE) else f"{module}.py")
    if not file.is_file():
        if digest:
            raise ChangedError(f"{file}, SHA-256 {digest}", "no such file")
        return _function(target), ""
    before = _stamp(file)
    with file.open("rb") as content:
        actual = hashlib.file_digest(content, "sha256").hexdigest()
    if digest not in ("", actual):
        raise ChangedError(f"{file}, SHA-256 {digest}", actual)
    function = _function(target)
    if _stamp(file) != before:
        raise ChangedError(f"{file}, SHA-256 {actual}", "a change while it was loaded")
    return function, actual


def _stamp(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _function(target: str) -> Function:
    if target.endswith(MODEL_FILE):
        return cast("Function", import_module("reconciler.pools.onnx").load(target))
    module, _, name = target.partition(":")
    function: Function = getattr(import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is no function")
    return function


def answer(functions: Mapping[str, Function], request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request: {"result": …}, or {"error": …, "permanent": …}."""
    try:
        result = functions[request["model"]](request["input"])
        return checked(result)
    except InputError as refused:
        error = _error("input_refused", refused.expected, refused.found, "correct the input")
        return {"error": error, "permanent": True}
    except MemoryError:
        return {"error": memory_exceeded(), "permanent": False}
    except Exception as failure:
        error = _error(
            *("function_failed", "the model to answer", type(failure).__name__),
            "read the reason in the worker's log, or ask the operators for it",
        )
        detail = storable_text(traceback.format_exc())[-_DETAIL:]
        return {"error": {**error, "detail": detail}, "permanent": False}


def memory_exceeded() -> dict[str, str]:
    """The error of a call that needed more memory than its worker allows."""
    return _error(
        *("memory_exceeded", "a call within the worker's memory limit", "more"),
        "send a smaller input, or ask the operators for a larger limit",
    )


def checked(result: object) -> dict[str, Any]:
    """The answer with a result, or with the error of a result that cannot be kept."""
    if isinstance(result, Mapping) and unstorable(result) is None:
        size = stored_size(result, RESULT_BYTES)
        if size <= RESULT_BYTES:
            return {"result": result}
        shown = f"{size} bytes"
    else:
        shown = f"another value, of type {type(result).__name__}"
    expected = f"a document of at most {RESULT_BYTES} bytes with all digits, with {STORABLE}"
    error = _error("result_invalid", expected, shown, "ask the operators to correct the model")
    return {"error": error, "permanent": True}


def _gpu_is_lost() -> bool:
    """Whether CUDA refuses all further work of this process, as after an index out of bounds."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD)
    except OSError:  # No function has loaded it.
        return False
    devices, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(devices)):  # Not initialized.
        return False
    for device in range(devices.value):
        state = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if state or (active.value and _context_is_lost(cuda, device)):
            return True
    return False


def _context_is_lost(cuda: ctypes.CDLL, device: int) -> bool:
    context = ctypes.c_void_p()
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return True
    lost = bool(cuda.cuCtxPushCurrent_v2(context) or cuda.cuCtxSynchronize())
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    cuda.cuDevicePrimaryCtxRelease_v2(device)
    return lost


def _error(code: str, expected: str, found: str, remedy: str) -> dict[str, str]:
    parts = {"code": code, "expected": expected, "found": found, "remedy": remedy}
    return {name: storable_text(text)[:_DETAIL] for name, text in parts.items()}


def main(words: Sequence[str]) -> None:
    """Serve requests until their socket ends."""
    number, memory, *models = words
    # The parent may be killed at any time; then the answer has no reader.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=int(number))
    requests.set_inheritable(False)
    folder = str(Path.cwd())
    functions, digests = {}, {}
    for model in models:
        name, _, target = model.partition("=")
        target, _, digest = target.partition(DIGEST)
        # For functions only, because a file there may have the name of any module.
        if not target.endswith(MODEL_FILE) and sys.path[0] != folder:
            sys.path.insert(0, folder)
        try:
            functions[name], digests[name] = load(target, digest)
        except ChangedError as changed:
            requests.send(json.dumps({"changed": changed.args}).encode())
            return
    limit = int(memory) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    requests.send(json.dumps({"digests": digests}).encode())
    buffer = bytearray(LONGEST)
    while size := requests.recv_into(buffer):
        request = json.loads(buffer[:size])
        answered = {"number": request["number"], **answer(functions, request)}
        # Every call after it would fail, whoever sent it.
        ends = "error" in answered and not answered["permanent"] and _gpu_is_lost()
        requests.send(json.dumps({**answered, "ends": ends}).encode())
        if ends:
            sys.stderr.write("CUDA refuses all further work of this process: replaced\n")
            return
