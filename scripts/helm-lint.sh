#!/bin/sh
# Lints the chart and checks the rendered objects. Does nothing without a chart.
set -eu

cd "$(dirname "$0")/.."
[ -f charts/quintlet/Chart.yaml ] || exit 0
exec scripts/with-helm.sh tests/chart.sh
