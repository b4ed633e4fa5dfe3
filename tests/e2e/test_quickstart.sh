#!/usr/bin/env bash
# The quickstart ends with the right fact after a real tool call, and its second run is warm and says so.
set -euo pipefail
cd "$(dirname "$0")/../.."
export DORMOUSE_STATE_DIR
DORMOUSE_STATE_DIR=$(mktemp -d)
trap 'rm -rf "$DORMOUSE_STATE_DIR"' EXIT
for run in cold warm; do
    out=$(examples/quickstart.sh 2>&1) || { echo "$out"; echo "not ok: $run run failed"; exit 1; }
    echo "$out" | sed "s/^/# $run: /"
    grep -q '^Right: ' <<<"$out" || { echo "not ok: $run run did not end with the fact"; exit 1; }
    for phase in prefill restore decode spill tool; do
        grep -qiE "$phase" <<<"$out" || { echo "not ok: $run run has no line for $phase"; exit 1; }
    done
    grep -qi "$run" <<<"$out" || { echo "not ok: the $run run does not say that it is $run"; exit 1; }
done
echo "ok: quickstart, cold and warm"
