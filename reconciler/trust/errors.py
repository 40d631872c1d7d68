"""Errors of trust."""

from __future__ import annotations

from reconciler.model.errors import Refusal


class TrustError(Refusal):
    """A certificate that is not given, or cannot be read."""
