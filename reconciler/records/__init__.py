"""Records of one noun per file: reading, inserting, guarded updates."""
