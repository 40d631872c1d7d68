"""The only place with SQL: records, guarded transitions, and what is written with them."""
