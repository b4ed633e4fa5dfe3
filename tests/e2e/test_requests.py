#!/usr/bin/env python3
"""The ten public requests on the embedded model: right tools called and right answer, at the rate that the
model's own notes state (8 of 10), by the command line, with real LMDB and real bubblewrap."""
import json, os, re, shutil, subprocess, sys, tempfile

build = sys.argv[1]
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WANT = 8

tmp = tempfile.mkdtemp(prefix="dm-requests-")
right = 0
try:
    for line in open(os.path.join(root, "examples/models/tiny/requests.jsonl"), encoding="utf-8"):
        r = json.loads(line)
        ws = os.path.join(tmp, r["id"])
        shutil.copytree(os.path.join(root, "examples/workspace"), ws)
        p = subprocess.run([os.path.join(build, "dormouse"), "run", "--output-format", "json", "--state-dir", os.path.join(tmp, "state"),
                            "--workspace", ws, r["prompt"]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        try:
            out = json.loads(p.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            sys.exit(f"{r['id']}: no result object on standard output (exit {p.returncode}): {p.stderr[-500:]}")
        tools = [t["name"] for t in out["tools"]]
        ok = p.returncode == 0 and tools == r["tools"] and re.search(r["answer"], out["result"], re.S) is not None
        right += ok
        print(f"# {r['id']} {'right' if ok else 'WRONG'}: {tools} {out['result'][:100]!r}")
        for t in out["turns"]:
            if t["prefilled_tokens"] + t["restored_tokens"] <= 0:
                sys.exit(f"{r['id']}: a turn accounts for no tokens: {t}")
finally:
    shutil.rmtree(tmp, ignore_errors=True)
print(f"{'ok' if right >= WANT else 'not ok'}: {right} of 10 right (want {WANT})")
sys.exit(right < WANT)
