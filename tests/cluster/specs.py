#!/usr/bin/env python3
"""Reads the JUnit reports of the upstream test suite in a folder, and writes passed.txt and failed.txt beside them.

    specs.py DIR    fails if a spec failed or none ran
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

folder = pathlib.Path(sys.argv[1])
passed, failed = set(), {}
for report in folder.glob("junit*.xml"):
    for case in ElementTree.parse(report).iter("testcase"):
        # The others are nodes of the suite, such as [ReportAfterSuite].
        is_spec = case.get("name", "").startswith("[It] ")
        name = case.get("name", "").removeprefix("[It] ")
        if case.get("status") == "passed" and is_spec:
            passed.add(name)
        elif case.get("status") not in ("passed", "skipped", "pending"):
            problem = case.find("failure") if case.find("failure") is not None else case.find("error")
            text = (problem.get("message") or problem.text or "") if problem is not None else ""
            failed[name] = " ".join(text.split())[:300]
(folder / "passed.txt").write_text("".join(f"{name}\n" for name in sorted(passed)))
(folder / "failed.txt").write_text("".join(f"{name}\n    {why}\n" for name, why in sorted(failed.items())))
for name, why in sorted(failed.items()):
    print(f"failed: {name}\n    {why}")
print(f"{len(passed)} specs passed, {len(failed)} failed: {folder}")
sys.exit(bool(failed) or not passed)
