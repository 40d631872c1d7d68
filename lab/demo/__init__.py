"""Demonstration of the product's main job on a lab host, step by step through the public API."""
