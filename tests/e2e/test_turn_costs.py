#!/usr/bin/env python3
"""C5 on the embedded model: in a session of ten messages, each in a process of its own, every turn prefills its new
tokens and nothing else, and everything before them is restored."""
import json, os, shutil, subprocess, sys, tempfile

build = sys.argv[1]
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
tmp = tempfile.mkdtemp(prefix="dm-costs-")
asks = ["What is the port in config/server.ini?", "Where is high_water used?", "List the .md files.",
        "How many lines does data/prices.csv have?", "What is the price of anchor in data/prices.csv?"]
session, length, turns = None, 0, 0
try:
    for i in range(10):
        cmd = [os.path.join(build, "dormouse"), "run", "--output-format", "json", "--state-dir", os.path.join(tmp, "state"),
               "--workspace", os.path.join(root, "examples/workspace"), "--max-tokens", "200"]
        cmd += ["--resume", session] if session else []
        p = subprocess.run(cmd + [asks[i % len(asks)]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        out = json.loads(p.stdout.strip().splitlines()[-1])
        session = out["session_id"]
        for t in out["turns"]:
            turns += 1
            print(f"# message {i + 1}: new {t['new_tokens']} prefilled {t['prefilled_tokens']} restored {t['restored_tokens']} ({t['restored_from']}) decoded {t['decoded_tokens']}")
            if t["prefilled_tokens"] != t["new_tokens"]:
                sys.exit(f"not ok: {t['prefilled_tokens']} tokens prefilled for {t['new_tokens']} new ones: {t}")
            if t["restored_tokens"] != length:
                sys.exit(f"not ok: {t['restored_tokens']} tokens restored of {length}")
            length += t["new_tokens"] + t["decoded_tokens"]
finally:
    shutil.rmtree(tmp, ignore_errors=True)
if turns < 10:
    sys.exit(f"not ok: only {turns} turns")
print(f"ok: {turns} turns cost their new tokens, {length} tokens in all")
