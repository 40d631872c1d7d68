"""Models in ONNX files: the shipped model answers, and inputs that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from reconciler.pools import child, onnx
from reconciler.pools.runner import InputError
from scripts import digits_model

pytestmark = pytest.mark.covers("ORCH-2")
FILE = Path(child.__file__).with_name("digits.onnx")


def test_the_shipped_file_is_what_its_script_writes() -> None:
    assert FILE.read_bytes() == digits_model.model()


def test_digits_are_read_even_with_a_wrong_segment() -> None:
    read = onnx.load(str(FILE))
    lit = [[int(bit) for bit in digit] for digit in digits_model.SEGMENTS]
    answer = read({"segments": lit})
    assert answer["digit"] == list(range(10))
    assert all(abs(sum(row) - 1) < 1e-5 for row in answer["probability"])
    broken = [0, *lit[0][1:]]
    assert broken not in lit
    assert read({"segments": [broken]})["digit"] == [0]


@pytest.mark.parametrize(
    ("available", "used"),
    [
        (["CPUExecutionProvider", "CUDAExecutionProvider"], ["CUDAExecutionProvider"]),
        (["TensorrtExecutionProvider", "CPUExecutionProvider"], []),
    ],
)
def test_a_gpu_is_used_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, available: list[str], used: list[str]
) -> None:
    session, given = onnxruntime.InferenceSession, []

    def begin(file: str, providers: list[str]) -> Any:
        given.append(providers)
        return session(file, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    monkeypatch.setattr(onnxruntime, "InferenceSession", begin)
    preloaded: list[str] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: preloaded.append("CUDA"))
    onnx.load(str(FILE))
    assert given == [[*used, "CPUExecutionProvider"]], "in the order in which they are preferred"
    assert len(preloaded) == len(used), "CUDA's libraries of pip are in no path"


def test_a_pool_with_a_gpu_does_not_run_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    with pytest.raises(RuntimeError, match="pool with GPU-0; found CPUExecutionProvider"):
        onnx.load(str(FILE))
    for none in ("", "-1"):  # A pool without devices, and a worker that a person starts so.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        onnx.load(str(FILE))
    assert capsys.readouterr().err.endswith("digits.onnx: CPUExecutionProvider\n")


@pytest.mark.parametrize(
    ("inputs", "outputs", "named"),
    [
        (["tensor(string)"], ["tensor(float)"], r"inputs .* tensor\(string\)"),
        # As scikit-learn's classifiers give probabilities: each job of the model would fail.
        (["tensor(float)"], ["tensor(int64)", "seq(map(int64,tensor(float)))"], "outputs .* seq"),
    ],
)
def test_a_model_without_numbers_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, inputs: list[str], outputs: list[str], named: str
) -> None:
    def places(types: list[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="x", type=each, shape=[1]) for each in types]

    session = SimpleNamespace(
        get_providers=lambda: ["CPUExecutionProvider"],
        get_inputs=lambda: places(inputs),
        get_outputs=lambda: places(outputs),
    )
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: session)
    with pytest.raises(TypeError, match=named):
        onnx.load("m.onnx")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"segments": [[0] * 7], "more": 1},
        {"segments": 1},
        {"segments": [0] * 7},
        {"segments": [[0] * 6]},
        {"segments": [[0], [0, 1]]},
        {"segments": [["1"] * 7]},
        {"segments": [[None] * 7]},
        {"segments": [[{}] * 7]},
        {"segments": [[10**400] * 7]},
        {"segments": [[1e300] * 7]},
        {"segments": [[[]] * 7]},
    ],
)
def test_an_input_that_does_not_fit_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        onnx.load(str(FILE))(given)
    assert "segments" in refused.value.expected
    assert refused.value.found


@pytest.mark.parametrize(
    ("kind", "numbers", "taken"),
    [
        ("int32", [2**31 - 1, -(2**31)], True),
        ("int32", [2**31], False),
        ("int64", [-(2**63)], True),
        ("int64", [2**63], False),
        ("bool", [0, 1, True], True),
        ("bool", [2], False),
        # As PostgreSQL gives 1e20 back.
        ("float", [10**20, 0.5], True),
        ("float", [10**20], True),
        ("float", [10**39], False),
        ("double", [10**309], False),
    ],
)
def test_no_number_reaches_a_model_as_another(kind: str, numbers: list[Any], taken: bool) -> None:
    place = SimpleNamespace(type=f"tensor({kind})", shape=[len(numbers)])
    if taken:
        assert onnx._array("x", numbers, place).tolist() == pytest.approx(numbers)
        return
    with pytest.raises(InputError):
        onnx._array("x", numbers, place)
