#!/bin/sh
# Makes docs/live-screen.svg, the picture in README.md: runs `quintctl up` with the manifests of examples/ in a terminal of tmux, as
# `make run` does, and converts what the terminal shows. Needs root, tmux and Python's venv module.
#
#   BIN_DIR=DIR  directory of the binaries (target/release)
set -eu

cd "$(dirname "$0")/.."
bin_dir=$(realpath "${BIN_DIR:-${CARGO_TARGET_DIR:-target}/release}")
python=${CARGO_TARGET_DIR:-target}/tools/screenshot/bin/python
work=$(mktemp -d)
columns=118

# A private tmux server: sessions of the user are not affected.
run_tmux() {
    tmux -S "$work/tmux" -f /dev/null "$@"
}

# Ends the node as a user does, and waits until it has cleaned up.
cleanup() {
    run_tmux send-keys C-c 2>/dev/null || true
    tries=0
    while run_tmux has-session 2>/dev/null && [ $tries -lt 60 ]; do
        tries=$((tries + 1))
        sleep 1
    done
    run_tmux kill-server 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

if ! "$python" -c "import rich" 2>/dev/null; then
    python3 -m venv "${python%/bin/python}"
    "$python" -m pip install --quiet rich
fi

# In a separate directory, so that a `make run` in this one is not affected and paths are as short as there.
cp -r examples "$work"
run_tmux new-session -d -x $columns -y 14 -c "$work" "$bin_dir/quintctl up --private-containerd --down --base .run --manifests examples"

# By then the crashing pod waits for its third start, and the other pods have settled.
tries=0
until run_tmux capture-pane -p | grep -q 'CrashLoopBackOff  *2'; do
    tries=$((tries + 1))
    if [ $tries -ge 120 ]; then
        echo "screenshot: the pods did not settle within two minutes" >&2
        run_tmux capture-pane -p >&2
        exit 1
    fi
    sleep 1
done
run_tmux capture-pane -e -p > "$work/screen"

"$python" - "$work/screen" $columns docs/live-screen.svg <<'PY'
import io
import re
import sys

from rich.console import Console
from rich.text import Text

screen, columns, picture = sys.argv[1:]
with open(screen) as lines:
    text = Text.from_ansi(lines.read().rstrip("\n"))
console = Console(record=True, width=int(columns), file=io.StringIO(), force_terminal=True, color_system="truecolor")
console.print(text, overflow="crop", no_wrap=True)
svg = console.export_svg(title="make run", unique_id="screen")
# The fonts of the reader's machine: an image in a README may not load any.
svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")
with open(picture, "w") as file:
    file.write("\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n")
PY
echo "written: docs/live-screen.svg"
