#!/usr/bin/env bash
# The command line on the embedded model: output shapes, exit statuses, resume, and a kill while a tool runs.
set -uo pipefail
build=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
dm=$build/dormouse
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export DORMOUSE_STATE_DIR=$tmp/state DORMOUSE_MODEL=$root/examples/models/tiny
bad=0
ok() { echo "ok: $1"; }
fail() { echo "not ok: $1"; [ $# -gt 1 ] && echo "${2:0:2000}" | sed 's/^/    /'; bad=1; }
expect() { # name, wanted status, got status, output
    if [ "$2" = "$3" ]; then ok "$1"; else fail "$1: exit $3, want $2" "${4:-}"; fi
}
field() { python3 -c 'import json,sys
o = json.loads(sys.stdin.read().strip().splitlines()[-1])
for k in sys.argv[1].split("."): o = o[int(k)] if isinstance(o, list) else o[k]
print(json.dumps(o) if isinstance(o, (dict, list, bool)) else o)' "$1"; }
fresh_ws() { rm -rf "$tmp/ws"; cp -r "$root/examples/workspace" "$tmp/ws"; }

# ---- shapes -------------------------------------------------------------------------------------------------
fresh_ws
q="What is the port in config/server.ini?"
out=$("$dm" run -C "$tmp/ws" "$q" </dev/null 2>"$tmp/err"); rc=$?
expect "text: the answer alone" 0 $rc "$(cat "$tmp/err")"
[[ $out == *4817* && $out != *$'\n'* ]] && ok "text: the right answer" || fail "text: $out"

out=$("$dm" run -C "$tmp/ws" --output-format json "$q" 2>"$tmp/err"); rc=$?
expect "json: exit status" 0 $rc "$(cat "$tmp/err")"
[ "$(wc -l <<<"$out")" = 1 ] && ok "json: one line" || fail "json: more than one line" "$out"
[ "$(field type <<<"$out")/$(field subtype <<<"$out")/$(field is_error <<<"$out")" = result/success/false ] && ok "json: result object" || fail "json: shape" "$out"
for k in session_id num_turns duration_ms usage.input_tokens usage.output_tokens usage.prefilled_tokens usage.restored_tokens turns.0.new_tokens \
         turns.0.prefilled_tokens turns.0.restored_tokens turns.0.restored_from turns.0.decoded_tokens turns.0.spilled_bytes tools.0.name tools.0.args pending; do
    field "$k" <<<"$out" >/dev/null 2>&1 || fail "json: no $k" "$out"
done
id=$(field session_id <<<"$out")

out=$("$dm" run -C "$tmp/ws" --output-format stream-json "$q" 2>"$tmp/err"); rc=$?
expect "stream-json: exit status" 0 $rc "$(cat "$tmp/err")"
python3 - "$out" <<'PY' && ok "stream-json: init first, result last, every line an object" || fail "stream-json: shape" "$out"
import json, sys
lines = [json.loads(l) for l in sys.argv[1].split("\n")]
assert lines[0]["type"] == "system" and lines[0]["subtype"] == "init" and lines[0]["session_id"] and lines[0]["tools"], lines[0]
assert lines[-1]["type"] == "result" and sum(l["type"] == "result" for l in lines) == 1
uses = [c["id"] for l in lines if l["type"] == "assistant" for c in l["message"]["content"] if c["type"] == "tool_use"]
results = [c["tool_use_id"] for l in lines if l["type"] == "user" for c in l["message"]["content"]]
assert uses and uses == results, (uses, results)
PY

# ---- a session goes on, and a turn costs its new tokens --------------------------------------------------------
out=$("$dm" run --resume "$id" --output-format json "List the .md files." 2>"$tmp/err"); rc=$?
expect "resume: exit status" 0 $rc "$(cat "$tmp/err")"
python3 - "$out" <<'PY' && ok "resume: every turn prefills what is new" || fail "resume: more was prefilled" "$out"
import json, sys
for t in json.loads(sys.argv[1])["turns"]:
    assert t["prefilled_tokens"] <= t["new_tokens"] and t["prefilled_tokens"] + t["restored_tokens"] == t["context_tokens"], t
PY
"$dm" sessions ls --json | field 0.id >/dev/null && ok "sessions ls --json" || fail "sessions ls --json"
out=$("$dm" sessions show "$id"); [[ $out == *"$q"* ]] && ok "sessions show" || fail "sessions show" "$out"
"$dm" run --resume "$id" --kv-salt other "And the .ini files?" >/dev/null 2>&1; expect "resume under another salt" 0 $?
out=$("$dm" kv why "$id" --json) && python3 - "$out" <<'PY' && ok "kv why: another salt, and what it cost" || fail "kv why" "$out"
import json, sys
v = json.loads(sys.argv[1])
again = [t for t in v["turns"] if "why" in t]
assert len(again) == 1 and again[0]["why"]["class"] == "other_root" and again[0]["why"]["tokens"] == v["again_tokens"] > 0, again
assert again[0]["prefilled_tokens"] == again[0]["new_tokens"] + v["again_tokens"] and v["again_seconds"] > 0
PY
out=$("$dm" kv why "$id"); [[ $out == *"another salt"* ]] && ok "kv why in words" || fail "kv why in words" "$out"
"$dm" kv why nosuchsession >/dev/null 2>&1; expect "kv why of no session" 3 $?
fork=$("$dm" sessions fork --at 1 "$id"); expect "sessions fork" 0 $?
out=$("$dm" sessions show "$fork" --json | head -1); [[ $out == *"\"forked_from\":\"$id\""* ]] && ok "a fork says whose it is" || fail "sessions fork" "$out"
"$dm" sessions fork --at 1000 "$id" >/dev/null 2>&1; expect "a turn that is not there" 2 $?
"$dm" sessions fork nosuchsession >/dev/null 2>&1; expect "a session that is not there" 3 $?
"$dm" sessions rm "$fork"; expect "a fork is removed alone" 0 $?
"$dm" kv stat --json | field blocks >/dev/null && ok "kv stat" || fail "kv stat"
"$dm" kv verify >/dev/null; expect "kv verify" 0 $?
out=$("$dm" kv metrics) && python3 - "$out" <<'PY' && ok "kv metrics" || fail "kv metrics" "$out"
import re, sys
seen, types = {}, {}
for line in sys.argv[1].splitlines():
    if line.startswith("# HELP "):
        assert re.fullmatch(r"# HELP [a-z_]+ [^\\]+", line), line
    elif line.startswith("# TYPE "):
        name, kind = line[7:].split(" ")
        assert kind in ("counter", "gauge") and name not in types and name.endswith("_total") == (kind == "counter"), line
        types[name] = kind
    else:
        m = re.fullmatch(r'([a-z_]+)\{store="[0-9a-f]{16}"\} (-?[0-9]+)', line)
        assert m and m[1] == list(types)[-1], line  # the lines of a metric stand together
        seen[m[1]] = int(m[2])
assert seen.keys() == types.keys() and seen["dormouse_kv_blocks"] > 0 and seen["dormouse_kv_hits_total"] > 0 and seen["dormouse_kv_written_bytes_total"] > 0, seen
PY
"$dm" kv metrics "$tmp/nothing" >/dev/null 2>&1; expect "kv metrics of nothing" 3 $?

# ---- asleep, awake, without a store, on one thread or two: the same tokens (C1) ----------------------------------------------------
tokens_of() { # the timeline of the last session of a state directory
    "$dm" sessions show last --json --state-dir "$1" | python3 -c 'import json,sys
print([i for l in sys.stdin for e in [json.loads(l)] if e["type"] == "tokens" for i in e["ids"]])'
}
n=0
for how in "--sleep always --threads 1" "--sleep never --threads 2" "--no-kv --threads 2" "--sleep always --threads 2 --ram-bytes 64K"; do
    fresh_ws; n=$((n + 1))
    # shellcheck disable=SC2086
    "$dm" run -C "$tmp/ws" --state-dir "$tmp/same$n" $how "Where is high_water used?" >/dev/null 2>"$tmp/err" || fail "run $how" "$(cat "$tmp/err")"
    # shellcheck disable=SC2086
    "$dm" run --state-dir "$tmp/same$n" $how --resume last "List the .md files." >/dev/null 2>"$tmp/err" || fail "resume $how" "$(cat "$tmp/err")"
    tokens_of "$tmp/same$n" >"$tmp/ids$n"
    cmp -s "$tmp/ids1" "$tmp/ids$n" && ok "the same tokens with $how" || fail "other tokens with $how" "$(diff "$tmp/ids1" "$tmp/ids$n")"
done

# ---- exit statuses -----------------------------------------------------------------------------------------------
out=$("$dm" run --output-format json --resume 01ZZZZZZZZ "x" 2>/dev/null); rc=$?
expect "a session that is not there" 3 $rc "$out"
[ "$(field is_error <<<"$out")" = true ] && ok "... and a result object" || fail "no result object" "$out"
"$dm" run --resume "$id" >/dev/null 2>&1; expect "nothing to go on with" 2 $?
"$dm" run -C "$tmp/ws" --max-tokens 3 "$q" >/dev/null 2>&1; expect "a reply that is cut" 5 $?
"$dm" run --resume last >/dev/null 2>&1; expect "... goes on without a message" 0 $?
mkdir -p "$tmp/ws/state"; echo "port = 1" >"$tmp/ws/state/a.ini"
"$dm" run -C "$tmp/ws" --state-dir "$tmp/ws/state" --output-format stream-json "Where is port = 1 used?" >"$tmp/hidden" 2>/dev/null
grep -q 'state/a.ini' "$tmp/hidden" && fail "tools look into the state directory" "$(cat "$tmp/hidden")" || ok "tools do not look into the state directory"
rm -rf "$tmp/ws/state"
"$dm" run --nonsense x >/dev/null 2>&1; expect "an unknown option" 2 $?
out=$("$dm" rnu x 2>&1); expect "an unknown command" 2 $?
[[ $out == *'did you mean "run"'* ]] && ok "... and the near one is named" || fail "near command" "$out"
"$dm" run --output-format json "" >/dev/null 2>&1; expect "an empty request" 2 $?
mkdir "$tmp/"$'w\xe9'; out=$("$dm" run -C "$tmp/"$'w\xe9' x 2>&1); expect "a workspace whose name is no text" 2 $? "$out"
"$dm" run -C "$tmp/nowhere" x >/dev/null 2>&1; expect "a workspace that is not there" 3 $?
out=$("$dm" run -C "$tmp/ws" --output-format json --max-turns 1 "$q" 2>/dev/null); rc=$?
expect "the turn budget" 5 $rc "$out"
[ "$(field subtype <<<"$out")" = error_max_turns ] && ok "... says so" || fail "subtype" "$out"
"$dm" run -C "$tmp/ws" --ctx-tokens 800 "$q $(seq 1 200 | tr '\n' ' ')" >/dev/null 2>&1; expect "a full context" 7 $?
mkdir -p "$tmp/nobwrap"
for p in bash sh cat; do ln -sf "$(command -v $p)" "$tmp/nobwrap/$p"; done
PATH=$tmp/nobwrap "$dm" run -C "$tmp/ws" "$q" >/dev/null 2>&1; expect "no sandbox to be had" 6 $?

# ---- approval -----------------------------------------------------------------------------------------------------
fresh_ws
out=$("$dm" run -C "$tmp/ws" --ask --output-format json "How many lines does data/prices.csv have?" 2>/dev/null); rc=$?
expect "a call that asks pauses the session" 4 $rc "$out"
[ "$(field pending.0.name <<<"$out")" = bash ] && ok "... and names the call" || fail "pending" "$out"
out=$("$dm" run --resume "$(field session_id <<<"$out")" --yes 2>/dev/null); rc=$?
expect "... and goes on with --yes" 0 $rc "$out"
[[ $out == *6* ]] && ok "... to the right answer" || fail "answer" "$out"

# ---- standard input --------------------------------------------------------------------------------------------------
fresh_ws
mkfifo "$tmp/fifo"; sleep 60 >"$tmp/fifo" & holder=$!
out=$(timeout 50 "$dm" run -C "$tmp/ws" "$q" <"$tmp/fifo" 2>&1); rc=$?
kill $holder 2>/dev/null
expect "an open pipe on standard input is not waited for" 0 $rc "$out"
out=$(echo "$q" | "$dm" run -C "$tmp/ws" - 2>&1); [[ $out == *4817* ]] && ok "the request from standard input" || fail "stdin" "$out"
out=$(printf '%s\nList the .md files.\n' "$q" | "$dm" chat -C "$tmp/ws" 2>/dev/null); rc=$?
expect "chat" 0 $rc "$out"
[[ $out == *4817*README.md* ]] && ok "chat: two answers" || fail "chat" "$out"

# ---- killed while the tool runs (C4, A08) ---------------------------------------------------------------------------------
fresh_ws
printf 'echo x >> effects\nsleep 3\necho did\n' >"$tmp/ws/scripts/run.sh"
"$dm" run -C "$tmp/ws" --output-format stream-json "Run the command: sh scripts/run.sh" >"$tmp/killed" 2>/dev/null & pid=$!
for _ in $(seq 400); do [ -s "$tmp/ws/effects" ] && grep -q '"spilled"' "$tmp/killed" && break; sleep 0.05; done
kill -9 $pid; wait $pid 2>/dev/null
id=$(head -n 1 "$tmp/killed" | field session_id)
out=$("$dm" sessions ls); [[ $out == *"$id  interrupted"* ]] && ok "a killed session is listed as interrupted" || fail "sessions ls" "$out"
out=$("$dm" run --resume "$id" --output-format json 2>"$tmp/err"); rc=$?
[ $rc -le 1 ] || fail "resume after kill -9: exit $rc" "$out$(cat "$tmp/err")"
python3 - "$out" <<'PY' && ok "after kill -9 a turn costs its new tokens" || fail "after kill -9: prefill" "$out"
import json, sys
t = json.loads(sys.argv[1])["turns"][0]
assert t["prefilled_tokens"] <= t["new_tokens"] + 256, t
PY
out=$("$dm" sessions show "$id" --json); [[ $out == *'"state":"unknown"'* ]] && ok "the call's outcome is unknown, and said" || fail "unknown" "$out"
starts=$("$dm" sessions show "$id" --json | grep -c '"state":"started"')
[ "$(wc -l <"$tmp/ws/effects")" -le "$starts" ] && ok "the runtime repeated nothing: an effect per call that the model made" || fail "effects" "$(cat "$tmp/ws/effects")"

# ---- a store that was cut, and two runtimes at once -----------------------------------------------------------------------------
for f in "$DORMOUSE_STATE_DIR"/kv/*/data.mdb; do truncate -s 10000 "$f"; done
fresh_ws
out=$("$dm" run -C "$tmp/ws" --output-format json "$q" 2>"$tmp/err"); rc=$?
expect "a cut store" 0 $rc "$out$(cat "$tmp/err")"
[ "$(grep -c warning "$tmp/err")" = 1 ] && ok "... one warning" || fail "warnings" "$(cat "$tmp/err")"
[ "$(field turns.0.restored_tokens <<<"$out")" = 0 ] && ok "... and computed again" || fail "cut store" "$out"
pids=()
for i in 1 2 3; do "$dm" run -C "$tmp/ws" --output-format json "$q" >"$tmp/par$i" 2>"$tmp/par$i.err" & pids+=($!); done
for i in 1 2 3; do
    wait "${pids[$((i - 1))]}"; expect "three runtimes on one state directory: $i" 0 $? "$(cat "$tmp/par$i" "$tmp/par$i.err")"
    [[ $(field result <"$tmp/par$i") == *4817* ]] || fail "parallel $i" "$(cat "$tmp/par$i")"
done

# ---- signals --------------------------------------------------------------------------------------------------------------------
for sig in INT:130 TERM:143; do
    fresh_ws
    printf 'sleep 30\n' >"$tmp/ws/scripts/run.sh"
    "$dm" run -C "$tmp/ws" --output-format stream-json "Run the command: sh scripts/run.sh" >"$tmp/out" 2>/dev/null & pid=$!
    for _ in $(seq 400); do grep -q tool_start "$tmp/out" && break; sleep 0.05; done
    kill -"${sig%:*}" $pid; wait $pid; rc=$?
    expect "SIG${sig%:*}" "${sig#*:}" $rc
    [ "$(tail -n 1 "$tmp/out" | field type)" = result ] && ok "... the result is the last line" || fail "last line" "$(tail -n 1 "$tmp/out")"
done

# ---- removing -----------------------------------------------------------------------------------------------------------------------
"$dm" sessions rm "$id"; expect "sessions rm" 0 $?
"$dm" sessions show "$id" >/dev/null 2>&1; expect "... and it is gone" 3 $?
exit $bad
