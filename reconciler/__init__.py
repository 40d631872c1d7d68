"""The reconciler."""
