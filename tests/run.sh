#!/usr/bin/env bash
# Installs what is missing, builds, and runs the tests.
#   tests/run.sh                     the quick set on the release build: what the gate runs
#   tests/run.sh --full              long lengths, soaks, and the sanitizer presets too
#   tests/run.sh --preset NAME       another preset (debug, asan-ubsan, tsan)
#   tests/run.sh -- ARGS             more arguments for ctest (for example: -- -R kvstore)
set -euo pipefail
cd "$(dirname "$0")/.."
preset=release full= ctest_args=()
while [ $# -gt 0 ]; do
    case "$1" in
    --full) full=1 ;;
    --preset) preset=${2:?--preset wants a name}; shift ;;
    --) shift; ctest_args=("$@"); break ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown argument $1 (--help)" >&2; exit 2 ;;
    esac
    shift
done
tests/deps.sh test
jobs=$(nproc)

build_and_test() { # preset label-args…
    local preset=$1; shift
    echo "== $preset: build"
    cmake --preset "$preset" >"/tmp/dormouse-configure.$$" 2>&1 || { cat "/tmp/dormouse-configure.$$"; exit 1; }
    grep -E '^--   |dormouse ' "/tmp/dormouse-configure.$$" || true
    rm -f "/tmp/dormouse-configure.$$"
    cmake --build --preset "$preset" -j "$jobs" -- --quiet
    echo "== $preset: tests"
    ctest --test-dir "build/$preset" -j "$jobs" --output-on-failure --no-tests=error "$@" "${ctest_args[@]}"
    # A skip inside a test program must not go by unseen.
    local skips
    skips=$(grep -h '^# SKIP' "build/$preset/Testing/Temporary/LastTest.log" 2>/dev/null | sort | uniq -c || true)
    [ -z "$skips" ] || printf 'Skipped checks:\n%s\n' "$skips"
}

if [ -n "$full" ]; then
    export DM_TEST_FULL=1
    build_and_test release
    unset DM_TEST_FULL
    build_and_test asan-ubsan -LE soak
    build_and_test tsan -LE soak -L 'engine|kvstore|agent|base|tools'
elif [ "$preset" = tsan ]; then
    build_and_test tsan -LE soak -L 'engine|kvstore|agent|base|tools'
else
    build_and_test "$preset" -LE soak
fi
