"""Images for slices of a site: a base system, and the same with NVIDIA's driver, CUDA and RDMA.

Built by the lab's own builder from the distribution of this machine. A site whose packages come
from further repositories names them as apt sources.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab import cache, guest_image, image, rootfs
from lab.command import LabError, run
from lab.distro import Distro
from lab.paths import REPOSITORY
from lab.progress import step

OVERLAY = Path(__file__).parent / "slice" / "overlay"
KERNEL = {"debian": "linux-image-amd64", "ubuntu": "linux-image-generic"}
HEADERS = {"debian": "linux-headers-amd64", "ubuntu": "linux-headers-generic"}
RDMA = ["rdma-core", "ibverbs-utils", "infiniband-diags", "perftest"]
SIZES_MIB = {"base": 3072, "gpu": 16384}
WITHOUT_NVLINK = """
echo "options nvidia NVreg_NvLinkDisable=1" > /etc/modprobe.d/gpuaas-nvlink.conf
update-initramfs -u -k all
"""
_MISSING = re.compile(r"Unable to locate package (\S+)|Package '?([^' ]+)'? has no installation")


@dataclass(frozen=True)
class Runtime:
    """Runtime of guests, in the words of `guest_runtime` of a hardware profile; "" for none."""

    driver: str = ""
    cuda: str = ""
    rdma: bool = False
    # A guest with some GPUs of an NVSwitch system computes only without NVLink.
    nvlink: bool = True

    @property
    def labels(self) -> list[str]:
        """Return what `gpuaas images import --runtime` says of such an image."""
        named = {f"driver-{self.driver}": self.driver, f"cuda-{self.cuda}": self.cuda}
        named |= {"rdma": "rdma" * self.rdma, "nvlink-disabled": "1" * (not self.nvlink)}
        return sorted(label for label, value in named.items() if value)

    def packages(self, distro: Distro) -> list[str]:
        """Return the packages, of the same names as an installation at the first boot."""
        driver = [HEADERS[distro.id], f"nvidia-driver-{self.driver}"] if self.driver else []
        return [*driver, *([f"cuda-toolkit-{self.cuda}"] if self.cuda else []), *RDMA * self.rdma]


@dataclass(frozen=True)
class SliceImage:
    """Image in its folder, with the words that register it."""

    file: str
    digest: str
    size_bytes: int
    runtime: list[str]
    register: str


def build(
    name: str,
    distro: Distro,
    runtime: Runtime,
    folder: Path,
    sources: Sequence[str] = (),
    *,
    worker: bool = False,
) -> SliceImage:
    """Build the image `name`. A package that no source has is refused by its name. worker: with the
    program of job workers.
    """
    components = f"{distro.components} restricted" if distro.id == "ubuntu" else distro.components
    distro = replace(distro, components=components, more=tuple(sources))
    packages = [KERNEL[distro.id], *guest_image.PACKAGES, *runtime.packages(distro)]
    recipe = rootfs.Recipe(f"slice-{name}", packages, guest_image.INITRAMFS)
    try:
        base = rootfs.ensure(recipe, distro)
    except LabError as error:
        missing = [first or second for first, second in _MISSING.findall(str(error))]
        if not missing:
            raise
        raise LabError(
            f"image {name}: expected every package in {'; '.join(distro.sources)}; found no"
            f" {', '.join(sorted(set(missing)))}; add the repository that has it with --apt-source"
        ) from error
    finish = guest_image.FINISH.read_text()
    finish += "" if runtime.nvlink else WITHOUT_NVLINK
    size_mib = SIZES_MIB[name]
    inputs = {"rootfs": base.parent.name, "size": size_mib, "finish": finish}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".image-", dir=folder) as work, step(f"image {name}"):
        script, draft = Path(work) / "finish.sh", Path(work) / "disk.raw"
        script.write_text(finish)
        log = folder / f"{name}.log"
        overlay = Path(shutil.copytree(OVERLAY, Path(work) / "overlay"))
        if worker:
            program = REPOSITORY / "scripts" / "opt-venv"
            given = ["requirements.lock", "/usr/bin/python3", "worker"]
            run([program, overlay, *given], log=log)
        key = cache.content_key(inputs, [overlay, Path(image.__file__)])
        root = str(uuid.uuid5(uuid.NAMESPACE_OID, key))
        layout = image.Layout(size_mib, root, guest_image.ESP_ID, bios=True)
        raw = folder / f"{name}-{distro.suite}-{key}.raw"
        image.write(draft, layout, rootfs=base, overlays=[overlay], finish=script, log=log)
        with draft.open("rb") as stream:
            digest = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
        shutil.move(draft, raw)
    contents = sorted([*runtime.labels, *(["worker-kit"] if worker else [])])
    labels = "".join(f" --runtime {label}" for label in contents)
    words = f"gpuaas images import {raw} --source-digest {digest} --name {name} --version {key}"
    return SliceImage(str(raw), digest, size_mib * image.MIB, contents, words + labels)
