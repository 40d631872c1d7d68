"""Software bill of materials of the service in CycloneDX's form, from the lock: build/sbom.json."""

from __future__ import annotations

import re
import sys
import tomllib
import uuid
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[1]
_PIN = re.compile(r"(?P<name>[a-z0-9-]+)(?P<extras>\[[^]]+\])?==(?P<version>\S+)(?: ; [^\\]+)?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def pins(lock: str) -> dict[str, tuple[str, list[str]]]:
    """Version and digests of each package of a lock. ValueError: a line that pins nothing."""
    packages: dict[str, tuple[str, list[str]]] = {}
    for entry in lock.replace("\\\n", " ").splitlines():
        head, *options = entry.split(" --hash", 1)
        pin, digests = _PIN.fullmatch(head.strip()), _HASH.findall(entry)
        if pin is None or not options or len(digests) != entry.count("--hash="):
            raise ValueError(f"expected name==version and sha256 digests; found {entry[:120]}")
        packages[pin["name"]] = (pin["version"], digests)
    return packages


def document(lock: str, project: dict[str, str]) -> str:
    """The bill as JSON; one component for each package."""
    components = [
        Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"{name}=={version}",
            purl=PackageURL("pypi", None, name, version),
            external_references=[
                ExternalReference(
                    type=ExternalReferenceType.DISTRIBUTION,
                    url=XsUri(f"https://pypi.org/project/{name}/{version}/"),
                    hashes=[
                        HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in digests
                    ],
                )
            ],
        )
        for name, (version, digests) in pins(lock).items()
    ]
    service = Component(
        name=project["name"],
        version=project["version"],
        type=ComponentType.APPLICATION,
        bom_ref=project["name"],
    )
    bill = Bom(
        components=components,
        metadata=BomMetaData(component=service),
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, lock),
    )
    bill.register_dependency(service, components)
    return JsonV1Dot6(bill).output_as_string(indent=1)


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    file = ROOT / "build" / "sbom.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(document((ROOT / "requirements.lock").read_text(), project) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
