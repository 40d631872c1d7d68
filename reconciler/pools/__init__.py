"""Inference jobs and the workers that run them. The database is the truth."""
