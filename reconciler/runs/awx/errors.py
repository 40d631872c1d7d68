"""What can go wrong between us and AWX."""

from __future__ import annotations

from reconciler.runs.errors import LauncherAway


class Silent(LauncherAway):
    """No answer that can be relied on: whether the request was carried out is unknown."""


class NotSent(Silent):
    """Not even the connection came about: certainly nothing was carried out."""
