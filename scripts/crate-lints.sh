#!/bin/sh
# Checks the lints of each crate:
# - a crate of the product has clippy's lint against arithmetic that can overflow;
# - a crate inherits the lints of the workspace, `missing_docs` among them;
# - `missing_docs` is off for single items only, each with its reason: what is generated from a contract, and names that explain themselves;
# - references are compared by address only if they are `Arc`s: a constant has another address in each crate of an optimized build.
set -eu

cd "$(dirname "$0")/.."
attribute='#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]'
# Without the lint: the operator's tool, and the private containerd that it starts.
exempt='services/quintctl services/quintctl/text services/shared/localnode'
# The lints of its own, since `unsafe` is what it is for.
own='tests/support/virtual-time'
failed=0
for manifest in $(find services -name Cargo.toml | sort); do
    crate=$(dirname "$manifest")
    case " $exempt " in *" $crate "*) continue ;; esac
    root=$crate/src/lib.rs
    [ -f "$root" ] || root=$crate/src/main.rs
    if ! grep -qxF "$attribute" "$root"; then
        echo "$root: missing $attribute" >&2
        failed=1
    fi
done
crates=0
for manifest in proto/Cargo.toml $(find services tests -name Cargo.toml | sort); do
    crates=$((crates + 1))
    case " $own " in *" $(dirname "$manifest") "*) lints='^missing_docs = "warn"$' ;; *) lints='^workspace = true$' ;; esac
    if ! sed -n '/^\[lints/,$p' "$manifest" | grep -q "$lints"; then
        echo "$manifest: no [lints] with $lints" >&2
        failed=1
    fi
done
[ "$crates" -ge 60 ]
# An attribute may have several lines.
if git grep -nE '^ *#!\[(allow|expect)\(' -- '*.rs' | grep missing_docs >&2 ||
    git grep -n 'missing_docs' -- '*.rs' | grep -v 'allow(missing_docs,.* reason = "' >&2; then
    echo 'missing_docs: document the items, or hide them' >&2
    failed=1
fi
if git grep -nE '(^|[^:])\b(std::|core::)?ptr::(eq|addr_eq)\(' -- '*.rs' >&2; then
    echo 'ptr::eq: compare values or names' >&2
    failed=1
fi
exit "$failed"
