"""Alembic environment; it runs inside the transaction that `migrate` opened."""

from __future__ import annotations

from alembic import context

from reconciler.db.schema import metadata

connection = context.config.attributes["connection"]
# SQLite can roll back DDL as well, so a failed migration changes nothing.
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
context.run_migrations()
