#!/usr/bin/env python3
"""Speculation by the command line: on a checkpoint whose MTP layer knows what the trunk will say, on one whose layer
knows nothing, greedy and sampled, over a pause: the same tokens and logarithms, whatever --speculate says.

The knowing checkpoint is a synthetic one in which attention and experts add nothing, so that the trunk is a table from
one token to the next; its MTP layer is made to look the drafted token up in the same table."""
import glob, json, os, shutil, struct, subprocess, sys, tempfile

build = os.path.abspath(sys.argv[1])
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
tiny = os.path.join(root, "examples/models/tiny")
tmp = tempfile.mkdtemp(prefix="dm-speculate-")


def dormouse(*args, status=0):
    p = subprocess.run([os.path.join(build, "dormouse"), *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if p.returncode != status:
        sys.exit(f"not ok: dormouse {' '.join(args)} gave {p.returncode}: {p.stdout[-300:]} {p.stderr[-500:]}")
    return p


def know(directory):
    """Zeroes what attention and experts would add, and makes e_proj the identity and h_proj nothing."""
    norm = None
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        with open(path, "r+b") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            head = json.loads(f.read(n))
            for name, t in head.items():
                if name == "__metadata__":
                    continue
                at, end = (8 + n + x for x in t["data_offsets"])
                kind = name.rsplit(".", 1)[-1]
                if name == "norm.weight":
                    f.seek(at)
                    norm = f.read(end - at)
                new = None
                if name.endswith(("wo_b.weight", "w2.weight", "mtp.0.h_proj.weight")):
                    new = bytes(end - at)
                elif name == "mtp.0.e_proj.weight":
                    rows, cols = t["shape"]
                    new = b"".join(bytes(i) + b"\x38" + bytes(cols - i - 1) for i in range(rows))  # e4m3: 1.0
                elif name == "mtp.0.e_proj.scale":
                    new = b"\x7f" * (end - at)  # ue8m0: 1.0
                elif name == "mtp.0.enorm.weight":
                    new = struct.pack("<H", 0x3F80) * ((end - at) // 2)
                elif name == "mtp.0.norm.weight":
                    new = norm or sys.exit("not ok: no norm.weight before mtp.0.norm.weight")
                if new is not None:
                    f.seek(at)
                    f.write(new)


def model(name, knowing, temperature):
    d = os.path.join(tmp, name)
    os.mkdir(d)
    config = json.load(open(os.path.join(tiny, "config.json"), encoding="utf-8"))
    config["num_nextn_predict_layers"] = 1
    with open(os.path.join(tmp, name + ".json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    os.rmdir(d)
    dormouse("model", "synth", os.path.join(tmp, name + ".json"), d)
    if knowing:
        know(d)
    for other in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(os.path.join(tiny, other), d)
    agent = json.load(open(os.path.join(tiny, "agent.json"), encoding="utf-8"))
    agent["sampling"] = {"temperature": temperature, "seed": 7}
    with open(os.path.join(d, "agent.json"), "w", encoding="utf-8") as f:
        json.dump(agent, f)
    return d


def talk(d, speculate, state):
    """Two turns, each in a process of its own: (everything that must not depend on drafts, drafted, accepted)."""
    said, drafted, accepted, session = [], 0, 0, None
    for ask in ("Count to ten.", "And further?"):
        p = dormouse("run", "-m", d, "--state-dir", os.path.join(tmp, state), "-C", os.path.join(root, "examples/workspace"), "--max-tokens", "120", "--max-turns", "1",
                     "-o", "stream-json", "--logprobs", "2", "--speculate", speculate, *(["--resume", session] if session else []), ask, status=5)
        lines = [json.loads(x) for x in p.stdout.splitlines()]
        said += [(x["id"], x["logprob"], [(y["id"], y["logprob"]) for y in x["top_logprobs"]]) for x in lines if x["type"] == "token"]
        for t in lines[-1]["turns"]:
            drafted += t["drafted_tokens"]
            accepted += t["accepted_tokens"]
            said.append((t["prefilled_tokens"], t["restored_tokens"], t["decoded_tokens"], t["end"]))
        said.append(lines[-1]["result"])
        session = lines[-1]["session_id"]
    return said, drafted, accepted


try:
    for name, knowing, temperature in (("knows", True, 0), ("knows-warm", True, 0.7), ("guesses", False, 0)):
        d = model(name, knowing, temperature)
        plain, drafted, _ = talk(d, "off", name + "-off")
        if drafted:
            sys.exit("not ok: --speculate off drafted")
        for speculate in ("auto", "1", "8"):
            said, drafted, accepted = talk(d, speculate, name + "-" + speculate)
            print(f"# {name}, --speculate {speculate}: {accepted} of {drafted} drafts were right, {len(plain)} things said")
            if said != plain:
                i = next(i for i, (a, b) in enumerate(zip(said, plain)) if a != b)
                sys.exit(f"not ok: {name}, --speculate {speculate}: {said[i]} instead of {plain[i]} at {i}")
            want = 0 if not knowing or temperature else 90 if speculate == "1" else 50  # percent: one wrong guess spoils those behind it
            if speculate != "auto" and (not drafted or accepted * 100 < drafted * want):
                sys.exit(f"not ok: {name}: {accepted} of {drafted} drafts")
    p = dormouse("run", "--state-dir", os.path.join(tmp, "x"), "--speculate", "2", "Hello", status=2)
    if "no MTP layer" not in p.stderr + p.stdout:
        sys.exit(f"not ok: drafting without an MTP layer: {p.stderr}")
    dormouse("run", "--state-dir", os.path.join(tmp, "x"), "--speculate", "9", "Hello", status=2)
    dormouse("run", "--state-dir", os.path.join(tmp, "x"), "--stop", "", "Hello", status=2)
    dormouse("run", "--state-dir", os.path.join(tmp, "x"), "--logprobs", "1", "Hello", status=2)
finally:
    shutil.rmtree(tmp, ignore_errors=True)
print("ok: speculation changed nothing that is said")
