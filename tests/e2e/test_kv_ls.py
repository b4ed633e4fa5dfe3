#!/usr/bin/env python3
"""`dormouse kv ls` and `kv gc`: what a session left in the store is listed with its position; a store is made smaller, its files too, also
when that is killed in the middle; a session goes on as before, at a higher price."""
import glob, json, os, shutil, subprocess, sys, tempfile

build = sys.argv[1]
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
tmp = tempfile.mkdtemp(prefix="dm-kvls-")
os.environ["DORMOUSE_MODEL"] = os.path.join(root, "examples/models/tiny")
os.environ["DORMOUSE_STATE_DIR"] = os.path.join(tmp, "state")
bad = 0


def check(name, good, more=""):
    global bad
    print(f"{'ok' if good else 'not ok'}: {name}")
    if not good:
        bad += 1
        print("    " + str(more)[:1500].replace("\n", "\n    "))


def run(*args, fault=None):
    e = dict(os.environ, **({"DORMOUSE_FAULT": fault} if fault else {}))
    p = subprocess.run([os.path.join(build, "dormouse"), *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=e, timeout=120)
    return p.returncode, p.stdout, p.stderr


def objects(text):
    return [json.loads(l) for l in text.splitlines()]


def sound():
    rc, out, err = run("kv", "verify", "--json")
    return rc == 0 and objects(out)[0]["bad"] == 0


try:
    rc, out, err = run("kv", "ls")
    check("nothing is stored yet", rc == 0 and "nothing" in out, err)
    ws = os.path.join(tmp, "ws")
    shutil.copytree(os.path.join(root, "examples/workspace"), ws)
    rc, out, err = run("run", "-C", ws, "--output-format", "json", "--kv-bytes", "1G", "What is the port in config/server.ini?")
    first = json.loads(out)
    tokens = first["turns"][-1]["context_tokens"] + first["turns"][-1]["decoded_tokens"]
    rc, out, err = run("kv", "ls", "--json")
    items = objects(out)
    blocks = sorted(i["tokens"] for i in items if i["kind"] == "block")
    states = sorted(i["tokens"] for i in items if i["kind"] == "state")
    check("blocks stand where they stand", rc == 0 and blocks == [256 * (i + 1) for i in range(len(blocks))] and len(blocks) == tokens // 256, out + err)
    check("states too, the last at the end of the session", states and states[-1] in (tokens, tokens - 1) and all(i["age_days"] == 0 and i["bytes"] > 0 for i in items), (states, tokens))
    rc, out, err = run("kv", "ls")
    check("and as text", rc == 0 and len(out.splitlines()) == len(items) + 2, out)
    rc, out, err = run("kv", "stat", "--json")
    stat = objects(out)[0]
    check("stat has the quota that the store has", stat.get("bytes_max") == 1 << 30, out)

    rc, out, err = run("kv", "gc")
    check("gc wants to know what", rc == 2, err)
    rc, out, err = run("kv", "gc", "--older-than", "0", "--json")
    check("nothing is older than today", rc == 0 and objects(out)[0]["blocks"] == 0 and objects(out)[0]["states"] == 0, out + err)
    most = stat["bytes_file"] * 3 // 4
    rc, out, err = run("kv", "gc", "--max-bytes", str(most), "--dry-run", "--json")
    dry = objects(out)[0]
    check("a dry run changes nothing", rc == 0 and dry["states"] > 0 and dry["bytes_file"] == dry["bytes_file_before"] and len(objects(run("kv", "ls", "--json")[1])) == len(items), out + err)
    for fault in ("kv.commit.before", "kv.commit.after", "kv.commit.after:2"):
        rc, out, err = run("kv", "gc", "--max-bytes", str(most), fault=fault + "=kill")
        check(f"killed at {fault}: what is left is sound", rc == -9 and sound(), err)
    rc, out, err = run("kv", "gc", "--max-bytes", str(most), "--json")
    done = objects(out)[0]
    files = sum(os.stat(f).st_blocks * 512 for f in glob.glob(os.path.join(tmp, "state/kv/*/*.d*") ) if not f.endswith("lock.mdb"))
    check("the files are as small as was asked", rc == 0 and done["bytes_file"] <= most and files <= most and sound(), f"{out} {files} {most}")
    check("its quota is what it was", objects(run("kv", "stat", "--json")[1])[0].get("bytes_max") == 1 << 30)
    left = objects(run("kv", "ls", "--json")[1])
    check("what is left was the last to go", [i["key"] for i in left] == [i["key"] for i in items][-len(left):], left)
    rc, out, err = run("run", "--resume", first["session_id"], "-C", ws, "--output-format", "json", "List the .md files.")
    check("the session goes on", rc == 0 and json.loads(out)["turns"][0]["restored_tokens"] < tokens, out + err)
    rc, out, err = run("kv", "gc", "--max-bytes", "0", "--json")
    check("all of it", rc == 0 and objects(out)[0]["entries_left"] == 0 and sound(), out + err)
finally:
    shutil.rmtree(tmp, ignore_errors=True)
print("# all right" if not bad else f"# {bad} wrong")
sys.exit(bad > 0)
