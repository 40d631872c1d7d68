"""The command `gpuaas`."""
