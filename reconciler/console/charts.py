"""Charts of a slice's telemetry, as inline SVG with a sentence and a table beside them.

Values come from hosts and guests that may be hostile. A value that is no measurement leaves a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from reconciler.console.pages import size
from reconciler.model.slice_telemetry import HIGHEST

Document = dict[str, Any]
Value = float | None
# Offered periods in minutes.
PERIODS = (60, 360, 1440)
WIDTH, HEIGHT = 300, 80
_STEPS = 120
# Hosts answer once in a minute; a step of two minutes has a sample although they are not punctual.
_SHORTEST_S = 120.0
# Between counters that are further apart lies a gap, not a rate.
_LONGEST_S = 300.0
_ROWS = 12
# More than any host or guest may report.
_LINES = 16


@dataclass(frozen=True)
class Line:
    """values: the mean of each step; None is a gap. style: number of its colour and dashes."""

    name: str
    values: list[Value]
    style: int
    top: float

    @property
    def path(self) -> str:
        """The line as the data of an SVG path. A value between gaps becomes a dot."""
        parts, drawing = [], False
        last = max(1, len(self.values) - 1)
        for step, value in enumerate(self.values):
            if value is None:
                drawing = False
                continue
            x = step * WIDTH / last
            y = HEIGHT - 2 - min(value / self.top, 1.0) * (HEIGHT - 4)
            parts.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}{'' if drawing else 'h.1'}")
            drawing = True
        return "".join(parts)


@dataclass(frozen=True)
class Chart:
    """Lines over one period. newest: value of a single line. rows: the same values by time."""

    title: str
    by_guest: bool
    top: str
    newest: str
    lines: list[Line]
    summary: str
    rows: list[tuple[datetime, list[str]]]


@dataclass(frozen=True)
class _Kind:
    """What a chart shows. read: name and value of each line in a sample, or in two samples."""

    title: str
    text: Callable[[float], str]
    read: Callable[[Document, Document, float], Iterable[tuple[str, Value]]]
    by_guest: bool = False
    top: float | None = None


def of_slice(telemetry: Document, minutes: int, *, short: bool = False) -> list[Chart]:
    """The charts of the API's answer about a slice; those without any value are left out."""
    end = datetime.now(UTC).timestamp()
    step_s = max(_SHORTEST_S, minutes * 60 / _STEPS)
    steps = round(minutes * 60 / step_s)
    begin = end - steps * step_s
    samples = sorted(
        (
            (datetime.fromisoformat(sample["at"]).timestamp(), sample)
            for sample in telemetry["samples"]
        ),
        key=lambda pair: pair[0],
    )
    charts = []
    for kind in _KINDS[:3] if short else _KINDS:
        gathered: dict[str, list[list[float]]] = {}
        before: tuple[float, Document] | None = None
        for at, sample in samples:
            step = int((at - begin) // step_s)
            distance, earlier = (at - before[0], before[1]) if before else (0.0, {})
            before = (at, sample)
            if not 0 <= step < steps:
                continue
            for name, value in kind.read(sample, earlier, distance):
                if value is not None and (name in gathered or len(gathered) < _LINES):
                    gathered.setdefault(name, [[] for _ in range(steps)])[step].append(value)
        if gathered:
            charts.append(_chart(kind, gathered, begin, step_s))
    return charts


def of_queue(depth: Document) -> Chart:
    """The chart of the API's answer about a project's queue of jobs."""
    begin = datetime.fromisoformat(depth["since"]).timestamp()
    return _chart(_QUEUE, {"": [[count] for count in depth["open"]]}, begin, depth["step_s"])


def _chart(
    kind: _Kind, gathered: dict[str, list[list[float]]], begin: float, step_s: float
) -> Chart:
    means = {name: [_mean(values) for values in steps] for name, steps in gathered.items()}
    top = kind.top or max(value for line in means.values() for value in line if value is not None)
    lines = [
        Line(name, values, style, top or 1.0) for style, (name, values) in enumerate(means.items())
    ]
    newest = _text(kind, _newest(lines[0].values)) if len(lines) == 1 else ""
    each = max(1, -(-len(lines[0].values) // _ROWS))
    rows = [
        (
            datetime.fromtimestamp(begin + first * step_s, UTC),
            [_text(kind, _mean(line.values[first : first + each])) for line in lines],
        )
        for first in range(0, len(lines[0].values), each)
    ]
    return Chart(
        kind.title, kind.by_guest, kind.text(top), newest, lines, _summary(kind, lines), rows
    )


def _summary(kind: _Kind, lines: list[Line]) -> str:
    """The sentence that stands for the picture."""
    parts = []
    for line in lines:
        values = [value for value in line.values if value is not None]
        name = f"{line.name}: " if line.name else ""
        now = _text(kind, _newest(line.values))
        parts.append(f"{name}{now}, {kind.text(min(values))} to {kind.text(max(values))}")
    return "; ".join(parts)


def _newest(values: Sequence[Value]) -> Value:
    """The value of the last step, or of the step before, which may be the newest complete step."""
    return values[-1] if values[-1] is not None else values[-2]


def _mean(values: Iterable[Value]) -> Value:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _text(kind: _Kind, value: Value) -> str:
    return "none" if value is None else kind.text(value)


def number(value: object) -> Value:
    """A measurement; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Compared before it is converted, which fails for larger integers.
    if not 0 <= value <= HIGHEST:
        return None
    return float(value)


def _rate(sample: Document, before: Document, seconds: float, name: str) -> Value:
    """A counter's growth in a second. A counter that fell was started again."""
    if not 1 <= seconds <= _LONGEST_S:
        return None
    new, old = number(sample["host"].get(name)), number(before["host"].get(name))
    if new is None or old is None or new < old:
        return None
    return (new - old) / seconds


def _cpu(sample: Document, before: Document, seconds: float) -> Iterable[tuple[str, Value]]:
    used, cpus = _rate(sample, before, seconds, "cpu_s"), number(sample["host"].get("vcpus"))
    yield "", 100 * used / cpus if used is not None and cpus else None


def _rates(**names: str) -> Callable[[Document, Document, float], Iterable[tuple[str, Value]]]:
    def read(sample: Document, before: Document, seconds: float) -> Iterable[tuple[str, Value]]:
        for label, name in names.items():
            yield label, _rate(sample, before, seconds, name)

    return read


def _share(used: Value, whole: Value) -> Value:
    return min(100 * used / whole, 100.0) if used is not None and whole else None


def _memory(sample: Document, _before: Document, _s: float) -> Iterable[tuple[str, Value]]:
    guest = sample["guest"] or {}
    whole, free = (
        number(guest.get("memory_total_bytes")),
        number(guest.get("memory_available_bytes")),
    )
    yield "", _share(None if whole is None or free is None else max(whole - free, 0.0), whole)


def _gpus(
    name: str, whole: str = ""
) -> Callable[[Document, Document, float], Iterable[tuple[str, Value]]]:
    """A value of each GPU, or its share of another."""

    def read(sample: Document, _before: Document, _s: float) -> Iterable[tuple[str, Value]]:
        for gpu in (sample["guest"] or {}).get("gpus") or []:
            value = number(gpu.get(name))
            if whole:
                value = _share(value, number(gpu.get(whole)))
            yield f"GPU {gpu['index']}", value

    return read


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _per_second(value: float) -> str:
    return f"{size(value)}/s"


_KINDS = (
    _Kind("CPU", _percent, _cpu, top=100.0),
    _Kind("GPU utilisation", _percent, _gpus("utilisation_percent"), by_guest=True, top=100.0),
    _Kind("Network", _per_second, _rates(sent="sent_bytes", received="received_bytes")),
    _Kind("Disk", _per_second, _rates(read="disk_read_bytes", written="disk_written_bytes")),
    _Kind("Memory", _percent, _memory, by_guest=True, top=100.0),
    _Kind(
        "GPU memory",
        _percent,
        _gpus("memory_used_bytes", "memory_total_bytes"),
        by_guest=True,
        top=100.0,
    ),
    _Kind("GPU temperature", "{:.0f} °C".format, _gpus("temperature_c"), by_guest=True),
    _Kind("GPU power", "{:.0f} W".format, _gpus("power_w"), by_guest=True),
)
_QUEUE = _Kind("Jobs that have not ended", "{:.0f}".format, lambda *_: ())
