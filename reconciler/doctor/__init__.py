"""Checks of an installation. They change nothing and need no running service."""
