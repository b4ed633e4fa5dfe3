#!/bin/bash
# `dormouse bench store` with tiny sizes: names and shape of what it prints, and that it leaves nothing behind, also when interrupted.
# No time is judged; the tokens that `bench hits` counts are.  $1: build folder.
set -u
dormouse="$1/dormouse"
export DORMOUSE_MODEL="$(cd "$(dirname "$0")/../.." && pwd)/examples/models/tiny"
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
fail() { echo "not ok - $1"; exit 1; }
tiny="--dir $dir/b --quota 4M --block-bytes 20000 --state-bytes 50000 --rounds 2 --churn 1"

"$dormouse" bench store $tiny --json > "$dir/json" || fail "it runs"
python3 - "$dir/json" <<'P' || fail "the shape of the JSON"
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
names = ["durable_spill", "cold_restore", "ram_restore", "churn_last_over_first", "churn_file_over_live", "decode_with_spill", "ready_delay_steps"]
assert [r["name"] for r in rows] == names, rows
for r in rows:
    assert set(r) == {"name", "value", "unit", "probe", "ratio"} and r["value"] > 0 and r["probe"] > 0 and (r["ratio"] > 0 or r["name"] == "ready_delay_steps"), r
P
"$dormouse" bench store $tiny > "$dir/text" || fail "it prints a table"
for name in durable_spill cold_restore ram_restore churn_last_over_first churn_file_over_live decode_with_spill ready_delay_steps; do
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
"$dormouse" bench store $tiny --no-decode --json > "$dir/json" && ! grep -q decode_with "$dir/json" || fail "decoding can be left out"
"$dormouse" bench store $tiny --model "$dir/none" > /dev/null 2> "$dir/err"; [ $? -ne 0 ] && grep -q "none" "$dir/err" || fail "a model that is not there is named"
[ -z "$(ls -A "$dir/b")" ] || fail "a run without a model cleans up"
"$dormouse" bench store --quota 100K --dir "$dir/b" 2> "$dir/err"; [ $? -ne 0 ] && grep -q "too small" "$dir/err" || fail "a quota too small is refused"
echo "ok - bench store"

# ---- bench hits: what a store at its budget finds again, in tokens ----------------------------------------------------------
"$dormouse" bench hits --dir "$dir/h" --sessions 8 --live 4 --json > "$dir/json" || fail "hits runs"
python3 - "$dir/json" <<'P' || fail "hits of made-up agents: $(cat "$dir/json")"
import json, sys
d = json.load(open(sys.argv[1]))
r = d["rows"][0]
assert r["name"] == "hits" and r["unit"] == "tokens" and 0 < r["value"] <= r["probe"] and r["ratio"] >= 0.99, r
assert d["turns"] == 8 * 33 and d["evicted_entries"] > 0 and d["live_bytes_max"] <= d["budget_bytes"] * 1.1, d
P
[ -z "$(ls -A "$dir/h")" ] || fail "hits leaves nothing behind"
python3 - > "$dir/trace" <<'P'
import json
for turn in range(6): # two conversations that grow by a hash of 512 tokens a turn
    for c in (1000, 2000):
        print(json.dumps({"timestamp": turn, "input_length": 512 * (turn + 2) - 9, "output_length": 7, "hash_ids": [c + i for i in range(turn + 2)]}))
P
"$dormouse" bench hits --dir "$dir/h" --share 1 --json "$dir/trace" > "$dir/json" || fail "hits of a trace"
python3 - "$dir/json" <<'P' || fail "hits of a trace: $(cat "$dir/json")"
import json, sys
d = json.load(open(sys.argv[1]))
reusable = 2 * sum(512 * (turn + 1) - 9 for turn in range(1, 6))
assert d["turns"] == 12 and d["rows"][0]["probe"] == reusable and d["rows"][0]["value"] == reusable, (d, reusable)
P
echo '{"input_length": 600, "output_length": 1, "hash_ids": [1]}' >> "$dir/trace"
"$dormouse" bench hits --dir "$dir/h" "$dir/trace" > /dev/null 2> "$dir/err"; [ $? -eq 1 ] && grep -q "line 13" "$dir/err" || fail "a bad line is named: $(cat "$dir/err")"
"$dormouse" bench hits --dir "$dir/h" "$dir/no such" > /dev/null 2> "$dir/err"; [ $? -eq 3 ] || fail "no such trace: $(cat "$dir/err")"
echo "ok - bench hits"
