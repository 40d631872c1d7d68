"""The database: engine, schema, migrations, and what every write goes through."""
