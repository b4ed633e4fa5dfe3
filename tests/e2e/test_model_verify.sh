#!/usr/bin/env bash
# `dormouse model …` by the command line: the account before loading, the checklist of a deployment, options with a fixed set of values.
set -uo pipefail
build=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
dm=$build/dormouse
tiny=$root/examples/models/tiny
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export DORMOUSE_STATE_DIR=$tmp/state DORMOUSE_MODEL=$tiny TMPDIR=$tmp
bad=0
ok() { echo "ok: $1"; }
fail() { echo "not ok: $1"; [ $# -gt 1 ] && echo "${2:0:2000}" | sed 's/^/    /'; bad=1; }
expect() { if [ "$2" = "$3" ]; then ok "$1"; else fail "$1: exit $3, want $2" "${4:-}"; fi; } # name, wanted status, got status, output

# ---- the account ---------------------------------------------------------------------------------------------------------------------
out=$("$dm" model plan "$tiny" --json); rc=$?
expect "plan: fits" 0 $rc "$out"
python3 - "$out" <<'PY' && ok "plan: the parts add up" || fail "plan: parts" "$out"
import json, sys
p = json.loads(sys.argv[1])
kinds = ["expert", "shared", "attn", "index", "router", "embed", "head", "mtp"]
assert sum(p["weight_bytes_" + k] for k in kinds) == p["weight_bytes"], p
assert sum(p[k] for k in ["weight_bytes_resident", "table_bytes", "scratch_bytes", "worker_bytes", "sequence_bytes", "kv_bytes"]) == p["need_bytes"], p
assert p["ctx_tokens_fit"] == 65536 and p["need_bytes"] <= p["mem_bytes"], p
PY
"$dm" model plan "$tiny" | grep -q "65536 tokens of context fit" && ok "plan: in words" || fail "plan: words"
for what in "model plan $root/tests/data/engine/flash.config.json --memory 24G" "model plan $tiny --memory 5M" "run --memory 5M x" "run --memory 60M --context 65536 x" "model verify $tiny --memory 5M"; do
    # shellcheck disable=SC2086
    out=$("$dm" $what 2>&1 </dev/null); rc=$?
    expect "what does not fit is refused: $what" 1 $rc "$out"
    [[ $out == *"may be used:"*"--memory SIZE sets another bound"* ]] && ok "... in a sentence with the ways out" || fail "no way out" "$out"
done
out=$("$dm" run --memory 80M -C "$root/examples/workspace" --no-kv "What is the port in config/server.ini?" 2>&1); rc=$?
expect "a context that nobody asked for is cut to what fits" 0 $rc "$out"
[[ $out == *4817* ]] && ok "... and it answers" || fail "answer" "$out"

# ---- the checklist -----------------------------------------------------------------------------------------------------------------------
config=$root/tests/data/vectors/tiny2.config.json
"$dm" model synth --seed 2 "$config" "$tmp/tiny2" || fail "synth"
for model in "$tiny" "$tmp/tiny2"; do
    out=$("$dm" model verify "$model" --context 700 --report "$tmp/report.json" 2>&1); rc=$?
    expect "checklist of $(basename "$model")" 0 $rc "$out"
    python3 - "$tmp/report.json" "$model" <<'PY' && ok "... its report" || fail "report" "$(cat "$tmp/report.json") $out"
import json, sys
r = json.load(open(sys.argv[1]))
c = {x["name"]: x for x in r["checks"]}
assert r["ok"] and r["version"] == 1 and r["model"] == sys.argv[2] and r["numerics"].startswith("fast/") and r["context"] == 700, r
tiny2 = sys.argv[2].endswith("tiny2")
assert list(c) == ["files", "fingerprint", "tokenizer", "memory", "smoke", "chunks", "context 128", "context 512", "context 700", "resident", "restore",
                   "without FP4 index", "without FP8 KV", "without shared clamp", "mtp"], list(c)
assert len(c["fingerprint"]["weights"]) == 64 and len(c["files"]["config_sha256"]) == 64
assert len(c["smoke"]["ids"]) == 16
for n in (128, 512, 700):
    rung = c["context %d" % n]
    assert rung["tokens"] == n and rung["prefill_tokens_per_second"] > 0 and rung["decode_tokens_per_second"] > 0, rung
assert c["without FP8 KV"]["rms_over_std"] > 0
assert (c["without FP4 index"]["rms_over_std"] > 0) == tiny2 # the embedded model chooses every entry at this length
assert c["mtp"]["result"] == ("ok" if tiny2 else "skipped") and c["tokenizer"]["result"] == ("skipped" if tiny2 else "ok")
if tiny2: assert c["mtp"]["drafts"] == 255 and 0 <= c["mtp"]["agree"] <= 255
if tiny2: assert c["mtp"]["tokens"] == 64 and c["mtp"]["drafted"] > 64 and 0 <= c["mtp"]["accepted"] <= 64, c["mtp"]
assert all(x["result"] in ("ok", "skipped") and x["seconds"] >= 0 and x["detail"] for x in r["checks"])
PY
    [ "$(grep -c '^\(ok\|skipped\) ' <<<"$out")" = 15 ] && ok "... its table" || fail "table" "$out"
done
out=$("$dm" model verify "$tmp/tiny2" --context 300 --numerics exact --threads 1); rc=$?
expect "checklist on the exact path" 0 $rc "$out"
[ -z "$(ls -d "$tmp"/dormouse-verify-* 2>/dev/null)" ] && ok "the store of the checklist is removed" || fail "left behind" "$(ls "$tmp")"

# Interrupted: the exit status of the signal, and nothing left behind.
"$dm" model verify "$tiny" --context 60000 >"$tmp/out" 2>&1 &
pid=$!
for _ in $(seq 200); do grep -q "^ok *context 128 " "$tmp/out" && break; sleep 0.05; done
kill -INT $pid
wait $pid; expect "an interrupted checklist" 130 $? "$(cat "$tmp/out")"
[ -z "$(ls -d "$tmp"/dormouse-verify-* 2>/dev/null)" ] && ok "... leaves nothing behind" || fail "left behind" "$(ls "$tmp")"

# NaN in a norm: the files are fine, the first decoded token is not.
cp -r "$tmp/tiny2" "$tmp/nan"
python3 - "$tmp/nan" <<'PY'
import glob, json, struct, sys
for f in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    b = bytearray(open(f, "rb").read())
    n = struct.unpack("<Q", b[:8])[0]
    h = json.loads(b[8:8 + n])
    if "norm.weight" in h:
        at = 8 + n + h["norm.weight"]["data_offsets"][0]
        b[at:at + 2] = b"\xc0\x7f"
        open(f, "wb").write(b)
PY
out=$("$dm" model verify "$tmp/nan" --context 300 --report "$tmp/report.json" 2>&1); rc=$?
expect "logits that are no numbers fail" 1 $rc "$out"
grep -q "^FAILED *smoke .*is -\?nan" <<<"$out" && ok "... and it says where" || fail "nan" "$out"
python3 -c 'import json,sys; assert not json.load(open(sys.argv[1]))["ok"]' "$tmp/report.json" && ok "... in the report too" || fail "report"
rm "$tmp/nan/model-00003-of-00008.safetensors"
out=$("$dm" model verify "$tmp/nan" 2>&1); rc=$?
expect "a missing shard fails" 1 $rc "$out"
grep -q "^FAILED *files .*model-00003-of-00008.safetensors is missing" <<<"$out" && ok "... and is named" || fail "shard" "$out"

# ---- vectors still work, with switches: the first revision's clamp does not give the current vectors ------------------------------------------
v=$root/tests/data/vectors/hash/tiny2-ref-n5.txt
"$dm" model verify "$tmp/tiny2" --vectors "$v" >/dev/null; expect "vectors" 0 $?
out=$("$dm" model verify "$tmp/tiny2" --vectors "$v" --debug-switch shared-unclamped); expect "... not with another clamp" 1 $? "$out"
[[ $out == DIFFER*first:*ffn.y* ]] && ok "... and ffn.y is where it begins" || fail "first" "$out"

# ---- options with a fixed set of values: a wrong one is a usage error ------------------------------------------------------------------------------
for what in "model verify $tmp/tiny2 --isa foo" "model verify $tmp/tiny2 --numerics foo" "model verify $tmp/tiny2 --debug-switch foo" "model plan $tiny --numerics foo" \
            "model plan $tiny --memory lots" "model render $tiny - --mode foo" "model render $tiny - --effort foo" "model render $tiny - --revision foo" "run --isa foo x" \
            "run --numerics foo x" "run --sandbox foo x" "run --sleep foo x" "run --output-format foo x" "run --debug-switch foo x" "chat --isa foo" "chat --debug-switch foo"; do
    # shellcheck disable=SC2086
    out=$("$dm" $what 2>&1 </dev/null); expect "usage: $what" 2 $? "$out"
    [[ $out == *"'foo'"* || $out == *"'lots'"* ]] && ok "... names what it was given" || fail "names" "$out"
done
exit $bad
