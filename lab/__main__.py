"""Entry point of `python -m lab`, with the same commands as `gpuaas lab`."""

from __future__ import annotations

from lab.cli import app

if __name__ == "__main__":
    app(prog_name="lab")
