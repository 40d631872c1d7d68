"""HTTP API: records intent, which tasks carry out."""
