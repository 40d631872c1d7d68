"""The processes of the service: what runs in them, and how they say that they live."""
