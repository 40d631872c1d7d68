"""Every test of enrolment has a machine, a certificate authority and an API of its own."""

from tests.unit.reconciler.trust.machine import api, host, trust

__all__ = ["api", "host", "trust"]
