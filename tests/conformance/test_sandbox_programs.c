/* Q71: real programs that sandboxes are known to break.  Each runs inside the full sandbox with an expected result; one that
 * is not installed is skipped, loudly. */
#include "tests/unit/sandbox_run.h"

static dm_sandbox *s;
static const char *ws;

static int setup(void **state) {
    (void)state;
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    ws = fresh_dir("ws");
    return 0;
}

static int teardown(void **state) {
    (void)state;
    dm_sandbox_stop(s);
    return 0;
}

static void need(const char *program) {
    char cmd[200], why[200];
    snprintf(cmd, sizeof cmd, "command -v %s >/dev/null 2>&1", program);
    snprintf(why, sizeof why, "%s is not installed", program);
    if (system(cmd) != 0) test_skip(why);
}

/* Skips unless the check works outside too: a broken installation is not the sandbox's fault. */
static void need_working(const char *check, const char *why) {
    char cmd[300];
    snprintf(cmd, sizeof cmd, "%s >/dev/null 2>&1", check);
    if (system(cmd) != 0) test_skip(why);
}

static const char git_id[] = "export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@t GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@t\n";

static void sh(const char *script, const char *want) { expect_sh(s, ws, script, want); }

static void git_commits_and_makes_worktrees(void **state) {
    (void)state;
    need("git");
    char script[1000];
    snprintf(script, sizeof script, "%s%s", git_id,
             "git init -q . && echo a > a && git add a && git commit -qm one && git checkout -q -b side && echo b >> a && git commit -qam two\n"
             "git checkout -q - && git merge -q side && git worktree add -q sub/tree HEAD~1 2>/dev/null; cat sub/tree/a; git log --format=%s; git status --porcelain; git gc -q; git fsck 2>/dev/null");
    sh(script, "a\ntwo\none\n?? sub/\n");
    /* The next command finds a repository, now protected, that still works. */
    snprintf(script, sizeof script, "%s%s", git_id, "git stash list; echo c >> a; git commit -qam three && git log -1 --format=%s; git clone -q . clone 2>&1; ls clone");
    sh(script, "three\na\n");
}

static void make_builds_in_parallel(void **state) {
    (void)state;
    need("make");
    need("cc");
    put_file(ws, "Makefile", "all: a b c d\n%: %.c\n\tcc -O1 -o $@ $<\n");
    static const char *const names[] = {"a.c", "b.c", "c.c", "d.c"};
    for (size_t i = 0; i < 4; i++) put_file(ws, names[i], "#include <stdio.h>\nint main(void) { puts(__FILE__); return 0; }\n");
    sh("make -s -j4 && ./a && ./b && ./c && ./d", "a.c\nb.c\nc.c\nd.c\n");
}

static void cmake_configures_and_builds(void **state) {
    (void)state;
    need("cmake");
    need("cc");
    put_file(ws, "CMakeLists.txt", "cmake_minimum_required(VERSION 3.10)\nproject(p C)\nadd_executable(p p.c)\n");
    put_file(ws, "p.c", "#include <stdio.h>\nint main(void) { puts(\"built\"); return 0; }\n");
    sh("cmake -S . -B build >/dev/null && cmake --build build >/dev/null && build/p", "built\n");
}

static void ccache_has_a_place_for_its_cache(void **state) {
    (void)state;
    need("ccache");
    need("cc");
    put_file(ws, "p.c", "int main(void) { return 0; }\n");
    sh("ccache cc -c p.c && ls p.o", "p.o\n");
}

static void cargo_builds_offline(void **state) {
    (void)state;
    need("cargo");
    need_working("cargo --version", "cargo does not work here");
    put_file(ws, "Cargo.toml", "[package]\nname = \"p\"\nversion = \"0.1.0\"\nedition = \"2021\"\n");
    put_file(ws, "src/main.rs", "fn main() { println!(\"built\"); }\n");
    sh("cargo build -q --offline && target/debug/p", "built\n");
}

static void go_tests_with_a_cache_in_the_private_home(void **state) {
    (void)state;
    need("go");
    put_file(ws, "go.mod", "module p\n\ngo 1.19\n");
    put_file(ws, "p_test.go", "package p\n\nimport \"testing\"\n\nfunc TestP(t *testing.T) {}\n");
    sh("go test ./... | cut -f1", "ok  \n");
}

static void node_spawns_synchronously(void **state) {
    (void)state;
    need("node");
    sh("node -e 'const r = require(\"child_process\").spawnSync(\"echo\", [\"hi\"]); process.stdout.write(r.stdout); console.log(r.status)'", "hi\n0\n");
    sh("node -e 'const h = require(\"http\"); const s = h.createServer((q, r) => r.end(\"ok\")).listen(0, \"127.0.0.1\", () => h.get({port: s.address().port}, r => r.on(\"data\", d => { console.log(String(d)); s.close(); })))'",
       "ok\n");
}

static void npm_tests_offline(void **state) {
    (void)state;
    need("npm");
    need_working("npm --version", "npm does not work here");
    put_file(ws, "package.json", "{\"name\":\"p\",\"version\":\"1.0.0\",\"scripts\":{\"test\":\"echo tested\"}}\n");
    sh("npm test --silent --offline", "tested\n");
}

static void pytest_runs_with_workers(void **state) {
    (void)state;
    need_working("python3 -c 'import pytest, xdist'", "pytest with xdist is not installed");
    put_file(ws, "test_a.py", "import pytest\n@pytest.mark.parametrize('n', range(6))\ndef test_n(n):\n    assert n < 6\n");
    sh("python3 -m pytest -q -n 2 -p no:cacheprovider test_a.py | tail -1 | cut -d' ' -f1,2", "6 passed\n");
}

static void python_runs_pools_and_asyncio(void **state) {
    (void)state;
    need("python3");
    need_working("python3 -c 'import asyncio'", "python3 does not work here");
    put_file(ws, "pool.py", "import asyncio, multiprocessing, sys\nfrom concurrent.futures import ProcessPoolExecutor\n\ndef square(x):\n    return x * x\n\n"
                            "async def main():\n    p = await asyncio.create_subprocess_exec('echo', 'sub')\n    await p.wait()\n\nif __name__ == '__main__':\n"
                            "    for method in ('fork', 'forkserver', 'spawn'):\n        with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:\n"
                            "            print(method, sum(pool.map(square, range(10))), flush=True)\n    asyncio.run(main())\n");
    sh("python3 pool.py", "fork 285\nforkserver 285\nspawn 285\nsub\n");
}

static void python_uses_semaphores_and_shared_memory(void **state) {
    (void)state;
    need("python3");
    need_working("python3 -c 'import multiprocessing.shared_memory'", "python3 does not work here");
    put_file(ws, "shm.py", "from multiprocessing import Lock, Queue, Process, shared_memory\nm = shared_memory.SharedMemory(create=True, size=100)\nm.buf[0] = 7\n"
                           "n = shared_memory.SharedMemory(m.name)\nprint(n.buf[0])\nn.close(); m.close(); m.unlink()\nq = Queue()\n"
                           "def put():\n    q.put('through')\np = Process(target=put); p.start(); print(q.get()); p.join()\nwith Lock(): print('locked')\n");
    sh("python3 shm.py", "7\nthrough\nlocked\n");
}

static void sqlite_writes_a_database(void **state) {
    (void)state;
    need("sqlite3");
    sh("sqlite3 d.db \"pragma journal_mode=wal; create table t(x); insert into t values (1),(2); select sum(x) from t;\"", "wal\n3\n");
}

static void a_loopback_server_answers_curl(void **state) {
    (void)state;
    need("python3");
    need("curl");
    need_working("python3 -c 'import http.server'", "python3 does not work here");
    put_file(ws, "index.html", "served\n");
    sh("python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 & p=$!; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do curl -sf http://127.0.0.1:8123/ && break; sleep 0.2; done; kill $p",
       "served\n");
}

static void unix_sockets_work_in_the_workspace(void **state) {
    (void)state;
    need("python3");
    need_working("python3 -c 'import socket'", "python3 does not work here");
    put_file(ws, "un.py", "import socket, os\ns = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen(1)\nif os.fork() == 0:\n    c = socket.socket(socket.AF_UNIX); c.connect('sock'); c.send(b'hello'); os._exit(0)\n"
                          "print(s.accept()[0].recv(10).decode()); os.wait()\na, b = socket.socketpair(); a.send(b'pair'); print(b.recv(9).decode())\n");
    sh("python3 un.py; rm sock", "hello\npair\n");
}

static void everyday_tools_work(void **state) {
    (void)state;
    sh("f=$(mktemp) && echo x > $f && cat $f && d=$(mktemp -d) && ls -d $d | cut -c1-5", "x\n/tmp/\n");
    sh("echo a > a; tar cf t.tar a && rm a && tar xf t.tar && cat a; tar czf t.tgz a && tar tzf t.tgz", "a\na\n");
    sh("find / -xdev -maxdepth 2 -path /etc/passwd 2>/dev/null; true", "/etc/passwd\n");
    sh("seq 3 | xargs -P2 -n1 echo | sort; diff a a && echo same; nproc > /dev/null && echo ok; date > /dev/null; sleep 0.01; echo abc | sed s/b/x/ | awk '{print $1}'", "1\n2\n3\nsame\nok\naxc\n");
    sh("bash -c 'cat <(echo sub); cat /dev/stdin <<< here; ulimit -n'", "sub\nhere\n1024\n");
    sh("bash -c 'echo late > >(sleep 0.05; cat)'", "late\n"); /* no shell waits for it, yet it belongs to the command */
    sh("whoami > /dev/null && echo named; hostname 2>/dev/null || cat /proc/sys/kernel/hostname", "named\nsandbox\n");
}

static void ps_shows_only_what_is_inside(void **state) {
    (void)state;
    need("ps");
    sh("ps -e -o comm= >list; sort -u list", "ps\nsh\nsupervisor\n");
}

static void a_debugger_is_told_no_and_the_program_runs_without(void **state) {
    (void)state;
    need("strace");
    ran r;
    run_sh(s, ws, "strace -o /dev/null true; echo went on", &r);
    assert_string_equal(r.out, "went on\n");
    ran_free(&r);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(git_commits_and_makes_worktrees),
        T(make_builds_in_parallel),
        T(cmake_configures_and_builds),
        T(ccache_has_a_place_for_its_cache),
        T(cargo_builds_offline),
        T(go_tests_with_a_cache_in_the_private_home),
        T(node_spawns_synchronously),
        T(npm_tests_offline),
        T(pytest_runs_with_workers),
        T(python_runs_pools_and_asyncio),
        T(python_uses_semaphores_and_shared_memory),
        T(sqlite_writes_a_database),
        T(a_loopback_server_answers_curl),
        T(unix_sockets_work_in_the_workspace),
        T(everyday_tools_work),
        T(ps_shows_only_what_is_inside),
        T(a_debugger_is_told_no_and_the_program_runs_without),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
