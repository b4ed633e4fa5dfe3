#!/usr/bin/env bash
# Builds one fuzz target with clang and runs it on its corpus; what it finds is kept.
#   tests/fuzz/run.sh TARGET [SECONDS] [JOBS]    for example: tests/fuzz/run.sh fuzz_engine_parser 600 2
#   tests/fuzz/run.sh all [SECONDS] [JOBS]       one after another
# Prints runs, coverage and findings of each job.  New inputs go to a folder outside the tree (FUZZ_WORK, by default
# build/fuzz-work/TARGET), so that the corpus in the tree stays small: of these, copy the smallest one that shows a
# fault into corpus/TARGET once the fault is mended.  FUZZ_BUILD is the build folder (build/fuzz).
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${1:-} seconds=${2:-60} jobs=${3:-1}
known=$(cd tests/fuzz && ls fuzz_*.c | sed 's/\.c$//')
if ! grep -qx "$target" <<<"$known"$'\nall'; then
    echo "usage: $0 TARGET|all [SECONDS] [JOBS]; targets:" $known >&2
    exit 2
fi
command -v clang >/dev/null || { echo "run.sh: clang is missing: apt-get install clang libclang-rt-14-dev (or your clang's)" >&2; exit 2; }
build=${FUZZ_BUILD:-build/fuzz}
[ "$target" = all ] || known=$target
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
make() {
    [ -f "$build/build.ninja" ] || cmake --preset fuzz -B "$build"
    cmake --build "$build" --target $known -- --quiet
}
make >"$tmp/build" 2>&1 || { cat "$tmp/build" >&2; exit 1; }
export TMPDIR=$tmp
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

run_job() { # target, job
    local work=${FUZZ_WORK:-build/fuzz-work}/$1 dict=()
    mkdir -p "$work/corpus" "$work/findings"
    [ ! -f "tests/fuzz/dict/$1.dict" ] || dict=("-dict=tests/fuzz/dict/$1.dict")
    "$build/tests/fuzz/$1" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=8192 -reload=10 -use_value_profile=1 \
        -print_final_stats=1 -artifact_prefix="$work/findings/" "${dict[@]}" "$work/corpus" "tests/fuzz/corpus/$1" >"$work/log.$2" 2>&1
}

report() { # target, job, exit status
    local log=${FUZZ_WORK:-build/fuzz-work}/$1/log.$2
    awk -v target="$1" -v job="$2" -v status="$3" '
        match($0, / cov: [0-9]+/) { cov = substr($0, RSTART + 6, RLENGTH - 6) }
        match($0, / ft: [0-9]+/) { ft = substr($0, RSTART + 5, RLENGTH - 5) }
        match($0, / corp: [0-9]+/) { corp = substr($0, RSTART + 7, RLENGTH - 7) }
        /^stat::number_of_executed_units/ { runs = $2 }
        /^Done .* runs in/ { took = $5 }
        /ERROR: |runtime error: |^SUMMARY: |Test unit written to|^.*\/fuzz_[a-z_]*\.c:[0-9]+: / { found = found "\n    " $0 }
        END {
            printf "%s job %s: %s runs%s, coverage %s edges, %s features, corpus %s, %s\n", target, job, runs ? runs : "?",
                took ? " in " took " s" : "", cov, ft, corp, status ? "FINDING" found : "nothing found"
        }' "$log"
}

failed=0
for t in $known; do
    pids=()
    for job in $(seq "$jobs"); do
        run_job "$t" "$job" &
        pids+=($!)
    done
    for job in $(seq "$jobs"); do
        status=0
        wait "${pids[job - 1]}" || status=$?
        report "$t" "$job" "$status"
        [ "$status" = 0 ] || failed=1
    done
done
exit $failed
