"""Errors of the trust package."""

from __future__ import annotations

from reconciler.model.errors import Refusal


class TrustError(Refusal):
    """A certificate or key cannot be made or read."""
