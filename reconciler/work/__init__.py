"""Tasks: leasing them, running their playbooks, and recording how they ended."""
