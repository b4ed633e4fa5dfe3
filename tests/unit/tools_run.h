/* Runs calls of a registry to their end, for the tests of tools/. */
#ifndef TESTS_TOOLS_RUN_H
#define TESTS_TOOLS_RUN_H

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/lib/testlib.h"
#include "tools/tools.h"

typedef struct rig {
    uv_loop_t loop;
    dm_sandbox *sandbox;
    dm_tools *tools;
    char ws[512], spill[512], outside[512];
} rig;

static inline char *rig_get(const char *dir, const char *name) {
    char path[1200];
    dm_buf b = {0};
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (dm_file_read(path, 1 << 24, &b, NULL) < 0) {
        dm_buf_free(&b);
        return NULL;
    }
    if (!b.p) assert_ok(dm_buf_str(&b, ""));
    return (char *)b.p;
}

/* level < 0: no sandbox. */
static inline void rig_open(rig *g, int level, const dm_tools_opts *more) {
    static int n;
    dm_err e = {0};
    memset(g, 0, sizeof *g);
    snprintf(g->ws, sizeof g->ws, "%s/%d/proj", test_dir(), n);
    snprintf(g->outside, sizeof g->outside, "%s/%d/proj-evil", test_dir(), n);
    snprintf(g->spill, sizeof g->spill, "%s/%d/spill", test_dir(), n++);
    assert_ok_e(dm_mkdirs(g->ws, 0755, &e), e);
    assert_ok_e(dm_mkdirs(g->outside, 0755, &e), e);
    assert_ok_e(dm_mkdirs(g->spill, 0755, &e), e);
    if (level >= 0) {
        const char *const hide[] = {g->spill, NULL};
        const dm_sandbox_opts so = {.launcher = test_launcher(), .level = (dm_sandbox_level)level, .hide = hide};
        assert_ok_e(dm_sandbox_start(&g->sandbox, &so, &e), e);
    }
    assert_int_equal(uv_loop_init(&g->loop), 0);
    dm_tools_opts o = more ? *more : (dm_tools_opts){0};
    o.loop = &g->loop;
    o.sandbox = g->sandbox;
    o.workspace = g->ws;
    if (!o.spill_dir) o.spill_dir = g->spill;
    assert_ok_e(dm_tools_create(&g->tools, &o, &e), e);
    assert_ok_e(dm_tools_add_defaults(g->tools, &e), e);
}

static inline void rig_close(rig *g) {
    dm_tools_destroy(g->tools);
    uv_run(&g->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&g->loop), 0);
    dm_sandbox_stop(g->sandbox);
}

typedef struct call {
    dm_tool_result r;
    int done;      /* how often done() came */
    int order;     /* of completion */
    dm_tool_run *run;
} call;

static int call_clock;

static inline void call_done(void *ctx, dm_tool_result *r) {
    call *c = ctx;
    c->r = *r;
    c->done++;
    c->order = ++call_clock;
}

static inline void call_start(rig *g, call *c, const char *name, const char *args) {
    dm_err e = {0};
    json_t *checked = NULL;
    char *text = NULL;
    *c = (call){0};
    args = test_marked(args);
    if (dm_tools_check(g->tools, name, args, &checked, &text, &e) < 0) fail_msg("%s %s: %s", name, args, text ? text : e.text);
    assert_ok_e(dm_tools_start(g->tools, name, checked, call_done, c, &c->run, &e), e);
    json_decref(checked);
}

static inline void call_wait(rig *g, call *c) {
    while (!c->done && uv_run(&g->loop, UV_RUN_ONCE)) continue;
    assert_int_equal(c->done, 1);
    assert_non_null(c->r.text);
    assert_int_equal(strlen(c->r.text), c->r.text_bytes);
    assert_true(dm_utf8_valid(c->r.text, c->r.text_bytes));
}

static inline void call_free(call *c) {
    dm_tool_result_free(&c->r);
    c->done = 0;
}

static inline void call_run(rig *g, call *c, const char *name, const char *args) {
    call_start(g, c, name, args);
    call_wait(g, c);
}

/* args is a printf-less JSON text; the result must be exactly `want`. */
static inline void expect(rig *g, const char *name, const char *args, const char *want) {
    call c;
    call_run(g, &c, name, args);
    assert_string_equal(c.r.text, want);
    assert_int_equal(c.r.is_error, strncmp(want, "error:", 6) == 0);
    call_free(&c);
}

/* The same for bash, where the command needs no JSON escapes by hand. */
static inline void bash_run_text(rig *g, call *c, const char *command) {
    json_t *args = json_pack("{s:s}", "command", command);
    char *text = json_dumps(args, JSON_COMPACT);
    call_run(g, c, "bash", text);
    free(text);
    json_decref(args);
}

static inline void expect_bash(rig *g, const char *command, const char *want) {
    call c;
    bash_run_text(g, &c, command);
    assert_string_equal(c.r.text, want);
    call_free(&c);
}

#endif
