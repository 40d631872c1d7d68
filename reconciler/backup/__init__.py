"""Backup of a site in a single file, and restore from it."""
