#!/usr/bin/env python3
"""A session moves to another state directory, by file and by socket: there it goes on with the bytes that it would have had here, at
the price of its new tokens.  Either side is killed at every stage: the receiver has all of it or nothing, and a repeat mends it.
What is cut, flipped, foreign or no export at all is refused and changes nothing."""
import fcntl, json, os, random, re, shutil, signal, socket, subprocess, sys, tempfile, time

build = sys.argv[1]
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
dm = os.path.join(build, "dormouse")
tmp = tempfile.mkdtemp(prefix="dm-transfer-")
os.environ["DORMOUSE_MODEL"] = os.path.join(root, "examples/models/tiny")
os.environ.pop("DORMOUSE_STATE_DIR", None)
seed = int(os.environ.get("DM_TEST_SEED", "7"))
print(f"# seed {seed}")
rng = random.Random(seed)
bad = 0
started = []


def check(name, good, more=""):
    global bad
    print(f"{'ok' if good else 'not ok'}: {name}")
    if not good:
        bad += 1
        print("    " + str(more)[:1500].replace("\n", "\n    "))


def at(name):
    return os.path.join(tmp, name)


def env(fault=None):
    e = dict(os.environ)
    if fault:
        e["DORMOUSE_FAULT"] = fault
    return e


def run(*args, fault=None, data=None, timeout=300):
    p = subprocess.run([dm, *args], input=data, stdin=None if data is not None else subprocess.DEVNULL, capture_output=True, env=env(fault), timeout=timeout)
    return p.returncode, p.stdout, p.stderr.decode(errors="replace")


def start(*args, fault=None):
    p = subprocess.Popen([dm, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env(fault))
    started.append(p)
    return p


def events(state):
    rc, out, err = run("sessions", "show", "--state-dir", state, "--json", sid)
    return [json.loads(l) for l in out.decode().splitlines()] if rc == 0 else None


def timeline(state):
    """What the model read and wrote, to the token; what was said."""
    return [(e["what"], e["ids"], e["rng"], e.get("end")) for e in events(state) if e["type"] == "tokens"]


def go_on(state):
    """The session's next request; its text, and whether every turn computed its new tokens only."""
    rc, out, err = run("run", "--state-dir", state, "-C", ws, "--resume", sid, "--output-format", "json", "List the .md files.")
    if rc:
        return None, False, err
    o = json.loads(out)
    return o["result"], all(t["prefilled_tokens"] == t["new_tokens"] for t in o["turns"]), json.dumps(o["turns"])


def same_as_here(name, state):
    text, cheap, more = go_on(state)
    check(f"{name}: goes on as it would have here", text == ref_text and timeline(state) == ref_timeline, f"{text!r} {more}")
    check(f"{name}: only new tokens are computed", cheap, more)


def listening(p):
    for line in p.stderr:
        m = re.match(rb"dormouse: listening on (\S+)", line)
        if m:
            return m.group(1).decode()
    return None


def finish(p, timeout=120):
    out, err = p.communicate(timeout=timeout)
    return p.returncode, out, err.decode(errors="replace")


try:
    # ---- the session, and how it goes on where it is --------------------------------------------------------------
    ws = at("ws")
    shutil.copytree(os.path.join(root, "examples/workspace"), ws)
    home = at("home")
    rc, out, err = run("run", "--state-dir", home, "-C", ws, "--output-format", "json", "What is the port in config/server.ini?")
    if rc:
        sys.exit(f"the first run failed: {err}")
    sid = json.loads(out)["session_id"]
    first = events(home)
    shutil.copytree(home, at("ref"))
    ref_text, cheap, more = go_on(at("ref"))
    ref_timeline = timeline(at("ref"))
    check("here: the session goes on", ref_text and cheap, more)

    # ---- a file --------------------------------------------------------------------------------------------------------
    f = at("session.dm")
    rc, out, err = run("kv", "export", "--state-dir", home, "--json", sid, f)
    told = json.loads(out) if rc == 0 else {}
    check("export to a file", rc == 0 and told["tokens"] == told["restorable_tokens"] and told["blocks"] > 0 and told["states"] > 0, err)
    check("no part is left", os.listdir(tmp).count("session.dm") == 1 and not os.path.exists(f + ".part"))
    whole = open(f, "rb").read()
    rc, out, err = run("kv", "import", "--state-dir", at("file"), "--json", f)
    check("import from a file", rc == 0 and json.loads(out)["new_events"] == len(first) and json.loads(out)["restorable_tokens"] == told["tokens"], err)
    check("the same events", events(at("file")) == first)
    rc, out, err = run("kv", "import", "--state-dir", at("file"), "--json", f)
    check("import again: nothing is new", rc == 0 and json.loads(out)["new_events"] == 0, err)
    rc, piped, err = run("kv", "export", "--state-dir", home, sid, "-")
    check("export to a pipe: the same bytes", rc == 0 and piped == whole, err)
    rc, out, err = run("kv", "import", "--state-dir", at("pipe"), "-", data=piped)
    check("import from a pipe", rc == 0 and events(at("pipe")) == first, err)
    rc, out, err = run("kv", "import", "--state-dir", at("pipe2"), "-", data=piped + b"x")
    check("a pipe with more behind the end is refused", rc == 1 and events(at("pipe2")) is None, err)
    same_as_here("file", at("file"))
    same_as_here("pipe", at("pipe"))

    # ---- one that is here already -----------------------------------------------------------------------------------------
    rc, out, err = run("kv", "import", "--state-dir", at("file"), f)
    check("one that has gone on here is not taken back", rc == 1 and "gone on" in err and timeline(at("file")) == ref_timeline, err)
    longer = at("longer.dm")
    rc, out, err = run("kv", "export", "--state-dir", at("ref"), sid, longer)
    run("kv", "import", "--state-dir", at("forward"), f)
    rc, out, err = run("kv", "import", "--state-dir", at("forward"), "--json", longer)
    check("one that is behind is brought forward", rc == 0 and json.loads(out)["new_events"] == len(events(at("ref"))) - len(first) and events(at("forward")) == events(at("ref")), err)
    rc, out, err = run("kv", "import", "--state-dir", at("file"), longer)
    check("one that went another way is refused", rc == 1 and "another way" in err and timeline(at("file")) == ref_timeline, err)

    # ---- what is refused ----------------------------------------------------------------------------------------------------
    def refuse(name, data, want, *more, kv=None):
        g = at("bad.dm")
        open(g, "wb").write(data)
        state = at("refused")
        rc, out, err = run("kv", "import", "--state-dir", state, *more, g)
        lines = [l for l in err.splitlines() if l.startswith("dormouse: ")]
        check(f"refused: {name}", rc == 1 and re.search(want, err) and len(lines) == 1 and events(state) is None, f"exit {rc}: {err}")

    refuse("a text", b"hello, this is no export at all\n" * 20, "not an exported session")
    refuse("nothing", b"", "not an exported session")
    refuse("newer", whole[:8] + b"\x02" + whole[9:], "format 2")
    for n in sorted({12, 100, 320, 350, len(whole) - 1, len(whole) - 40, *(rng.randrange(len(whole)) for _ in range(6))}):
        refuse(f"cut at {n}", whole[:n], "cut short|not an exported")
    for n in [9, 13, 17, 50, 130, 150, 200, 320, 330, 362, len(whole) - 5, *(rng.randrange(len(whole)) for _ in range(8))]:
        data = bytearray(whole)
        data[n] ^= 1 << rng.randrange(8)
        refuse(f"flipped at {n}", bytes(data), "changed|cut short|format|makes no sense")
    refuse("more behind the end", whole + b"\0", "more behind the end")
    refuse("another numeric path", whole, "numeric path", "--numerics", "exact")
    refuse("another salt", whole, "salt", "--kv-salt", "pepper")
    other = at("other-model")
    shutil.copytree(os.environ["DORMOUSE_MODEL"], other)
    t = open(os.path.join(other, "tokenizer.json"), encoding="utf-8").read()
    open(os.path.join(other, "tokenizer.json"), "w", encoding="utf-8").write(t + "\n")
    refuse("another tokenizer", whole, "another model", "--model", other)
    shutil.rmtree(at("refused"), ignore_errors=True)
    rc, out, err = run("kv", "import", "--state-dir", at("salted"), "--no-kv", "--kv-salt", "pepper", f)
    check("--no-kv takes the journal of it", rc == 0 and events(at("salted")) == first, err)
    rc, out, err = run("kv", "import", "--state-dir", at("full"), f, fault="kv.slots.written:1+=fail")
    check("a disk that takes nothing: refused, nothing is changed", rc == 1 and "disk is full" in err and events(at("full")) is None, err)
    rc, out, err = run("kv", "import", "--state-dir", at("full"), f)
    check("and once there is room", rc == 0 and events(at("full")) == first, err)
    rc, out, err = run("kv", "import", "--state-dir", at("small"), "--kv-bytes", "700K", "--json", f)
    check("a small quota: the session comes, with a notice", rc == 0 and events(at("small")) == first and json.loads(out)["restorable_tokens"] < told["tokens"] and "computes the rest" in err, err)
    text, cheap, more = go_on(at("small"))
    check("a small quota: the same text", text == ref_text and timeline(at("small")) == ref_timeline, more)
    rc, out, err = run("kv", "export", "--state-dir", home, "0000", at("none.dm"))
    check("a session that is not there", rc == 3 and not os.path.exists(at("none.dm")), err)
    for args in (["export", "--state-dir", home, sid, "--to", "192.0.2.1:9"], ["import", "--state-dir", at("x"), "--listen", "0.0.0.0:0"]):
        rc, out, err = run("kv", *args)
        check(f"{args[0]}: other machines only on request", rc == 2 and "--insecure-remote" in err, err)

    with open(os.path.join(home, "locks", sid), "r+") as lock:  # somebody runs it
        fcntl.flock(lock, fcntl.LOCK_EX)
        rc, out, err = run("kv", "export", "--state-dir", home, sid, at("busy.dm"))
        check("a session that runs is not exported", rc == 1 and "being run" in err and not os.path.exists(at("busy.dm")), err)
        rc, out, err = run("kv", "import", "--state-dir", home, longer)
        check("nor brought forward", rc == 1 and "being run" in err and events(home) == first, err)
    rc, out, err = run("kv", "export", "--state-dir", home, sid, "/dev/full")
    check("a full disk under the export", rc == 1 and "no space" in err.lower(), err)
    rc, out, err = run("kv", "export", "--state-dir", home, sid, os.path.join(tmp, "no", "such", "dir"))
    check("a folder that is not there", rc == 3 and "no/such/dir" in err, err)

    # ---- a file, with a kill at every stage ---------------------------------------------------------------------------------
    for fault in ("transfer.send:1", "transfer.send:9", "transfer.send:40"):
        g = at("killed.dm")
        rc, out, err = run("kv", "export", "--state-dir", home, sid, g, fault=fault + "=kill")
        gone = rc == -9 and not os.path.exists(g)
        rc, out, err = run("kv", "export", "--state-dir", home, sid, g)
        check(f"export killed at {fault}: no file, and a repeat makes it", gone and rc == 0 and open(g, "rb").read() == whole and not os.path.exists(g + ".part"), err)
        os.unlink(g)

    # ---- a socket ---------------------------------------------------------------------------------------------------------------
    serial = 0

    def transfer(state, address, send_fault=None, receive_fault=None, retries="0"):
        """One transfer; what both said, and what the receiver has."""
        r = start("kv", "import", "--state-dir", state, "--listen", address, "--wait", "60", "--timeout", "20", fault=receive_fault)
        to = listening(r)
        rc, out, err = run("kv", "export", "--state-dir", home, sid, "--to", to, "--retries", retries, "--timeout", "20", fault=send_fault)
        if rc and r.poll() is None:
            time.sleep(0.3)  # it waits for another try, or is still at work; neither may go wrong when it is asked to stop
            r.send_signal(signal.SIGTERM)
        return (rc, err), finish(r)

    for address in ("127.0.0.1:0", "[::1]:0", "unix:" + at("sock")):
        if address.startswith("["):
            try:
                socket.create_server(("::1", 0), family=socket.AF_INET6).close()
            except OSError:
                print("# SKIP no IPv6 here")
                continue
        serial += 1
        sent, got = transfer(at(f"net{serial}"), address)
        check(f"{address}: both say so", sent[0] == 0 and got[0] == 0 and events(at(f"net{serial}")) == first, f"{sent} {got}")
    check("the socket's name is gone", not os.path.exists(at("sock")))
    same_as_here("socket", at("net1"))
    sent, got = transfer(at("net1b"), "127.0.0.1:0", send_fault="transfer.send:9=fail", retries="3")
    check("a connection that breaks is tried again", sent[0] == 0 and got[0] == 0 and "tries left" in sent[1] and events(at("net1b")) == first, f"{sent} {got}")
    sent, got = transfer(at("net1c"), "127.0.0.1:0", receive_fault="transfer.receive:9=fail", retries="3")
    check("and when the receiver loses it", sent[0] == 0 and got[0] == 0 and events(at("net1c")) == first, f"{sent} {got}")
    sent, got = transfer(at("net1"), "127.0.0.1:0")
    check("a refusal is told to both, once", sent[0] == 1 and got[0] == 1 and "refused" in sent[1] and "gone on" in sent[1], f"{sent} {got}")

    # ---- a socket, with a kill at every stage -----------------------------------------------------------------------------------
    kills = [(s, None) for s in ("transfer.send:1", "transfer.send:8", "transfer.send:30", "transfer.send:44", "transfer.sent")]
    kills += [(None, s) for s in ("transfer.receive:1", "transfer.receive:2", "transfer.receive:20", "transfer.receive:40", "transfer.checked", "transfer.put:1", "transfer.put:4",
                                  "kv.slots.written", "kv.commit.before", "kv.commit.after", "transfer.flushed", "journal.commit", "transfer.committed", "transfer.answered")]
    for i, (s, r) in enumerate(kills):
        state = at(f"kill{i}")
        sent, got = transfer(state, "unix:" + at(f"sock{i}"), s and s + "=kill", r and r + "=kill")
        name = f"{'sender' if s else 'receiver'} killed at {s or r}"
        here = events(state) if os.path.isdir(state) else None
        died = (sent[0] if s else got[0]) == -9
        # A sender that says it has arrived is right; what has not arrived is not there at all.
        check(f"{name}: all or nothing", died and here in (None, first) and (sent[0] != 0 or here == first), f"{sent} {got} {here and len(here)}")
        if r in ("transfer.committed", "transfer.answered") or s == "transfer.sent":
            check(f"{name}: it had arrived", here == first, f"{sent} {got}")
        elif r or s:
            check(f"{name}: nothing had arrived", here is None, f"{sent} {got}")
        sent, got = transfer(state, "unix:" + at(f"sock{i}"))
        check(f"{name}: a repeat mends it", sent[0] == 0 and got[0] == 0 and events(state) == first, f"{sent} {got}")
        same_as_here(name, state)
        shutil.rmtree(state)
    check("it is still here, as it was", events(home) == first)

    # ---- waiting ends ----------------------------------------------------------------------------------------------------------------
    r = start("kv", "import", "--state-dir", at("wait"), "--listen", "unix:" + at("wait.sock"))
    listening(r)
    r.send_signal(signal.SIGINT)
    got = finish(r)
    check("Ctrl-C ends a receiver that waits", got[0] == 130 and not os.path.exists(at("wait.sock")), got)
    deaf = socket.create_server(("127.0.0.1", 0))
    to = "127.0.0.1:%d" % deaf.getsockname()[1]
    s = start("kv", "export", "--state-dir", home, sid, "--to", to)
    conn, _ = deaf.accept()
    conn.recv(100)
    s.send_signal(signal.SIGINT)
    got = finish(s)
    check("Ctrl-C ends a sender that waits", got[0] == 130, got)
    rc, out, err = run("kv", "export", "--state-dir", home, sid, "--to", to, "--timeout", "1", "--retries", "0")
    check("a receiver that says nothing is given up", rc == 1 and "did not move" in err, err)
    deaf.close()
    rc, out, err = run("kv", "export", "--state-dir", home, sid, "--to", to, "--retries", "1")
    check("nobody there: tried again, then given up", rc == 1 and "tries left" in err, err)
    r = start("kv", "import", "--state-dir", at("wait"), "--listen", "127.0.0.1:0", "--timeout", "20", "--retries", "0")
    host, port = listening(r).rsplit(":", 1)
    c = socket.create_connection((host, int(port)))
    c.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while chunk := c.recv(1000):
        answer += chunk
    c.close()
    got = finish(r)
    check("a stranger is refused", got[0] == 1 and answer.startswith(b"-") and "not an exported session" in got[2], f"{answer} {got}")
finally:
    for p in started:
        if p.poll() is None:
            p.kill()
            p.wait()
    shutil.rmtree(tmp, ignore_errors=True)
print("# all right" if not bad else f"# {bad} wrong")
sys.exit(bad > 0)
