#!/bin/sh
# Checks that an optimized binary takes the flags of a kubelet, of both of its tables of fields: `scripts/shipped-flags.sh BINARY`. The tests run a binary
# without optimization, in which a constant has one address.
set -eu
settings=$("$1" kubelet --check --hostname-override=checked --root-dir=/nonexistent/root --port=12345 --container-runtime-endpoint=unix:///nonexistent/socket)
for wanted in '"nodeName": "checked"' '"rootDir": "/nonexistent/root"' '"port": 12345' '"runtimeEndpoint": "unix:///nonexistent/socket"'; do
    case $settings in
        *"$wanted"*) ;;
        *) echo "$0: $1 kubelet lost a flag: no $wanted in $settings" >&2; exit 1 ;;
    esac
done
