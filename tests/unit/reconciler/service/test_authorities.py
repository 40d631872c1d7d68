"""A machine with SSH authorities of its own is none of the site's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from reconciler.model.errors import Problem
from reconciler.service.process import adopt
from reconciler.settings import Settings
from reconciler.trust.ca import open_trust


@pytest.mark.covers("CTRL-9")
def test_every_machine_has_the_sites(engine: sa.Engine, tmp_path: Path) -> None:
    first, second, third = (Settings(state_dir=tmp_path / name) for name in "abc")
    for settings in (first, second, third):
        settings.state_dir.mkdir(mode=0o700)
    adopt(first, engine)
    adopt(first, engine)
    # One that has none makes none: it would be used by the next who looks no further.
    with pytest.raises(Problem, match=r"authorities_differ.*found no keys"):
        adopt(second, engine)
    assert not (second.state_dir / "trust").exists()
    open_trust(third.state_dir)
    with pytest.raises(Problem, match=r"authorities_differ.*found other keys"):
        adopt(third, engine)
    shutil.copytree(first.state_dir / "trust", second.state_dir / "trust")
    adopt(second, engine)
