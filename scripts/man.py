#!/usr/bin/env python3
"""Writes the man pages of all programs of a binary, made from their `--help`: `scripts/man.py BINARY VERSION DIRECTORY`.

RUN is a program that runs the binary, such as qemu-aarch64-static. SOURCE_DATE_EPOCH is the date of the pages.
"""

import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

PROGRAMS = ["cri-proxy", "kubelet", "node-api", "pleg-service", "pod-sync", "probe-service", "quintctl", "status-reporter"]
# A page with fewer options has lost some.
LEAST = {"pod-sync": 100, "node-api": 40, "quintctl": 3}


def help_of(binary, words):
    command = [*os.environ.get("RUN", "").split(), binary, *words, "--help"]
    # Long lines are not folded, so that each paragraph is a line.
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "10000"}).stdout


def escaped(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def commands(text):
    """The subcommands that a help lists."""
    block = re.search(r"^Commands:\n((?:  .*\n?)+)", text, flags=re.M)
    return [name for name in re.findall(r"^  (\S+)", block[1] if block else "", flags=re.M) if name != "help"]


def page(title, text, version, date):
    about, _, rest = text.partition("\n\n")
    usage, _, rest = rest.partition("\n\n")
    summary = " ".join(about.split()).split(". ")[0].rstrip(".")
    lines = [f'.TH "{title.upper()}" "8" "{date}" "Quintlet {version}" "Quintlet"', ".SH NAME", f"{escaped(title)} \\- {escaped(summary)}"]
    lines += [".SH SYNOPSIS", escaped(usage.removeprefix("Usage: ").strip()), ".SH DESCRIPTION", escaped(" ".join(about.split()))]
    for line in rest.splitlines():
        heading = re.fullmatch(r"(\S.*):", line)
        item = re.fullmatch(r" {2,6}((?:-|<|\[|[a-z]).*?)(?: {2,}(\S.*))?", line)
        if heading:
            lines.append(f".SH {escaped(heading[1].upper())}")
        elif item and not line.startswith("       "):
            lines += [".TP", f"\\fB{escaped(item[1])}\\fR"]
            lines += [escaped(item[2])] if item[2] else []
        elif not line.strip():
            continue
        elif line.startswith(" "):
            lines.append(escaped(line.strip()))
        else:
            lines += [".PP", escaped(line)]
    return "\n".join(lines) + "\n"


def main():
    if len(sys.argv) != 4:
        print(f"usage: {sys.argv[0]} BINARY VERSION DIRECTORY", file=sys.stderr)
        return 64
    binary, version, directory = sys.argv[1:]
    date = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), timezone.utc).strftime("%Y-%m-%d")
    todo = [[name] for name in PROGRAMS]
    while todo:
        words = todo.pop()
        text = help_of(binary, words)
        todo += [[*words, name] for name in commands(text)]
        title = "-".join(words)
        options = len(re.findall(r"^ +(?:-\w, )?--[\w-]+", text, flags=re.M))
        if options < LEAST.get(title, 1):
            print(f"man: only {options} options in the help of {title}", file=sys.stderr)
            return 1
        (Path(directory) / f"{title}.8").write_text(page(title, text, version, date))
    return 0


sys.exit(main())
