#!/bin/sh
# Checks that every test that SECURITY.md names exists, in the crate that the line names.
set -eu

cd "$(dirname "$0")/.."
failed=0
words=$(mktemp)
trap 'rm -f "$words"' EXIT INT TERM

# The directory of a crate.
place() {
    manifest=$(grep -lx "name = \"$1\"" Cargo.toml services/*/Cargo.toml services/shared/*/Cargo.toml tests/*/Cargo.toml proto/Cargo.toml | head -n 1)
    dirname "${manifest:-/none/none}"
}

# The last column of the table, or of the sentences above it, has "`CRATE` FILE `TEST`, `TEST`; `CRATE` ...".
sed -n 's/^|.*| \([^|]*\) |$/\1/p; /^The .*`quintlet-[a-z0-9]*` tests\//p' SECURITY.md | tr ';,.' '\n\n\n' | grep -o '`[^`]*`' | tr -d '`' > "$words"
count=0
crate=
while read -r word; do
    dir=$(place "$word")
    if [ "$dir" != /none ]; then
        crate=$word
        in=$dir
    elif echo "$word" | grep -Eq '^[a-z0-9]+(_[a-z0-9]+){3,}$'; then
        count=$((count + 1))
        if [ -z "$crate" ] || ! grep -rqE "fn $word\(" --include=*.rs "$in"; then
            echo "SECURITY.md: no test $word in ${crate:-no crate}" >&2
            failed=1
        fi
    fi
done < "$words"
[ "$count" -ge 10 ] || { echo "SECURITY.md: only $count tests are named" >&2; failed=1; }

[ $failed = 0 ] && echo "security: ok, $count tests"
exit $failed
