"""The catalogue for tenants: offers with their sizes, regions, and how much is free now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.models import Answer, Filter
from reconciler.api.placement import NearestRequest, SlotCounts
from reconciler.api.security import Holder
from reconciler.lifecycle import baremetal, placement
from reconciler.model import hardware
from reconciler.model.errors import Problem
from reconciler.model.scheduler.explain import public
from reconciler.model.states import CapacityShape
from reconciler.profiles import Prices, profile_offers, profile_skus, sku_prices
from reconciler.records import fleet, timeline

router = APIRouter(prefix="/catalog", tags=["catalog"])
T = TypeVar("T")

# Sizes that people choose from; a launch may name any number that its profile sells.
_COUNTS = (1, 2, 4, 8)


class Sku(Answer):
    """An offer. A launch names it by `name`; its sizes are for each GPU. A whole machine has the
    sizes of the machine.
    """

    name: str
    title: str
    capacity_shape: CapacityShape
    gpu_counts: list[int] = Field(description="GPUs that one machine of this offer can have.")
    vcpus_per_gpu: int | None
    memory_mib_per_gpu: int | None
    least_disk_bytes_per_gpu: int | None = Field(
        description="A slice gets the whole NVMe disk of each of its slots: bytes of the smallest"
        " that the site has for this SKU. Null while it has none."
    )
    most_disk_bytes_per_gpu: int | None = Field(description="Bytes of the largest of them.")
    image_runtime: list[str] = Field(description="What an image for it must contain.")
    gpu_hour_price: str | None = Field(
        description="Decimal, in the catalogue's currency; null without a price."
    )


class Region(Answer):
    """A region with machines, or one to come. `enabled`: a slice or a whole machine fits now."""

    name: str
    title: str = Field(description="For people; the name where the site has set none.")
    enabled: bool
    planned: bool = Field(description="It has no machine yet.")
    reason: str


class Catalog(Answer):
    """Everything that a launch can name, except images."""

    skus: list[Sku]
    regions: list[Region]
    currency: str = Field(description="Of every price, by its code of ISO 4217.")


class Availability(Answer):
    """Whether a slice of this size fits now; otherwise why not, and the nearest that fits."""

    sku: str
    region: str
    gpus: int
    fits: bool
    free: int
    largest: int = Field(description="The most GPUs that one slice could have now.")
    summary: str
    reasons: SlotCounts
    nearest: list[NearestRequest]


class MachineCount(Answer):
    """Whole machines of an SKU in a region, and how many of them a launch could get now."""

    sku: str
    region: str
    free: int


class Machines(Answer):
    """What is free of whole machines."""

    counts: list[MachineCount]


class AnswerCache:
    """Answers about availability, as of a moment.

    An answer judges every slot of the site: 0.1 s of a processor for 3,200 slots. So a question is
    judged once until something changes, and a caller has one question at a time, so that callers do
    not displace each other.
    """

    FRESH_S = 2.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._moment: tuple[object, float] = (None, 0.0)
        self._answers: dict[Hashable, Any] = {}
        self._sharing = threading.Lock()
        self._earlier: dict[Hashable, Any] = {}

    def get(
        self,
        conn: Connection,
        caller: str,
        question: Hashable,
        judge: Callable[[Connection], T],
    ) -> T:
        """The answer to a question; Problem `rate_exceeded` while the caller's last is judged."""
        answers = self._current(conn)
        if question not in answers:
            with self.turn(caller) as free:
                if not free:
                    raise Problem(
                        "rate_exceeded",
                        429,
                        expected="one question about availability at a time",
                        found="a second one before the first was answered",
                        remedy="ask again in a second",
                        detail={"retry_after_s": 1},
                    )
                answers[question] = judge(conn)
        answer: T = answers[question]
        return answer

    def share(self, conn: Connection, question: Hashable, judge: Callable[[Connection], T]) -> T:
        """The answer to a question that all callers ask alike, so that none of them is refused.
        While one request judges it, the others get the answer of the moment before.
        """
        answers = self._current(conn)
        if question not in answers:
            if not self._sharing.acquire(blocking=question not in self._earlier):
                earlier: T = self._earlier[question]
                return earlier
            try:
                if question not in answers:
                    answers[question] = self._earlier[question] = judge(conn)
            finally:
                self._sharing.release()
        answer: T = answers[question]
        return answer

    def _current(self, conn: Connection) -> dict[Hashable, Any]:
        # Every change of a slot has a row in the history, and one of a switch in the audit log.
        # Rows with an earlier number may be committed later, so a moment also has an age.
        latest = timeline.latest(conn)
        if self._moment[0] != latest or time.monotonic() - self._moment[1] > self.FRESH_S:
            self._moment, self._answers = (latest, time.monotonic()), {}
        return self._answers

    @contextmanager
    def turn(self, caller: str) -> Iterator[bool]:
        """Whether none of the caller's questions is judged now, so that another one may be."""
        with self._lock:
            free = caller not in self._busy
            self._busy.add(caller)
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._busy.discard(caller)


@router.get("")
def show(context: Holder) -> Catalog:
    """Offers and regions."""
    settings = context.settings
    offers = profile_offers(settings.profiles_dir)
    cache: AnswerCache = context.request.app.state.availability

    def judge(conn: Connection) -> tuple[dict[str, bool], dict[str, tuple[int, int]]]:
        return _regions(conn, offers), fleet.disk_sizes(conn)

    question = ("catalog", *offers.items())
    rooms, disks = context.read(lambda conn: cache.share(conn, question, judge))
    titles = settings.regions_to_come
    present = [
        Region(
            name=name,
            title=titles.get(name, name),
            enabled=enabled,
            planned=False,
            reason="" if enabled else "nothing is free here now",
        )
        for name, enabled in sorted(rooms.items())
    ]
    later: dict[str, Any] = {"enabled": False, "planned": True, "reason": "this region is to come"}
    names = sorted(titles.keys() - rooms.keys())
    to_come = [Region(name=name, title=titles[name], **later) for name in names]
    return Catalog(
        skus=_skus(offers, sku_prices(settings.profiles_dir), disks),
        regions=[*present, *to_come],
        currency=settings.currency,
    )


@router.get("/availability")
def availability(
    context: Holder,
    gpus: Annotated[int, Query(ge=1, le=1024, description="GPUs in one slice.")],
    *,
    sku: Filter = None,
    region: Filter = None,
) -> Availability:
    """Judge a slice as a launch would, and reserve nothing. Names no machine."""
    offers = profile_offers(context.settings.profiles_dir)
    profiles = tuple(name for name, offer in offers.items() if sku and offer.sku == sku)
    if sku and not profiles:
        raise Problem(
            "sku_unknown",
            422,
            expected=f"one of {', '.join(sorted({offer.sku for offer in offers.values()} - {''}))}",
            found=sku,
            remedy="choose an SKU of GET /api/v1/catalog",
        )
    want = hardware.want(offers, gpus, region=region or "", profiles=profiles)

    def judge(conn: Connection) -> Availability:
        placed, explanation = placement.judge(conn, want)
        names = {"sku": sku or "", "region": region or "", "gpus": gpus}
        return Availability.of(public(explanation), **names, fits=placed is not None)

    cache: AnswerCache = context.request.app.state.availability
    question, caller = (sku, region, gpus, profiles), context.caller.owner
    return context.read(lambda conn: cache.get(conn, caller, question, judge))


@router.get("/machines")
def machines(context: Holder) -> Machines:
    """Whole machines by SKU and region. Names no machine."""
    skus = profile_skus(context.settings.profiles_dir, CapacityShape.BAREMETAL)

    def judge(conn: Connection) -> Machines:
        total: dict[tuple[str, str], int] = {}
        for (profile, region), stock in baremetal.stock(conn).items():
            place = skus.get(profile, ""), region
            total[place] = total.get(place, 0) + stock.free
        rows = sorted(total.items())
        return Machines(
            counts=[MachineCount(sku=sku, region=region, free=free) for (sku, region), free in rows]
        )

    cache: AnswerCache = context.request.app.state.availability
    question, caller = ("machines", *skus.items()), context.caller.owner
    return context.read(lambda conn: cache.get(conn, caller, question, judge))


def _skus(
    offers: Mapping[str, hardware.Offer], sold: Prices, disks: Mapping[str, tuple[int, int]]
) -> list[Sku]:
    """Offers by SKU: slices, then whole machines. Of profiles with the same SKU the first describes
    it, but for the disks, which are those of all. disks: sizes by profile.
    """
    slices: dict[str, Sku] = {}
    machines: list[Sku] = []
    prices = {key: str(price) for key, price in sold.items()}
    for name, offer in offers.items():
        machines.append(
            Sku(
                name=name,
                title=offer.title or name,
                capacity_shape=CapacityShape.BAREMETAL,
                gpu_counts=[offer.gpus],
                vcpus_per_gpu=None,
                memory_mib_per_gpu=None,
                least_disk_bytes_per_gpu=None,
                most_disk_bytes_per_gpu=None,
                image_runtime=[],
                gpu_hour_price=prices.get((CapacityShape.BAREMETAL, name)),
            )
        )
        if not offer.sku or offer.sku in slices:
            continue
        alike = [each for each in offers if offers[each].sku == offer.sku]
        sizes = [disks[each] for each in alike if each in disks]
        counts = [count for count in _COUNTS if count <= offer.gpus and not offer.refusal(count)]
        slices[offer.sku] = Sku(
            name=offer.sku,
            title=offer.title,
            capacity_shape=CapacityShape.GPU_SLICE,
            gpu_counts=counts,
            vcpus_per_gpu=offer.vcpus,
            memory_mib_per_gpu=offer.memory_mib,
            least_disk_bytes_per_gpu=min((least for least, _ in sizes), default=None),
            most_disk_bytes_per_gpu=max((most for _, most in sizes), default=None),
            # On all of its hardware: an image that lacks less fits some of it.
            image_runtime=[
                part
                for part in offer.runtime
                if all(part in offers[each].runtime for each in alike)
            ],
            gpu_hour_price=prices.get((CapacityShape.GPU_SLICE, offer.sku)),
        )
    return [*slices.values(), *machines]


def _regions(conn: Connection, offers: Mapping[str, hardware.Offer]) -> dict[str, bool]:
    """Regions of all nodes that are not retired, and whether a slice of the smallest size on sale,
    or a whole machine, fits there now.
    """
    # A profile may sell no slice of a single GPU.
    sizes = {min(offer.counts, default=1) for offer in offers.values()}
    wants = [hardware.want(offers, size) for size in sorted(sizes)]
    with_room = placement.regions(conn, wants)
    with_room |= {region for (_, region), stock in baremetal.stock(conn).items() if stock.free}
    return {name: name in with_room for name in fleet.regions(conn)}
