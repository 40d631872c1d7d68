"""SSH gateway: the tenants' way to their machines."""
