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
# Each pattern with a line that it must find. An import hides the module's name at the calls, so it counts itself.
PATTERNS = {
    r"\bfs::(?:write|copy|hard_link|rename)\b": ['std::fs::write(path, "")?;', "paths.try_for_each(fs::rename)"],
    r"\bFile::(?:create|create_new|create_buffered|options)\b": ["File::create_buffered(path)?;", "File::create_new(path)?;", "File::options();"],
    r"\bOpenOptions::(?:new|default)\b": ["let options = OpenOptions::new();", "OpenOptions::default()"],
    r"\bO_(?:CREAT|TMPFILE)\b": ["let flags = OFlag::O_CREAT | OFlag::O_WRONLY;", "libc::O_TMPFILE"],
    r"\bOFlags::(?:CREATE|TMPFILE)\b": ["let flags = OFlags::CREATE;", "OFlags::TMPFILE"],
    r"\b(?:renameat2?|renameat_with|linkat)\(": ["rustix::fs::renameat(&from, a, &to, b)?;", "fs::renameat_with(a, b, c, d, e)?;", "fs::linkat(a, b, c, d, e)?;"],
    r"\bNamedTempFile::\w": ["let file = NamedTempFile::new_in(dir)?;"],
    r"\b(?:tempfile|tempfile_in|make_in)\((?!\))": ["Builder::new().tempfile_in(dir)?;", "builder.make_in(dir, bind)?;"],
    r"\.tempfile\(\)|\btempfile::tempfile\(": ["Builder::new().tempfile()?;", "let file = tempfile::tempfile()?;"],
    # Some managers have a method `persist`.
    r"\.persist(?:_noclobber)?\((?!\))": ["file.persist(path)?;", "file.persist_noclobber(path)?;"],
}
IMPORTS = {
    r"\bfs::(?:write|copy|hard_link|rename|renameat\w*|linkat)\b": ["use std::fs::write;", "use rustix::fs::renameat;"],
    r"\bfs::\{[^}]*\b(?:write|copy|hard_link|rename|renameat\w*|linkat|\*)": ["use std::fs::{File, write};", "use std::{fs::{self, copy}, io};", "use std::fs::{\n    rename,\n};"],
    r"\bfs(?:::\w+)* as [A-Za-z]|\bfs::\{[^}]* as [A-Za-z]|\bfs::\*": ["use std::fs as files;", "use std::fs::OpenOptions as Options;", "use std::fs::{File as Handle};", "use std::fs::*;"],
}
WRITES, IMPORTED = re.compile("|".join(PATTERNS)), re.compile("|".join(IMPORTS))
USE = re.compile(r"\s*(?:pub(?:\(\w+\))? )?use ")
# The start of a file's path: the number of its writes, and why they need no helper.
ALLOWED = {
    "services/shared/kit/src/beneath.rs": (3, "files of pods, below a directory that a pod may change"),
    "services/shared/kit/src/grant.rs": (1, "a lock"),
    "services/shared/kit/src/socket.rs": (2, "a socket"),
    "services/shared/kit/src/tree.rs": (1, "a directory that is being removed"),
    "services/shared/kit/src/own_limits.rs": (1, "a file of /proc"),
    "services/shared/profile/src/heap.rs": (1, "a file that jemalloc writes and that is read at once"),
    "services/shared/profile/src/scratch.rs": (2, "a check that a temporary file can be created"),
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
    "services/quintctl/src/profile.rs": (1, "a profile for a person"),
    "services/quintctl/src/up/processes.rs": (1, "a lock"),
    "services/quintctl/service-logs/src/lib.rs": (5, "logs"),
    "services/quintctl/install/src/swap.rs": (5, "the binary and its links, synced before they are renamed"),
}
# Not services: a containerd for tests.
SKIPPED = ("services/shared/localnode/", "services/shared/kit/src/atomic_file.rs")
LEAST = 20


def product_lines(text):
    """The lines of a file outside of its test modules and comments, without its imports."""
    lines, is_test, is_import = text.splitlines(), False, False
    for number, line in enumerate(lines):
        if re.match(r"#\[cfg\((?:all\()?test\b", line):
            following = next((later for later in lines[number + 1 :] if not later.startswith("#[")), "")
            is_test = is_test or bool(re.match(r"(?:pub(?:\(\w+\))? )?mod \w+ \{$", following))
        is_import = is_import or bool(USE.match(line))
        if not is_test and not is_import and not line.strip().startswith("//"):
            yield number + 1, line
        is_import = is_import and ";" not in line
        if is_test and line == "}":
            is_test = False


def imports(text):
    """The imports of a file with the number of their first line. Those of a test module are indented, and are not wanted."""
    for found in re.finditer(r"^(?:pub(?:\(\w+\))? )?use [^;]*;", text, re.MULTILINE):
        yield text.count("\n", 0, found.start()) + 1, found.group()


def writes(text):
    """The numbers of the lines that write a file."""
    calls = {number for number, line in product_lines(text) if WRITES.search(line)}
    return sorted(calls | {number for number, line in imports(text) if IMPORTED.search(line)})


def check_itself():
    for patterns, is_import in ((PATTERNS, False), (IMPORTS, True)):
        for pattern, samples in patterns.items():
            for sample in samples:
                assert re.search(pattern, sample), f"{pattern} does not find {sample}"
                text = sample if is_import else f"fn a() {{\n    {sample}\n}}\n"
                assert writes(text) == [1 if is_import else 2], f"found {writes(text)} in the sample {sample}"
    for sample in ("use std::fs::{File, OpenOptions};", "use std::fs;", "// fs::write(", "let dir = tempfile::tempdir()?;", "use std::os::unix::fs::OpenOptionsExt as _;"):
        assert not writes(sample), f"found {writes(sample)} in the sample {sample}"
    write = '    fs::write(p, "");\n'
    module = f"#[cfg(test)]\n#[path = \"t.rs\"]\nmod tests {{\n{write}}}\n"
    sample = f"fn a() {{\n{write}}}\n// fs::write(\n{module}fn b() {{\n{write}}}\n#[cfg(test)]\nmod tests;\nmod other {{\n{write}}}\n"
    assert writes(sample) == [2, 11, 16], f"found {writes(sample)} in the sample"


def main():
    check_itself()
    names = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard", "services/*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found, failures = {}, 0
    for name in sorted(set(filter(None, names.split("\0")))):
        path = ROOT / name
        is_test = "/tests/" in name or "/src/" not in name or path.name == "tests.rs" or path.name.endswith("_tests.rs")
        if is_test or not path.is_file() or name.startswith(SKIPPED):
            continue
        lines = writes(path.read_text())
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
