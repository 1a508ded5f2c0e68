#!/usr/bin/env python3
"""Prints the bill of materials of the executable: every crate that is linked into it, as CycloneDX 1.6.

    deploy/sbom.py [--features rdma,gguf] [--target x86_64-unknown-linux-gnu] > baton.cdx.json

The image has it as /usr/share/baton/sbom.cdx.json. It contains no time and no random number, so the same Cargo.lock
gives the same file.
"""

import argparse
import json
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--features", default="rdma,gguf", help="cargo features of the executable, as in the Dockerfile")
    parser.add_argument("--target", default=host(), help="the target for which the executable is built")
    at = parser.parse_args()
    print(json.dumps(bill(at.features, at.target), indent=1))


def host():
    (line,) = [line for line in run("rustc", "-vV").splitlines() if line.startswith("host: ")]
    return line.removeprefix("host: ")


def run(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def bill(features, target):
    wanted = ["--locked", "--no-default-features"]
    metadata = json.loads(run("cargo", "metadata", "--format-version=1", f"--filter-platform={target}", *wanted))
    linked = crates(features, target, wanted)
    packages = {package["id"]: package for package in metadata["packages"] if (package["name"], package["version"]) in linked}
    (root,) = [package for package in packages.values() if package["name"] == "baton"]
    edges = {node["id"]: normal(node) & packages.keys() for node in metadata["resolve"]["nodes"] if node["id"] in packages}
    sums = checksums()
    libraries = (package for package in packages.values() if package is not root)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(root, sums, "application")},
        "components": sorted((component(package, sums, "library") for package in libraries), key=lambda one: one["bom-ref"]),
        "dependencies": sorted(
            ({"ref": ref(packages[id]), "dependsOn": sorted(ref(packages[to]) for to in onward)} for id, onward in edges.items()),
            key=lambda one: one["ref"],
        ),
    }


def crates(features, target, wanted):
    """Names and versions of the crates in the executable. `cargo metadata` also has those that only tests link."""
    tree = run(
        "cargo", "tree", "--package=baton", f"--features={features}", f"--target={target}", "--edges=normal", "--prefix=none",
        "--format={p}", *wanted,
    )
    return {(name, version.removeprefix("v")) for name, version, *_ in map(str.split, filter(None, tree.splitlines()))}


def normal(node):
    """The dependencies of a crate itself, without those of its tests and its build script."""
    return {dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])}


def checksums():
    """The SHA-256 of each crate's archive, by name and version. Our own crates have none."""
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    return {(one["name"], one["version"]): one["checksum"] for one in lock["package"] if "checksum" in one}


def ref(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, sums, kind):
    made = {"type": kind, "bom-ref": ref(package), "name": package["name"], "version": package["version"]}
    if package["description"]:
        made["description"] = " ".join(package["description"].split())
    if checksum := sums.get((package["name"], package["version"])):
        made["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    # Some crates still write `MIT/Apache-2.0`, which is no SPDX expression.
    made["licenses"] = [{"expression": " ".join(package["license"].replace("/", " OR ").split())}]
    made["purl"] = ref(package)
    if package["repository"]:
        made["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return made


if __name__ == "__main__":
    main()
