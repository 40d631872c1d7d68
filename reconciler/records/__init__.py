"""Records by noun, each in its file: reading, inserting, guarded updates."""
