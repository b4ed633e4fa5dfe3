#!/bin/bash
# `dormouse bench store` with tiny sizes: names and shape of what it prints, and that it leaves nothing behind, also when interrupted.
# No figure is judged.  $1: build folder.
set -u
dormouse="$1/dormouse"
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
fail() { echo "not ok - $1"; exit 1; }
tiny="--dir $dir/b --quota 4M --block-bytes 20000 --state-bytes 50000 --rounds 2 --churn 1"

"$dormouse" bench store $tiny --json > "$dir/json" || fail "it runs"
python3 - "$dir/json" <<'P' || fail "the shape of the JSON"
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
names = ["durable_spill", "cold_restore", "ram_restore", "churn_last_over_first", "churn_file_over_live"]
assert [r["name"] for r in rows] == names, rows
for r in rows:
    assert set(r) == {"name", "value", "unit", "probe", "ratio"} and r["value"] > 0 and r["probe"] > 0 and r["ratio"] > 0, r
P
"$dormouse" bench store $tiny > "$dir/text" || fail "it prints a table"
for name in durable_spill cold_restore ram_restore churn_last_over_first churn_file_over_live; do
    grep -q "^$name " "$dir/text" || fail "$name is in the table"
done
[ -z "$(ls -A "$dir/b")" ] || fail "nothing is left behind"

"$dormouse" bench store $tiny --churn 1000 2> "$dir/err" > /dev/null &
pid=$!
for _ in $(seq 200); do [ -n "$(ls -A "$dir/b")" ] && break; sleep 0.05; done
kill -INT $pid
wait $pid
[ $? -eq 130 ] || fail "an interrupt is its exit status"
[ -z "$(ls -A "$dir/b")" ] || fail "an interrupted run cleans up"
"$dormouse" bench store --help | grep -q "not measured" || fail "the help says what is not measured"
"$dormouse" bench store --quota 100K --dir "$dir/b" 2> "$dir/err"; [ $? -ne 0 ] && grep -q "too small" "$dir/err" || fail "a quota too small is refused"
echo "ok - bench store"
