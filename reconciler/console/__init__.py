"""The web console: pages over the API, for tenants and operators."""
