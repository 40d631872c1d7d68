"""Hardware profiles: the devices of a class of machines, and what is sold of them.

Each profile is a file in a folder that the site may edit while the service runs. API and workers
see a change with their next request or task.
"""

from __future__ import annotations

import contextlib
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from reconciler.model import hardware
from reconciler.model.errors import Problem
from reconciler.model.hardware import Offer
from reconciler.model.states import CapacityShape

# Modification time and size, which identify a version of a file.
_State = tuple[int, int]
# Those that the service itself reads. Each run needs more (contracts/runs).
_SECTIONS = ("gpu", "fabric", "nvme", "network", "vm", "deadlines")
# Price of a GPU hour by capacity shape and SKU.
Prices = dict[tuple[str, str], Decimal]


def hardware_profile(folder: Path, name: str) -> dict[str, Any]:
    """The hardware profile `name`; Problem `profile_unknown` when it is missing or unreadable, and
    that of `hardware.check` when no host can implement it.
    """
    states = _states(folder)
    if name not in states:
        raise Problem(
            "profile_unknown",
            422,
            expected=f"one of the hardware profiles {', '.join(sorted(states))}",
            found=name,
            remedy=f"choose one of these, or add {name}.yml to {folder}",
        )
    return _read(folder / f"{name}.yml", states[name])


def profile_offers(folder: Path) -> dict[str, Offer]:
    """What is sold of each hardware profile, by its name."""
    return dict(_offers(folder, tuple(sorted(_states(folder).items()))))


def profile_skus(folder: Path, shape: CapacityShape = CapacityShape.GPU_SLICE) -> dict[str, str]:
    """SKU by name of the hardware profile. Slices may have none, ""; machines have the name."""
    slices = shape is CapacityShape.GPU_SLICE
    return {name: offer.sku if slices else name for name, offer in profile_offers(folder).items()}


def sku_prices(folder: Path) -> Prices:
    """Price of a GPU hour. Of profiles with the same SKU the first with a price has it."""
    prices: Prices = {}
    for name, offer in profile_offers(folder).items():
        for shape, sku, price in (
            (CapacityShape.GPU_SLICE, offer.sku, offer.price),
            (CapacityShape.BAREMETAL, name, offer.machine_price),
        ):
            if sku and price is not None:
                prices.setdefault((shape, sku), price)
    return prices


def ready_minimum_s(folder: Path, sku: str = "") -> int:
    """Least seconds that a member may leave a slice of this SKU to become reachable; "": of any.

    A guest that had no time to boot leaves its slots blocked, so the limit of the profile is also
    the minimum unless the profile has `deadlines.ready_minimum`.
    """
    offers = profile_offers(folder).values()
    return max((offer.ready_minimum_s for offer in offers if sku in ("", offer.sku)), default=0)


def _states(folder: Path) -> dict[str, _State]:
    try:
        files = [file for file in folder.iterdir() if file.suffix == ".yml"]
    except FileNotFoundError:
        return {}
    states = {}
    for file in files:
        # The file may disappear meanwhile.
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            states[file.stem] = (status.st_mtime_ns, status.st_size)
    return states


@lru_cache(maxsize=32)
def _read(file: Path, _state: _State) -> dict[str, Any]:
    try:
        document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise TypeError(type(document).__name__)
        if missing := [each for each in _SECTIONS if not isinstance(document.get(each), dict)]:
            raise ValueError(f"no section {', '.join(missing)}")
        hardware.check(document, file.stem)
    # The last three also of an entry that has another form.
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as broken:
        raise Problem(
            "profile_unknown",
            422,
            expected=f"a mapping with a profile's sections in {file.name}",
            found=" ".join(str(broken).split())[:300],
            remedy="write the profile's entries into it (`gpuaas doctor`), or remove the file",
        ) from broken
    return document


@lru_cache(maxsize=8)
def _offers(folder: Path, states: tuple[tuple[str, _State], ...]) -> tuple[tuple[str, Offer], ...]:
    offers = []
    for name, state in states:
        # A broken profile is reported where it is used; it must not stop other launches.
        with contextlib.suppress(Problem, AttributeError, TypeError, ValueError):
            offers.append((name, Offer.of(_read(folder / f"{name}.yml", state))))
    return tuple(offers)
