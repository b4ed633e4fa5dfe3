#!/usr/bin/env bash
# From a fresh checkout to an agent that sleeps at a tool call and wakes: installs what is missing, builds, and runs one
# session on the embedded model.  Run it twice: the second run finds its prefix in the store.
#   examples/quickstart.sh ["another request about the sample workspace"]
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;; esac

tests/deps.sh build
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Building (release) …"
if ! { cmake --preset release -DDM_TESTS=OFF -B build/quickstart && cmake --build build/quickstart -j "$(nproc)"; } >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "quickstart: the build failed" >&2
    exit 1
fi

request=${1:-"What is the port in config/server.ini?"}
echo "Request: $request"
echo
answer=$(build/quickstart/dormouse run --phases --workspace examples/workspace "$request")
echo
echo "Answer: $answer"

# With the standard request the right fact is known: say so, or fail.
if [ $# -eq 0 ]; then
    want=$(sed -n 's/^port *= *//p' examples/workspace/config/server.ini)
    case "$answer" in
    *"$want"*) echo "Right: config/server.ini says $want." ;;
    *) echo "quickstart: the answer does not contain $want" >&2; exit 1 ;;
    esac
fi
