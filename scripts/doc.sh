#!/bin/bash
# Checks the documentation of each library, and runs its examples, against what was compiled for the tests.
#
# `cargo doc` would compile all dependencies once more, without code. `cargo test --doc` uses those of the tests, one library after the
# other. So it calls this script as its rustdoc, which records each call; the calls are then made by all processors.
set -eu

if [ -n "${QUINTLET_DOC_CALLS:-}" ]; then
    # Called by cargo, in the directory and with the environment of the library.
    call=$(mktemp "$QUINTLET_DOC_CALLS/XXXXXXXX")
    {
        export -p
        printf 'cd %q\n' "$PWD"
        # A library without a code block has no example.
        if grep -rqs --include='*.rs' '//[/!] *```' "$CARGO_MANIFEST_DIR"; then
            printf '%q ' rustdoc "$@"
            echo
        fi
        lint=()
        skip=
        for arg in "$@"; do
            case "$arg" in
            --test) ;;
            --test-run-directory | --test-args | --test-runtool) skip=1 ;;
            --test-run-directory=* | --test-args=* | --test-runtool=*) ;;
            *) [ -n "$skip" ] || lint+=("$arg"); skip= ;;
            esac
        done
        printf '%q ' rustdoc "${lint[@]}" -D warnings --out-dir "$QUINTLET_DOC_CALLS/out"
        echo
    } > "$call"
    mv "$call" "$call.sh"
    exit 0
fi

QUINTLET_DOC_CALLS=$(mktemp -d)
export QUINTLET_DOC_CALLS
trap 'rm -rf "$QUINTLET_DOC_CALLS"' EXIT
RUSTDOC=$(realpath "$0") "${CARGO:-cargo}" test --workspace --doc --locked --quiet
calls=("$QUINTLET_DOC_CALLS"/*.sh)
echo "documentation of ${#calls[@]} libraries"
# A check of nothing passes.
[ "${#calls[@]}" -ge 40 ]
printf '%s\0' "${calls[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -eu
