#!/bin/sh
# Fails for a crate of the product that does not have clippy's lint against arithmetic that can overflow.
set -eu

cd "$(dirname "$0")/.."
attribute='#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]'
# Without the lint: the operator's tool, and the private containerd that it starts.
exempt='services/quintctl services/quintctl/text services/shared/localnode'
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
exit "$failed"
