"""A task with what its handler needs to know, read in the transaction at hand."""

from __future__ import annotations

from sqlalchemy import Connection

from reconciler.domain import hardware
from reconciler.profiles import hardware_profile
from reconciler.settings import Settings
from reconciler.store import nodes, order
from reconciler.tasks.handler import Record, Work


def open_work(conn: Connection, settings: Settings, task: Record) -> Work:
    node = nodes.get(conn, task["node_id"])
    profile = hardware.of_node(hardware_profile(settings.profiles_dir, node["profile"]), node)
    return Work(conn, task, node, profile, settings)


def failed_work(conn: Connection, settings: Settings, task: Record) -> Work:
    """What a failure means for its subject needs no profile, and the profile may be gone by now.

    What it may change is held, in the order of everybody else.
    """
    if task["allocation_id"]:
        order.hold_allocation(conn, task["allocation_id"])
    return Work(conn, task, nodes.get(conn, task["node_id"]), {}, settings)
