#!/usr/bin/env python3
"""Fails for a file that a service writes in place.

The loss of power may leave such a file empty or incomplete, so files are replaced by `kit::atomic_file`, which syncs those that must
survive. WRITES are the calls that create or change a file. ALLOWED has the places where that is right, with the reason.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WRITES = re.compile(
    r"\bfs::(?:write|copy|hard_link|rename)\(|\bFile::(?:create|create_new|options)\(|\bOpenOptions::new\(|\bOFlags::CREATE\b|\bfs::rename\b"
)
# The start of a file's path: the number of its writes, and why they need no helper.
ALLOWED = {
    "services/shared/kit/src/beneath.rs": (2, "files of pods, below a directory that a pod may change"),
    "services/shared/kit/src/own_limits.rs": (1, "a file of /proc"),
    "services/shared/cgroups/src/files.rs": (1, "a file of a cgroup"),
    "services/pod-sync/volumes/direct/src/atomic.rs": (2, "a new version of a volume, whose bytes the next start compares"),
    "services/pod-sync/volumes/direct/src/host_path.rs": (1, "an empty file of the host, as the volume's type says"),
    "services/pod-sync/volumes/direct/src/empty_dir.rs": (1, "a mark without content"),
    "services/pod-sync/volumes/direct/src/quotas/files.rs": (1, "a lock"),
    "services/pod-sync/volumes/csi/src/block.rs": (1, "an empty file to mount a device on"),
    "services/pod-sync/volumes/in-tree/src/block.rs": (1, "an empty file to mount a device on"),
    "services/pod-sync/volumes/in-tree/src/host.rs": (1, "a file of /sys"),
    "services/pod-sync/node/certificates/src/store.rs": (1, "a link, whose directory is synced"),
    "services/pod-sync/node/eviction-loop/src/memory_alarm.rs": (1, "a file of a cgroup"),
    "services/pod-sync/node/object/src/machine_checks.rs": (1, "a file of /proc"),
    "services/pod-sync/base/records/src/journal.rs": (1, "appended to; each line has a checksum"),
    "services/pod-sync/base/records/src/state_file.rs": (1, "an unusable file is moved aside"),
    "services/pod-sync/base/records/src/owner.rs": (1, "a lock, whose text has no meaning without it"),
    "services/pod-sync/base/clients/src/unsent.rs": (1, "changed in place; each entry has a checksum"),
    "services/pod-sync/base/containment/src/work_file.rs": (1, "changed in place, for the case of a crash of the process alone"),
    "services/pod-sync/base/cri-config/src/mounts.rs": (2, "files that containers have mounted, written for each start"),
    "services/pod-sync/base/cri-config/src/subpath.rs": (1, "an empty file to mount a volume on"),
    "services/quintctl/src/bundle/mod.rs": (1, "an archive for a person"),
    "services/quintctl/src/up/processes.rs": (1, "a lock"),
    "services/quintctl/src/up/logs.rs": (5, "logs"),
    "services/quintctl/install/src/swap.rs": (5, "the binary and its links, synced before they are renamed"),
}
# Not services: a containerd for tests.
SKIPPED = ("services/shared/localnode/", "services/shared/kit/src/atomic_file.rs")
LEAST = 20


def product_lines(text):
    """The lines of a file outside of its test modules and comments."""
    lines, is_test = text.splitlines(), False
    for number, line in enumerate(lines):
        following = " ".join(lines[number + 1 : number + 4])
        if re.match(r"#\[cfg\((?:all\()?test\b", line) and re.search(r"\bmod \w+ \{", following):
            is_test = True
        if not is_test and not line.strip().startswith(("//", "use ")):
            yield number + 1, line
        if is_test and line == "}":
            is_test = False


def check_itself():
    sample = 'fn a() {\n    fs::write(p, "");\n}\n// fs::write(\n#[cfg(test)]\nmod tests {\n    fn b() { fs::write(p, ""); }\n}\n'
    found = [number for number, line in product_lines(sample) if WRITES.search(line)]
    assert found == [2], f"found {found} in the sample"


def main():
    check_itself()
    names = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard", "services/*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found, failures = {}, 0
    for name in sorted(set(filter(None, names.split("\0")))):
        path = ROOT / name
        is_test = "/tests/" in name or "/src/" not in name or path.name == "tests.rs" or path.name.endswith("_tests.rs")
        if is_test or not path.is_file() or name.startswith(SKIPPED):
            continue
        lines = [number for number, line in product_lines(path.read_text()) if WRITES.search(line)]
        if lines:
            found[name] = lines
    for name, lines in found.items():
        allowed = ALLOWED.get(name, (0, ""))[0]
        if len(lines) > allowed:
            failures += 1
            print(f"{name}: {len(lines)} writes at lines {lines}, {allowed} allowed: take kit::atomic_file")
    for name, (allowed, _) in ALLOWED.items():
        if len(found.get(name, [])) < allowed:
            failures += 1
            print(f"{name}: {len(found.get(name, []))} writes, {allowed} allowed: correct the list in {Path(__file__).name}")
    total = sum(map(len, found.values()))
    print(f"file writes: {total} outside of kit::atomic_file, {failures} faults")
    return 1 if failures or total < LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
