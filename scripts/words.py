#!/usr/bin/env python3
"""Checks the words of the code: names that were replaced do not come back, and doc comments say more than the signature.

- REPLACED lists identifiers that were renamed, with the directories in which they must not occur.
- A doc comment of three words or fewer does not repeat the words of its item: remove it, or say what the signature does not.
  ALLOWED lists the crates that still have such comments, with their number of today. A number may only go down.

With --show, prints these doc comments, too.
"""

import re
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 3
def stems(text):
    """The words of an identifier or a text, without a plural's s."""
    return {word.lower().rstrip("s") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}


# Words that say nothing beside a signature.
EMPTY = stems(
    "a all an and any are at by for from had has have in is it its many more no none not of off on one or other own said that the "
    "their there they this those to was were what when where which who whom whose why will with call came back makes made return"
)

# Identifier, its replacement, and the directories or files in which it must not occur.
EVERYWHERE = ("services", "tests", "proto")
POD_SYNC = ("services/pod-sync",)
REPLACED = [
    (r"Fleet", "PodWorkers", EVERYWHERE),
    (r"Told", "NextWork", EVERYWHERE),
    (r"Table", "PodManager", POD_SYNC),
    (r"First", "StaticPodGate", POD_SYNC),
    (r"Unsure", "PendingAdmission", EVERYWHERE),
    (r"Halt::Cut", "Halt::Interrupted", EVERYWHERE),
    (r"Openers", "PullCredentials", POD_SYNC),
    (r"PullLanes", "PullLimits", POD_SYNC),
    (r"ProbeView", "ProbeResults", POD_SYNC),
    (r"Standing|Ledger", "WorkPermission, ContainmentRecords", POD_SYNC),
    (r"Occasion", "ReadTrigger", POD_SYNC),
    (r"GroupNow", "CgroupState", POD_SYNC),
    (r"Shortage", "InsufficientResource", POD_SYNC),
    (r"Outcome::(Cut|Again)", "Outcome::Interrupted, Outcome::Requeue", POD_SYNC),
    (r"Ended", "CompletedExecs", ("services/cri-proxy",)),
    (r"Terms", "FencingToken", EVERYWHERE),
    (r"Lacking", "UnsupportedListStreams", EVERYWHERE),
    (r"Nomination", "InspectionRequest", EVERYWHERE),
    (r"Raw|Why", "ProbeAttempt, IdleReason", ("services/probe-service",)),
    (r"patience(?=::|;)", "peer_startup", ("services/shared",)),
    (r"Mistake|mistakes", "Diagnostic, diagnostics", EVERYWHERE),
    (r"Judge", "functions of worker::policy", EVERYWHERE),
    (r"[Ss]eams?", "Failpoint, a trait's name", EVERYWHERE),
    (r"Watcher", "failpoint::Observer", ("services/shared/kit",)),
]
# Replaced identifier: number of its occurrences that are left. A number may only go down.
LEFT = {}
# Files that were renamed.
REPLACED_FILES = {
    "foreign.rs": "unsupported_flags.rs",
    "newer.rs": "cri_extensions.rs",
    "seams.rs": "traits.rs",
    "seam.rs": "failpoint.rs",
    "patience.rs": "peer_startup.rs",
    "mistakes.rs": "diagnostics.rs",
}

# Crate: number of doc comments that repeat the signature.
ALLOWED = {
    "node-api": 12,
}


def code(text):
    """The text without comments and literals."""
    return re.sub(r'//[^\n]*|r#*"(?:.|\n)*?"#*|"(?:\\.|[^"\\])*"', lambda m: "\n" * m[0].count("\n"), text)


def repetitions(text):
    """Line and text of each doc comment of a few words that are all words of its item, or no words at all."""
    for block in re.finditer(r"(?:^[ \t]*///[^\n]*\n)+((?:\s*#\[[^\n]*\n)*)([^\n]*)", text, flags=re.M):
        comment = " ".join(re.findall(r"^[ \t]*///(.*)", block[0], flags=re.M)).strip()
        # A comment without a full stop is a help text of the command line.
        if len(comment.split()) > MOST_WORDS or re.search(r"[`\d]", comment) or not comment.endswith("."):
            continue
        if stems(comment) - EMPTY <= stems(block[2]):
            yield text.count("\n", 0, block.start()) + 1, f"{comment!r} of {block[2].strip()}"


def crates():
    """Directory and name of each crate of the product, innermost first."""
    manifests = sorted((ROOT / "services").rglob("Cargo.toml"), key=lambda m: -len(m.parts))
    return {m.parent: tomllib.loads(m.read_text())["package"]["name"] for m in manifests}


def main():
    failures = []
    sources = [file for top in EVERYWHERE for file in sorted((ROOT / top).rglob("*.rs"))]
    if len(sources) < 400:
        failures.append(f"only {len(sources)} sources")
    by_dir = crates()
    short = Counter()
    occurrences = defaultdict(list)
    for file in sources:
        path, text = str(file.relative_to(ROOT)), file.read_text()
        if replacement := REPLACED_FILES.get(file.name):
            failures.append(f"{path}: the name was replaced by {replacement}")
        plain = code(text)
        for names, replacement, places in REPLACED:
            if not path.startswith(places):
                continue
            for match in re.finditer(rf"\b(?:{names})\b", plain):
                place = f"{path}:{plain.count(chr(10), 0, match.start()) + 1}"
                occurrences[match[0]].append(f"{place}: {match[0]} was replaced by {replacement}")
        crate = next((name for directory, name in by_dir.items() if directory in file.parents), None)
        if crate is None:
            continue
        for line, comment in repetitions(text):
            short[crate] += 1
            if "--show" in sys.argv:
                print(f"{path}:{line}: {comment}")
    for name in sorted(occurrences.keys() | LEFT.keys()):
        found, left = occurrences[name], LEFT.get(name, 0)
        if len(found) > left:
            failures += found
        elif len(found) < left:
            failures.append(f"{name}: write {len(found)} for {left} into LEFT of scripts/words.py")
    for crate in sorted(set(by_dir.values()) | ALLOWED.keys()):
        allowed = ALLOWED.get(crate, 0)
        if short[crate] > allowed:
            failures.append(f"{crate}: {short[crate]} doc comments that repeat the signature, {allowed} allowed (--show lists them)")
        elif short[crate] < allowed:
            failures.append(f"{crate}: write {short[crate]} for {allowed} into ALLOWED of scripts/words.py")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
