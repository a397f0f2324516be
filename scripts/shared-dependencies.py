#!/usr/bin/env python3
"""Fails for a dependency that `make quick` would compile with other features than the tests have, so that it is compiled twice.

Cargo unifies the features of what it builds at once: the tests enable some that the binary does not. The crate quintlet-test-features, which
`make quick` builds beside the binary, enables them, too."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "tests/support/features/Cargo.toml"
# The least number of dependencies: a comparison of nothing finds nothing.
LEAST = 300


def dependencies(*selection):
    """Each dependency of other repositories with its features, once for each set of features with which it is compiled."""
    command = ["cargo", "tree", "--locked", "--prefix", "none", "--format", "{p}|{f}", *selection]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.removesuffix(" (*)") for line in lines if line and str(ROOT) not in line}


tests = dependencies("--workspace", "--edges", "normal,build,dev")
quick = dependencies("--package", "quintlet", "--package", "quintlet-test-features", "--edges", "normal,build")
if len(quick) < LEAST:
    sys.exit(f"only {len(quick)} dependencies")
other = sorted(quick - tests)
for name in other:
    package, features = name.split("|")
    known = [line.split("|")[1] for line in tests if line.startswith(f"{package}|")]
    print(f"{package} has the features {features or '(none)'} in `make quick`, and {' or '.join(known)} in the tests: see {MANIFEST}", file=sys.stderr)
print(f"dependencies of both builds: {len(quick)}, {len(other)} with other features")
sys.exit(bool(other))
