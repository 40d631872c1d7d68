"""Database layer: engine, schema, migrations, and the journal that every state change uses."""
