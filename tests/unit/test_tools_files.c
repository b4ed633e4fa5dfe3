/* read, write, edit, glob, grep through the registry: the result texts that models are trained on, and the walls. */
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <stdatomic.h>

#include "tests/unit/tools_run.h"

static rig g;

static int setup(void **state) {
    (void)state;
    rig_open(&g, -1, NULL);
    test_put(g.ws, "config/server.ini", "# server\nport = 4817\nhost = bay\n");
    test_put(g.ws, "notes/plan.md", "# Plan\nfix the pump\n");
    test_put(g.ws, "README.md", "hello\n");
    test_put(g.ws, "src/tides.c", "int high_water = 3;\nint low;\nreturn high_water;\n");
    test_put(g.outside, "x", "secret\n");
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rig_close(&g);
    return 0;
}

static void path_of(char *out, const char *name) { snprintf(out, 1100, "%s/%s", g.ws, name); }

/* ---- the contract with the embedded model ------------------------------------------------------------------------- */

static void read_gives_the_lines_as_they_are(void **state) {
    (void)state;
    expect(&g, "read", "{\"path\":\"config/server.ini\"}", "# server\nport = 4817\nhost = bay");
    expect(&g, "read", "{\"path\":\"config/server.ini\",\"offset\":2,\"limit\":1}", "port = 4817");
    expect(&g, "read", "{\"path\":\"config/server.ini\",\"offset\":3}", "host = bay");
    expect(&g, "read", "{\"path\":\"config/server.ini\",\"limit\":1}", "# server");
    expect(&g, "read", "{\"path\":\"./config/../config/server.ini\",\"limit\":1}", "# server");
    expect(&g, "read", "{\"path\":\"config/server.ini\",\"offset\":9}", "error: config/server.ini has only 3 lines");
    test_put(g.ws, "empty", "");
    expect(&g, "read", "{\"path\":\"empty\"}", "");
    test_put(g.ws, "open", "no end");
    expect(&g, "read", "{\"path\":\"open\"}", "no end");
}

static void a_missing_file_is_named(void **state) {
    (void)state;
    expect(&g, "read", "{\"path\":\"nope.txt\"}", "error: no such file: nope.txt");
    expect(&g, "read", "{\"path\":\"no/where/x\"}", "error: no such file: no/where/x");
    expect(&g, "edit", "{\"path\":\"nope.txt\",\"old\":\"a\",\"new\":\"b\"}", "error: no such file: nope.txt");
    expect(&g, "grep", "{\"pattern\":\"x\",\"path\":\"nope\"}", "error: no such file: nope");
}

static void write_makes_directories_and_says_how_much(void **state) {
    (void)state;
    expect(&g, "write", "{\"path\":\"a/b/c.txt\",\"content\":\"h\\u00e9\\n\"}", "Wrote 4 bytes to a/b/c.txt");
    char *text = rig_get(g.ws, "a/b/c.txt");
    assert_string_equal(text, "h\xc3\xa9\n");
    free(text);
    expect(&g, "write", "{\"path\":\"a/b/c.txt\",\"content\":\"\"}", "Wrote 0 bytes to a/b/c.txt");
    text = rig_get(g.ws, "a/b/c.txt");
    assert_string_equal(text, "");
    free(text);
    expect(&g, "write", "{\"path\":\"a/b\",\"content\":\"x\"}", "error: a/b is a directory");
}

static void write_keeps_the_mode_and_leaves_no_temporary_file(void **state) {
    (void)state;
    char path[1100];
    struct stat st;
    path_of(path, "run.sh");
    test_put(g.ws, "run.sh", "old");
    assert_int_equal(chmod(path, 0751), 0);
    expect(&g, "write", "{\"path\":\"run.sh\",\"content\":\"new\"}", "Wrote 3 bytes to run.sh");
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0751);
    expect(&g, "glob", "{\"pattern\":\".dm-*\"}", "No files found");
}

static void a_write_that_fails_leaves_the_old_content(void **state) {
    (void)state;
    test_put(g.ws, "keep", "old");
    assert_ok(dm_fault_arm("tools.rename=fail", NULL));
    call c;
    call_run(&g, &c, "write", "{\"path\":\"keep\",\"content\":\"new\"}");
    assert_ok(dm_fault_arm(NULL, NULL));
    assert_true(c.r.is_error);
    call_free(&c);
    char *text = rig_get(g.ws, "keep");
    assert_string_equal(text, "old");
    free(text);
    expect(&g, "glob", "{\"pattern\":\".dm-*\"}", "No files found");
}

static void edit_replaces_one_place(void **state) {
    (void)state;
    expect(&g, "edit", "{\"path\":\"config/server.ini\",\"old\":\"port = 4817\",\"new\":\"port = 5000\"}", "Edited config/server.ini: 1 replacement");
    expect(&g, "read", "{\"path\":\"config/server.ini\",\"offset\":2,\"limit\":1}", "port = 5000");
    expect(&g, "edit", "{\"path\":\"config/server.ini\",\"old\":\"nothing\",\"new\":\"x\"}", "error: text not found in config/server.ini");
}

static void edit_wants_one_place_or_all(void **state) {
    (void)state;
    expect(&g, "edit", "{\"path\":\"src/tides.c\",\"old\":\"high_water\",\"new\":\"hw\"}",
           "error: the text occurs 2 times in src/tides.c; give more of the text around it so that it is unique");
    expect(&g, "edit", "{\"path\":\"src/tides.c\",\"old\":\"high_water\",\"new\":\"hw\",\"all\":true}", "Edited src/tides.c: 2 replacements");
    expect(&g, "read", "{\"path\":\"src/tides.c\"}", "int hw = 3;\nint low;\nreturn hw;");
    expect(&g, "edit", "{\"path\":\"src/tides.c\",\"old\":\"hw\",\"new\":\"hw\"}", "error: old and new are the same");
}

static void edit_keeps_crlf_files_crlf(void **state) {
    (void)state;
    test_put(g.ws, "dos.txt", "one\r\ntwo\r\nthree\r\n");
    expect(&g, "read", "{\"path\":\"dos.txt\"}", "one\ntwo\nthree");
    expect(&g, "edit", "{\"path\":\"dos.txt\",\"old\":\"one\\ntwo\\n\",\"new\":\"1\\n2\\n\"}", "Edited dos.txt: 1 replacement");
    char *text = rig_get(g.ws, "dos.txt");
    assert_string_equal(text, "1\r\n2\r\nthree\r\n");
    free(text);
}

static void glob_lists_sorted_paths(void **state) {
    (void)state;
    expect(&g, "glob", "{\"pattern\":\"*.md\"}", "README.md\nnotes/plan.md");
    expect(&g, "glob", "{\"pattern\":\"**/*.md\"}", "README.md\nnotes/plan.md");
    expect(&g, "glob", "{\"pattern\":\"notes/*\"}", "notes/plan.md");
    expect(&g, "glob", "{\"pattern\":\"*/*.{c,ini}\"}", "config/server.ini\nsrc/tides.c");
    expect(&g, "glob", "{\"pattern\":\"src/**\"}", "src/tides.c");
    expect(&g, "glob", "{\"pattern\":\"t[a-j]des.?\"}", "src/tides.c");
    expect(&g, "glob", "{\"pattern\":\"*.rs\"}", "No files found");
    expect(&g, "glob", "{\"pattern\":\"[x\"}", "error: \"[x\" is not a valid pattern: a bracket is not closed");
    expect(&g, "glob", "{\"pattern\":\"../*\"}", "error: ../* is outside the workspace");
    expect(&g, "glob", "{\"pattern\":\"*.md\",\"path\":\"notes\"}", "notes/plan.md");
    test_put(g.ws, "a-b", "");
    test_put(g.ws, "a/c", "");
    test_put(g.ws, "a.c", "");
    expect(&g, "glob", "{\"pattern\":\"{a*,a/*}\"}", "a-b\na.c\na/c");
}

static void hidden_files_are_listed_only_when_asked_for(void **state) {
    (void)state;
    test_put(g.ws, ".env", "K=1\n");
    test_put(g.ws, ".git/config", "high_water");
    test_put(g.ws, ".github/ci.yml", "high_water\n");
    expect(&g, "glob", "{\"pattern\":\"*env\"}", "No files found");
    expect(&g, "glob", "{\"pattern\":\".env\"}", ".env");
    expect(&g, "glob", "{\"pattern\":\".g*/*\"}", ".github/ci.yml");
    expect(&g, "grep", "{\"pattern\":\"high_water\"}",
           ".github/ci.yml:1:high_water\nsrc/tides.c:1:int high_water = 3;\nsrc/tides.c:3:return high_water;");
}

static void grep_shows_path_line_text(void **state) {
    (void)state;
    expect(&g, "grep", "{\"pattern\":\"high_water\"}", "src/tides.c:1:int high_water = 3;\nsrc/tides.c:3:return high_water;");
    expect(&g, "grep", "{\"pattern\":\"^port\\\\s*=\",\"path\":\"config\"}", "config/server.ini:2:port = 4817");
    expect(&g, "grep", "{\"pattern\":\"port\",\"path\":\"config/server.ini\"}", "config/server.ini:2:port = 4817");
    expect(&g, "grep", "{\"pattern\":\"port\",\"path\":\"./config/\"}", "config/server.ini:2:port = 4817");
    expect(&g, "grep", "{\"pattern\":\"PUMP\",\"ignore_case\":true,\"glob\":\"*.md\"}", "notes/plan.md:2:fix the pump");
    expect(&g, "grep", "{\"pattern\":\"zzz\"}", "No matches found");
    expect(&g, "grep", "{\"pattern\":\"(\"}", "error: \"(\" is not a valid pattern: missing closing parenthesis at offset 1");
}

static void grep_skips_binary_files_and_shortens_long_lines(void **state) {
    (void)state;
    char path[1100];
    path_of(path, "bin");
    assert_ok(dm_file_write_atomic(path, "needle\0needle\n", 14, 0644, NULL));
    dm_buf b = {0};
    for (int i = 0; i < 300000; i++) assert_ok(dm_buf_str(&b, "needle "));
    assert_ok(dm_buf_str(&b, "\nshort needle\n"));
    path_of(path, "long");
    assert_ok(dm_file_write_atomic(path, b.p, b.n, 0644, NULL));
    dm_buf_free(&b);
    call c;
    call_run(&g, &c, "grep", "{\"pattern\":\"needle\"}");
    assert_null(strstr(c.r.text, "bin:"));
    assert_non_null(strstr(c.r.text, "[…]\nlong:2:short needle"));
    assert_true(c.r.text_bytes < 1000);
    call_free(&c);
}

static void a_pattern_that_explodes_is_stopped(void **state) {
    (void)state;
    test_put(g.ws, "evil", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\n");
    expect(&g, "grep", "{\"pattern\":\"^(a+)+$\",\"path\":\"evil\"}", "No matches found\n[the pattern was too complex for 1 lines]");
}

static void long_results_are_bounded_and_say_so(void **state) {
    (void)state;
    dm_buf b = {0};
    char path[1100];
    for (int i = 1; i <= 5000; i++) assert_ok(dm_buf_printf(&b, "line %d of many\n", i));
    path_of(path, "big.txt");
    assert_ok(dm_file_write_atomic(path, b.p, b.n, 0644, NULL));
    dm_buf_free(&b);
    call c;
    call_run(&g, &c, "read", "{\"path\":\"big.txt\"}");
    assert_true(c.r.cut && !c.r.is_error);
    assert_true(c.r.text_bytes <= 16384);
    int from = 0, to = 0, total = 0, next = 0;
    const char *note = strrchr(c.r.text, '[');
    assert_int_equal(sscanf(note, "[lines %d to %d of %d; go on with offset %d]", &from, &to, &total, &next), 4);
    assert_int_equal(from, 1);
    assert_int_equal(total, 5000);
    assert_int_equal(next, to + 1);
    char last[64];
    snprintf(last, sizeof last, "line %d of many\n[", to);
    assert_non_null(strstr(c.r.text, last));
    call_free(&c);
    char args[64], want[64];
    snprintf(args, sizeof args, "{\"path\":\"big.txt\",\"offset\":%d,\"limit\":1}", next);
    snprintf(want, sizeof want, "line %d of many", next);
    expect(&g, "read", args, want);
    call_run(&g, &c, "grep", "{\"pattern\":\"many\"}");
    assert_true(c.r.cut && c.r.text_bytes <= 16384);
    assert_non_null(strstr(c.r.text, "[not all matches are shown; use a narrower pattern or path]"));
    call_free(&c);
}

static void a_binary_file_is_refused_with_its_size(void **state) {
    (void)state;
    char path[1100];
    path_of(path, "b.bin");
    assert_ok(dm_file_write_atomic(path, "a\0b", 3, 0644, NULL));
    expect(&g, "read", "{\"path\":\"b.bin\"}", "error: b.bin is a binary file of 3 bytes");
}

static void file_text_is_mended_for_the_model(void **state) {
    (void)state;
    test_put(g.ws, "odd", "a\033[31mred\033[0m\xff" "c\n");
    expect(&g, "read", "{\"path\":\"odd\"}", "ared\xef\xbf\xbd" "c");
}

/* ---- Q16: a FIFO, a socket, a device or a directory never hangs and is told apart ------------------------------------- */

static void q16_only_regular_files_are_opened(void **state) {
    (void)state;
    char path[1100];
    path_of(path, "fifo");
    assert_int_equal(mkfifo(path, 0600), 0);
    expect(&g, "read", "{\"path\":\"fifo\"}", "error: fifo is a FIFO, not a file");
    expect(&g, "edit", "{\"path\":\"fifo\",\"old\":\"a\",\"new\":\"b\"}", "error: fifo is a FIFO, not a file");
    expect(&g, "write", "{\"path\":\"fifo\",\"content\":\"x\"}", "error: fifo is a link to nothing or no regular file; it is left alone");
    expect(&g, "grep", "{\"pattern\":\"x\",\"path\":\"fifo\"}", "error: fifo is not a regular file");
    expect(&g, "grep", "{\"pattern\":\"nowhere to be found\"}", "No matches found");
    expect(&g, "read", "{\"path\":\"src\"}", "error: src is a directory, not a file");
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    char here[1100];
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(g.ws), 0);
    snprintf(un.sun_path, sizeof un.sun_path, "sock");
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&un, sizeof un), 0);
    assert_int_equal(chdir(here), 0);
    expect(&g, "read", "{\"path\":\"sock\"}", "error: sock is not a regular file");
    close(fd);
}

/* ---- S02, S03, S06, Q73: nothing leaves the workspace -------------------------------------------------------------------- */

static void expect_outside(const char *path) {
    char args[2400], want[1300];
    snprintf(want, sizeof want, "error: %s is outside the workspace", path);
    snprintf(args, sizeof args, "{\"path\":\"%s\"}", path);
    expect(&g, "read", args, want);
    snprintf(args, sizeof args, "{\"path\":\"%s\",\"content\":\"x\"}", path);
    expect(&g, "write", args, want);
    snprintf(args, sizeof args, "{\"path\":\"%s\",\"old\":\"secret\",\"new\":\"x\"}", path);
    expect(&g, "edit", args, want);
    snprintf(args, sizeof args, "{\"pattern\":\"secret\",\"path\":\"%s\"}", path);
    expect(&g, "grep", args, want);
}

static void s03_paths_that_lead_out_are_refused(void **state) {
    (void)state;
    char path[1200];
    snprintf(path, sizeof path, "%s/x", g.outside); /* its name has the workspace's as a prefix */
    expect_outside(path);
    snprintf(path, sizeof path, "%s/../proj-evil/x", g.ws);
    expect_outside(path);
    expect_outside("../proj-evil/x");
    expect_outside("src/../../proj-evil/x");
    expect_outside("/etc/hostname");
    char *text = rig_get(g.outside, "x");
    assert_string_equal(text, "secret\n");
    free(text);
}

static void s02_links_that_lead_out_are_refused(void **state) {
    (void)state;
    char link[1100], target[1200];
    path_of(link, "link");
    snprintf(target, sizeof target, "%s/x", g.outside);
    assert_int_equal(symlink(target, link), 0);
    expect_outside("link");
    path_of(link, "linkdir");
    assert_int_equal(symlink(g.outside, link), 0);
    expect_outside("linkdir/x");
    path_of(link, "rel");
    assert_int_equal(symlink("../proj-evil/x", link), 0);
    expect_outside("rel");
    path_of(link, "magic");
    assert_int_equal(symlink("/proc/self/cwd", link), 0);
    expect_outside("magic");
    expect(&g, "write", "{\"path\":\"linkdir/new\",\"content\":\"x\"}", "error: linkdir/new is outside the workspace");
    expect(&g, "write", "{\"path\":\"linkdir/deep/new\",\"content\":\"x\"}", "error: linkdir/deep/new is outside the workspace");
    expect(&g, "grep", "{\"pattern\":\"secret\"}", "No matches found"); /* the walk does not follow either */
    snprintf(target, sizeof target, "%s/new", g.outside);
    assert_false(dm_path_exists(target));
}

static void a_link_to_nothing_outside_is_not_written_through(void **state) {
    (void)state;
    char link[1100], target[1200];
    path_of(link, "dangling");
    snprintf(target, sizeof target, "%s/fresh", g.outside);
    assert_int_equal(symlink(target, link), 0);
    expect(&g, "write", "{\"path\":\"dangling\",\"content\":\"x\"}", "error: dangling is outside the workspace");
    assert_false(dm_path_exists(target));
    path_of(link, "dangling2");
    assert_int_equal(symlink("nowhere", link), 0);
    expect(&g, "write", "{\"path\":\"dangling2\",\"content\":\"x\"}", "error: dangling2 is a link to nothing or no regular file; it is left alone");
}

static void links_that_stay_inside_work_absolute_ones_too(void **state) {
    (void)state;
    char link[1100], target[1200];
    path_of(link, "rel");
    assert_int_equal(symlink("notes/../src", link), 0);
    expect(&g, "read", "{\"path\":\"rel/tides.c\",\"limit\":1}", "int high_water = 3;");
    path_of(link, "abs");
    snprintf(target, sizeof target, "%s/src", g.ws);
    assert_int_equal(symlink(target, link), 0);
    expect(&g, "read", "{\"path\":\"abs/tides.c\",\"limit\":1}", "int high_water = 3;");
    expect(&g, "write", "{\"path\":\"abs/new.c\",\"content\":\"x\"}", "Wrote 1 bytes to abs/new.c");
    expect(&g, "read", "{\"path\":\"src/new.c\"}", "x");
    path_of(link, "two");
    snprintf(target, sizeof target, "%s/abs", g.ws);
    assert_int_equal(symlink(target, link), 0);
    expect(&g, "read", "{\"path\":\"two/new.c\"}", "x");
    /* A link to a file stays a link; the file that it names is written. */
    path_of(link, "file");
    snprintf(target, sizeof target, "%s/README.md", g.ws);
    assert_int_equal(symlink(target, link), 0);
    expect(&g, "write", "{\"path\":\"file\",\"content\":\"through\"}", "Wrote 7 bytes to file");
    expect(&g, "read", "{\"path\":\"README.md\"}", "through");
    struct stat st;
    assert_int_equal(lstat(link, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    path_of(link, "loop");
    snprintf(target, sizeof target, "%s/loop", g.ws);
    assert_int_equal(symlink(target, link), 0);
    expect(&g, "read", "{\"path\":\"loop\"}", "error: loop goes through too many symbolic links");
}

static void absolute_paths_inside_are_welcome(void **state) {
    (void)state;
    char args[1300];
    snprintf(args, sizeof args, "{\"path\":\"%s/README.md\"}", g.ws);
    expect(&g, "read", args, "hello");
}

static void s06_a_path_is_only_a_name(void **state) {
    (void)state;
    expect(&g, "read", "{\"path\":\"'; touch /tmp/pwn; '\"}", "error: no such file: '; touch /tmp/pwn; '");
    expect(&g, "write", "{\"path\":\"$(touch pwn)\",\"content\":\"x\"}", "Wrote 1 bytes to $(touch pwn)");
    expect(&g, "read", "{\"path\":\"$(touch pwn)\"}", "x");
    expect(&g, "read", "{\"path\":\"a\\u001b[31mb\"}", "error: no such file: ab");
}

static void q73_hard_links_to_outside_are_not_written_through(void **state) {
    (void)state;
    char name[1100], target[1200];
    path_of(name, "hard");
    snprintf(target, sizeof target, "%s/x", g.outside);
    assert_int_equal(link(target, name), 0);
    expect(&g, "write", "{\"path\":\"hard\",\"content\":\"mine\"}", "Wrote 4 bytes to hard");
    char *text = rig_get(g.outside, "x");
    assert_string_equal(text, "secret\n");
    free(text);
}

static void q75_names_that_others_obey_are_refused(void **state) {
    (void)state;
    static const char *const names[] = {".git/hooks/pre-commit", ".git/config",      ".GIT/Config",         ".git/info/attributes", "sub/.git/hooks/x",
                                        ".mcp.json",             ".vscode/tasks.json", ".idea/workspace.xml", ".dormouse/plugins.json", "src/../.mcp.json",
                                        "gitlink/hooks/x",       ".git"};
    char args[256], want[256], link[1100];
    test_put(g.ws, ".git/HEAD", "ref: refs/heads/main\n");
    path_of(link, "gitlink");
    assert_int_equal(symlink(".git", link), 0);
    for (size_t i = 0; i < DM_COUNT(names) - 1; i++) {
        snprintf(args, sizeof args, "{\"path\":\"%s\",\"content\":\"x\"}", names[i]);
        snprintf(want, sizeof want, "error: %s is protected and cannot be changed by tools", names[i]);
        expect(&g, "write", args, want);
    }
    expect(&g, "edit", "{\"path\":\".git/HEAD\",\"old\":\"main\",\"new\":\"evil\"}", "error: .git/HEAD is protected and cannot be changed by tools");
    expect(&g, "read", "{\"path\":\".git/HEAD\"}", "ref: refs/heads/main");
    expect(&g, "glob", "{\"pattern\":\".*\"}", "No files found");
    expect(&g, "write", "{\"path\":\"AGENTS.md\",\"content\":\"x\"}", "Wrote 1 bytes to AGENTS.md");
    expect(&g, "write", "{\"path\":\".gitignore\",\"content\":\"x\"}", "Wrote 1 bytes to .gitignore");
}

/* ---- the racer: a link swapped between check and use --------------------------------------------------------------------- */

static atomic_bool racing;

static void racer(void *arg) {
    char a[1200], b[1200];
    snprintf(a, sizeof a, "%s/race", (char *)arg);
    snprintf(b, sizeof b, "%s/race.real", (char *)arg);
    const int n = test_full() ? 100000 : 20000;
    for (int i = 0; i < n && atomic_load(&racing); i++) {
        char tmp[1200];
        snprintf(tmp, sizeof tmp, "%s/race.tmp", (char *)arg);
        (void)symlink(i % 2 ? "/etc" : b, tmp);
        (void)rename(tmp, a);
    }
    atomic_store(&racing, false);
}

static void a_swapped_link_never_leads_out(void **state) {
    (void)state;
    uv_thread_t thread;
    test_put(g.ws, "race.real/hostname", "inside\n");
    atomic_store(&racing, true);
    assert_int_equal(uv_thread_create(&thread, racer, g.ws), 0);
    int good = 0;
    while (atomic_load(&racing)) {
        call c;
        call_run(&g, &c, "read", "{\"path\":\"race/hostname\"}");
        if (!c.r.is_error) {
            assert_string_equal(c.r.text, "inside");
            good++;
        }
        call_free(&c);
        call_run(&g, &c, "write", "{\"path\":\"race/dm-race-proof\",\"content\":\"x\"}");
        call_free(&c);
        assert_false(dm_path_exists("/etc/dm-race-proof"));
    }
    uv_thread_join(&thread);
    print_message("# %d reads came through\n", good);
}

/* The state directory may lie in the workspace: nothing in it is read, listed, found, written or replaced, by any spelling. */
static void what_is_hidden_is_neither_seen_nor_changed(void **state) {
    (void)state;
    static const struct { const char *tool, *args; } tries[] = {
        {"read", "{\"path\": \"state/journal/data\"}"}, {"read", "{\"path\": \"./x/../state//journal/data\"}"}, {"read", "{\"path\": \"in/journal/data\"}"},
        {"write", "{\"path\": \"state/journal/data\", \"content\": \"x\"}"}, {"write", "{\"path\": \"state/new\", \"content\": \"x\"}"},
        {"write", "{\"path\": \"in/new/deep\", \"content\": \"x\"}"}, {"edit", "{\"path\": \"state/journal/data\", \"old\": \"secret\", \"new\": \"x\"}"},
        {"grep", "{\"pattern\": \"secret\"}"}, {"grep", "{\"pattern\": \"secret\", \"path\": \"state\"}"}, {"glob", "{\"pattern\": \"**/data\"}"}, {"glob", "{\"pattern\": \"state/*\"}"},
    };
    rig own;
    dm_err e;
    char path[700];
    rig_open(&own, -1, NULL);
    test_put(own.ws, "state/journal/data", "secret\n");
    test_put(own.ws, "x/seen", "secret\n");
    snprintf(path, sizeof path, "%s/in", own.ws);
    assert_int_equal(symlink("state", path), 0);
    snprintf(path, sizeof path, "%s/state", own.ws);
    dm_tools *all = own.tools;
    const dm_tools_opts o = {.loop = &own.loop, .workspace = own.ws, .hide = path};
    assert_ok_e(dm_tools_create(&own.tools, &o, &e), e);
    assert_ok_e(dm_tools_add_defaults(own.tools, &e), e);
    for (size_t i = 0; i < DM_COUNT(tries); i++) {
        call c = {0};
        json_t *checked = NULL;
        char *text = NULL;
        if (dm_tools_check(own.tools, tries[i].tool, tries[i].args, &checked, &text, &e) < 0) fail_msg("%s %s: %s", tries[i].tool, tries[i].args, text ? text : e.text);
        json_decref(checked);
        call_run(&own, &c, tries[i].tool, tries[i].args);
        if (strstr(c.r.text, "state/journal") && !c.r.is_error) fail_msg("%s %s: %s", tries[i].tool, tries[i].args, c.r.text);
        if (strcmp(tries[i].tool, "grep") != 0 && strcmp(tries[i].tool, "glob") != 0) assert_true(c.r.is_error);
        if (i == 7) assert_non_null(strstr(c.r.text, "x/seen"));
        call_free(&c);
    }
    char *kept = rig_get(own.ws, "state/journal/data"), *made = rig_get(own.ws, "state/new");
    assert_string_equal(kept, "secret\n");
    assert_null(made);
    dm_free(kept);
    dm_tools_destroy(own.tools);
    own.tools = all;
    rig_close(&own);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(read_gives_the_lines_as_they_are),
        T(a_missing_file_is_named),
        T(write_makes_directories_and_says_how_much),
        T(write_keeps_the_mode_and_leaves_no_temporary_file),
        T(a_write_that_fails_leaves_the_old_content),
        T(edit_replaces_one_place),
        T(edit_wants_one_place_or_all),
        T(edit_keeps_crlf_files_crlf),
        T(glob_lists_sorted_paths),
        T(hidden_files_are_listed_only_when_asked_for),
        T(grep_shows_path_line_text),
        T(grep_skips_binary_files_and_shortens_long_lines),
        T(a_pattern_that_explodes_is_stopped),
        T(long_results_are_bounded_and_say_so),
        T(a_binary_file_is_refused_with_its_size),
        T(file_text_is_mended_for_the_model),
        T(q16_only_regular_files_are_opened),
        T(s03_paths_that_lead_out_are_refused),
        T(s02_links_that_lead_out_are_refused),
        T(a_link_to_nothing_outside_is_not_written_through),
        T(links_that_stay_inside_work_absolute_ones_too),
        T(absolute_paths_inside_are_welcome),
        T(s06_a_path_is_only_a_name),
        T(q73_hard_links_to_outside_are_not_written_through),
        T(q75_names_that_others_obey_are_refused),
        T(a_swapped_link_never_leads_out),
        cmocka_unit_test(what_is_hidden_is_neither_seen_nor_changed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
