"""Models in ONNX files: inputs and outputs are lists of numbers by the model's own names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from reconciler.pools.runner import Function, InputError

# A GPU is used where there is one.
_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
# CUDA_VISIBLE_DEVICES of a process that is to see no GPU, as a person may write it.
_NO_DEVICE = ("", "-1")
_TYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


def load(file: str) -> Function:
    """The function of a model: {input: numbers} to {output: numbers}."""
    available = onnxruntime.get_available_providers()
    if _PROVIDERS[0] in available:
        onnxruntime.preload_dlls()  # Also finds CUDA where pip has put it.
    session = onnxruntime.InferenceSession(
        file, providers=[name for name in _PROVIDERS if name in available]
    )
    provider = session.get_providers()[0]
    sys.stderr.write(f"{file}: {provider}\n")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if provider != _PROVIDERS[0] and devices not in _NO_DEVICE:
        raise RuntimeError(
            f"{file}: expected {_PROVIDERS[0]} for a pool with {devices}; found {provider}."
            " Install onnxruntime-gpu[cuda,cudnn] in place of onnxruntime, or start the pool"
            " without --device"
        )
    inputs = {each.name: each for each in session.get_inputs()}
    outputs = {each.name: each for each in session.get_outputs()}
    for name, each in inputs.items():
        if each.type not in _TYPES:
            raise TypeError(f"{file}: expected inputs of numbers; found {name}, a {each.type}")
    for name, each in outputs.items():
        if not each.type.startswith("tensor("):
            raise TypeError(f"{file}: expected outputs of tensors; found {name}, a {each.type}")

    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        if set(given) != set(inputs):
            raise InputError(f"the inputs {', '.join(inputs)}", ", ".join(given)[:200] or "none")
        feed = {name: _array(name, given[name], each) for name, each in inputs.items()}
        results: Sequence[Any] = session.run(list(outputs), feed)
        return {name: value.tolist() for name, value in zip(outputs, results, strict=True)}

    return call


def _array(name: str, value: Any, each: Any) -> np.ndarray[Any, Any]:
    """The numbers as the model takes them. A dimension with a name in the model has any size."""
    shape = "x".join(str(size) if isinstance(size, int) else "any" for size in each.shape)
    expected = f"{name}: {each.type.removeprefix('tensor')[1:-1]} numbers, {shape}"
    kind = np.dtype(_TYPES[each.type])
    try:
        array = np.asarray(value)
        # PostgreSQL gives a large number back as an integer that no type of NumPy has.
        if array.dtype == object and all(type(number) in (int, float) for number in array.flat):
            array = array.astype(np.float64)
    except (ValueError, OverflowError, RecursionError):
        raise InputError(expected, "lists of different lengths") from None
    fits = np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_
    if not fits or (kind.kind in "ib" and array.dtype.kind not in "ib"):
        raise InputError(expected, f"{array.dtype.name} values")
    if len(array.shape) != len(each.shape) or any(
        isinstance(size, int) and size != given
        for size, given in zip(each.shape, array.shape, strict=True)
    ):
        raise InputError(expected, "x".join(map(str, array.shape)) or "a single number")
    with np.errstate(over="ignore"):
        converted = array.astype(kind)
    changed = kind.kind in "ib" and (converted != array).any()
    if changed or not np.isfinite(converted).all():
        raise InputError(expected, "a number that is too large")
    return converted
