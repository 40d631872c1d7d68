"""A PostgreSQL server that a test may stop as a power cut would, and start again."""

from __future__ import annotations

from tests.postgresql import Server as Postgres

__all__ = ["Postgres"]
