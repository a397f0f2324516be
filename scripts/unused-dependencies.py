#!/usr/bin/env python3
"""Fails for a dependency of a crate that no file of the crate names.

A dependency that only text which a build script writes names is listed in GENERATED. The crate FEATURES only enables features of its own."""
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Code that tonic generates names these.
GENERATED = {"prost", "tonic-prost"}
# Names of libraries that differ from those of their packages.
LIBRARIES = {"rustls-webpki": "webpki"}
FEATURES = ROOT / "tests/support/features/Cargo.toml"


def sources(crate, parts):
    for part in parts:
        path = crate / part
        for file in [path] if path.is_file() else path.rglob("*.rs"):
            yield re.sub(r"(?m)^\s*//[^/!].*$", "", file.read_text())


faults = []
for manifest in sorted([ROOT / "proto/Cargo.toml", *(ROOT / "services").rglob("Cargo.toml"), *(ROOT / "tests").rglob("Cargo.toml")]):
    if manifest == FEATURES:
        continue
    data = tomllib.loads(manifest.read_text())
    crate = manifest.parent
    targets = [t["path"] for kind in ("test", "bin", "bench", "example") for t in data.get(kind, []) if "path" in t]
    for table, parts in {
        "build-dependencies": ["build.rs", "build"],
        "dependencies": ["src", "tests", "benches", *targets],
        "dev-dependencies": ["src", "tests", "benches", *targets],
    }.items():
        text = "\n".join(sources(crate, parts))
        for name in data.get(table, {}):
            library = LIBRARIES.get(name, name).replace("-", "_")
            generated = name in GENERATED and (crate / "build.rs").exists()
            if not generated and not re.search(rf"\b{library}\b", text):
                faults.append(f"{manifest.relative_to(ROOT)}: {name} is not used ({table})")

for fault in faults:
    print(fault, file=sys.stderr)
sys.exit(bool(faults))
