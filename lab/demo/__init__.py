"""The main job of the product on a lab host, step by step, through the product's own API."""
