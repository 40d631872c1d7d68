"""Generator of the shipped model, which reads digits from seven segments that may be wrong.

Each segment is taken to be wrong once in ten times; the model gives the probability of each digit.
Run as `python -m scripts.digits_model`. ONNX is a protobuf message, written without a library here.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "reconciler" / "pools" / "digits.onnx"
# Segments a to g of each digit: top, right up, right down, bottom, left down, left up, middle.
SEGMENTS = (
    *("1111110", "0110000", "1101101", "1111001", "0110011"),
    *("1011011", "1011111", "1110000", "1111111", "1111011"),
)
_WRONG = 0.1
_FLOAT, _INT64 = 1, 7


def model() -> bytes:
    """The bytes of the file."""
    weight = math.log((1 - _WRONG) / _WRONG)
    lit = [[int(bit) for bit in digit] for digit in SEGMENTS]
    weights = [weight * (2 * digit[segment] - 1) for segment in range(7) for digit in lit]
    bias = [weight * (7 - sum(digit)) for digit in lit]
    axis = _text(1, "axis") + _number(3, 1) + _number(20, 2)
    flat = _text(1, "keepdims") + _number(3, 0) + _number(20, 2)
    graph = (
        _message(1, _node("Gemm", ("segments", "weights", "bias"), "scores"))
        + _message(1, _node("Softmax", ("scores",), "probability", axis))
        + _message(1, _node("ArgMax", ("scores",), "digit", axis, flat))
        + _text(2, "digits")
        + _message(5, _tensor("weights", (7, 10), weights))
        + _message(5, _tensor("bias", (10,), bias))
        + _message(11, _value("segments", _FLOAT, "count", 7))
        + _message(12, _value("digit", _INT64, "count"))
        + _message(12, _value("probability", _FLOAT, "count", 10))
    )
    version = _text(1, "") + _number(2, 17)
    return _number(1, 8) + _text(2, "gpuaas.slice") + _message(7, graph) + _message(8, version)


def _node(kind: str, inputs: tuple[str, ...], output: str, *attributes: bytes) -> bytes:
    names = b"".join(_text(1, name) for name in inputs)
    more = b"".join(_message(5, attribute) for attribute in attributes)
    return names + _text(2, output) + _text(4, kind) + more


def _tensor(name: str, shape: tuple[int, ...], values: list[float]) -> bytes:
    sizes = b"".join(_number(1, size) for size in shape)
    raw = struct.pack(f"<{len(values)}f", *values)
    return sizes + _number(2, _FLOAT) + _text(8, name) + _message(9, raw)


def _value(name: str, kind: int, *shape: str | int) -> bytes:
    sizes = b"".join(
        _message(1, _text(2, size) if isinstance(size, str) else _number(1, size)) for size in shape
    )
    return _text(1, name) + _message(2, _message(1, _number(1, kind) + _message(2, sizes)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


if __name__ == "__main__":
    FILE.write_bytes(model())
