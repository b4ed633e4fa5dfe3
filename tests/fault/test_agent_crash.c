/* kill -9 at each named point of a call's life, then resume: the session is in one of its journaled states, the model
 * sees exactly one of result / interrupted / outcome unknown per call, and no effect happens twice (C3, C4; A08, Q32,
 * Q34, Q35).
 *
 * The runtime that dies is this program started again with arguments: threads and a fork do not go together. */
#include "tests/lib/agent_rig.h"

#include <signal.h>
#include <sys/wait.h>

/* ---- the one that dies ---------------------------------------------------------------------------------- */

typedef struct scene { const char *name, *replies[4]; } scene;

/* `effects` counts what really happened. */
static const scene scenes[] = {
    { "write", { "I do it." CALLS(BASH("echo x >> effects; sleep 0.3; echo did")), "Done.", NULL } },
    { "read", { "I look." CALLS(READ("a.txt")), "Done.", NULL } },
    { "batch", { CALLS(BASH("echo 1 >> effects; echo one") BASH("echo 2 >> effects; echo two") BASH("echo 3 >> effects; sleep 0.3; echo three")), "Done.", NULL } },
    { "two turns", { CALLS(BASH("echo 1 >> effects; echo one")), CALLS(BASH("echo 2 >> effects; sleep 0.3; echo two")), "Done.", NULL } },
};

static const scene *scene_named(const char *name)
{
    for (size_t i = 0; i < DM_COUNT(scenes); i++)
        if (!strcmp(scenes[i].name, name)) return &scenes[i];
    fail_msg("no scene %s", name);
    return NULL;
}

static void load(rig *r, const scene *sc)
{
    for (int i = 0; sc->replies[i]; i++) rig_says(r, sc->replies[i]);
}

static void note_id(rig *r, const dm_host_event *ev)
{
    if (ev->kind == DM_EV_INIT) put_file(r, "id", str_of(ev->json, "session_id"));
}

/* argv: child STATE WS SCENE FAULT */
static int child(char **argv)
{
    rig r = { 0 };
    dm_err e = { 0 };
    snprintf(r.state, sizeof r.state, "%s", argv[2]);
    snprintf(r.ws, sizeof r.ws, "%s", argv[3]);
    rig_open_at(&r, NULL);
    load(&r, scene_named(argv[4]));
    r.on = note_id;
    rig_create(&r, NULL);
    if (dm_fault_arm(argv[5], &e) < 0) return 3;
    rig_send(&r, "Do it.");
    put_file(&r, "finished", "yes");
    rig_close(&r);
    return 0;
}

/* ---- the one that resumes ---------------------------------------------------------------------------------- */

static int run_child(const rig *r, const char *scene_name, const char *fault)
{
    fflush(stdout);
    pid_t pid = fork(); /* and at once exec: nothing of this process is used */
    if (pid == 0) {
        execl("/proc/self/exe", "test_agent_crash", "child", r->state, r->ws, scene_name, fault, (char *)NULL);
        _exit(9);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void crash(rig *r, const char *name, const char *scene_name, const char *fault, char id[DM_SESSION_ID_CHARS + 1])
{
    memset(r, 0, sizeof *r);
    rig_dirs(r, name);
    put_file(r, "a.txt", "alpha");
    int status = run_child(r, scene_name, fault);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) fail_msg("%s at %s: the child was not killed (status %x)", scene_name, fault, status);
    char *text = get_file(r, "id");
    assert_int_equal(strlen(text), DM_SESSION_ID_CHARS);
    memcpy(id, text, DM_SESSION_ID_CHARS + 1);
    dm_free(text);
}

static size_t count_of(const char *text, const char *what)
{
    size_t n = 0;
    for (const char *p = text; (p = strstr(p, what)); p += strlen(what)) n++;
    return n;
}

/* Resumes and checks what must hold for every crash.  The caller frees the timeline's text. */
static char *resume(rig *r, const char *id, const char *scene_name, const json_t **result)
{
    rig_open_at(r, NULL);
    load(r, scene_named(scene_name));
    rig_resume(r, id, NULL);
    *result = rig_send(r, NULL);
    assert_subtype(*result, "success");
    assert_string_equal(str_of(*result, "result"), "Done.");
    assert_int_equal(scripted_count(r->f).refused, 0);
    json_t *list = rig_journal(r, id);
    char *text = journal_text(r, list);
    json_decref(list);
    /* One text per call, whatever happened. */
    assert_int_equal(count_of(text, "<tool_result>"), count_of(text, "<｜DSML｜invoke name=\"bash") + count_of(text, "<｜DSML｜invoke name=\"read"));
    return text;
}

/* Before `started` nothing ran, so the call is run once.  Between `started` and `finished` nobody knows, so it is not
 * run again and the model is told.  After `finished` the result is there. */
static void a_write_happens_once_wherever_it_dies(void **state)
{
    (void)state;
    static const struct { const char *fault; int effects_min, effects_max; bool unknown; } points[] = {
        { "turn.prompt=kill", 1, 1, false },  { "turn.reply=kill", 1, 1, false },   { "call.proposed=kill", 1, 1, false },
        { "call.approved=kill", 1, 1, false }, { "call.started=kill", 0, 0, true },  { "call.running=kill", 0, 1, true },
        { "call.effect=kill", 1, 1, true },   { "call.finished=kill", 1, 1, false }, { "turn.prompt:2=kill", 1, 1, false },
        { "turn.reply:2=kill", 1, 1, false },
    };
    for (size_t i = 0; i < DM_COUNT(points); i++) {
        rig r;
        char id[DM_SESSION_ID_CHARS + 1], name[32];
        const json_t *res;
        snprintf(name, sizeof name, "write%zu", i);
        crash(&r, name, "write", points[i].fault, id);
        char *text = resume(&r, id, "write", &res);
        int effects = lines_of(&r, "effects");
        if (effects < points[i].effects_min || effects > points[i].effects_max) fail_msg("%s: %d effects", points[i].fault, effects);
        if ((strstr(text, "unknown") != NULL) != points[i].unknown) fail_msg("%s: the model read: %s", points[i].fault, text);
        if (!points[i].unknown) assert_non_null(strstr(text, "<tool_result>did</tool_result>"));
        dm_free(text);
        rig_close(&r);
    }
}

static void a_read_is_simply_done_again(void **state)
{
    (void)state;
    static const char *const points[] = { "call.started=kill", "call.running=kill", "call.effect=kill" };
    for (size_t i = 0; i < DM_COUNT(points); i++) {
        rig r;
        char id[DM_SESSION_ID_CHARS + 1], name[32];
        const json_t *res;
        snprintf(name, sizeof name, "read%zu", i);
        crash(&r, name, "read", points[i], id);
        char *text = resume(&r, id, "read", &res);
        assert_non_null(strstr(text, "<tool_result>alpha</tool_result>"));
        assert_null(strstr(text, "unknown"));
        dm_free(text);
        rig_close(&r);
    }
}

/* Q34: the first two have their results and are not run again; the third follows its own rule. */
static void of_a_batch_only_the_open_one_is_in_doubt(void **state)
{
    (void)state;
    static const struct { const char *fault; int effects_min, effects_max; } points[] = {
        { "call.finished:2=kill", 3, 3 }, { "call.started:3=kill", 2, 2 }, { "call.running:3=kill", 2, 3 }, { "call.effect:3=kill", 3, 3 },
    };
    for (size_t i = 0; i < DM_COUNT(points); i++) {
        rig r;
        char id[DM_SESSION_ID_CHARS + 1], name[32];
        const json_t *res;
        snprintf(name, sizeof name, "batch%zu", i);
        crash(&r, name, "batch", points[i].fault, id);
        char *text = resume(&r, id, "batch", &res);
        int effects = lines_of(&r, "effects");
        if (effects < points[i].effects_min || effects > points[i].effects_max) fail_msg("%s: %d effects", points[i].fault, effects);
        assert_non_null(strstr(text, "<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\n<tool_result>"));
        dm_free(text);
        rig_close(&r);
    }
}

static bool answered(rig *r, const char *id)
{
    dm_err e = { 0 };
    rig_open_at(r, NULL);
    rig_resume(r, id, NULL);
    json_t *list = rig_journal(r, id);
    char *text = journal_text(r, list);
    bool yes = strstr(text, "Done.") != NULL;
    if (yes) assert_err(DM_EINVAL, dm_session_send(r->s, NULL, &e));
    dm_free(text);
    json_decref(list);
    rig_close(r);
    return yes;
}

/* A crash between any two commits of the journal leaves a session that can be resumed. */
static void a_crash_at_any_commit_can_be_resumed(void **state)
{
    (void)state;
    int killed = 0;
    for (int n = 1; n <= 40; n++) {
        rig r;
        char name[32], fault[32], id[DM_SESSION_ID_CHARS + 1];
        const json_t *res;
        snprintf(name, sizeof name, "commit%d", n);
        snprintf(fault, sizeof fault, "journal.commit:%d=kill", n);
        memset(&r, 0, sizeof r);
        rig_dirs(&r, name);
        put_file(&r, "a.txt", "alpha");
        int status = run_child(&r, "two turns", fault);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break; /* it had fewer commits than n: all were tried */
        assert_true(WIFSIGNALED(status));
        killed++;
        char *text = get_file(&r, "id");
        if (!*text) { /* it died before the client knew of the session: nothing was acknowledged */
            dm_free(text);
            continue;
        }
        memcpy(id, text, sizeof id);
        dm_free(text);
        if (answered(&r, id)) continue; /* only the last word was missing: there is nothing to go on with */
        text = resume(&r, id, "two turns", &res);
        assert_true(lines_of(&r, "effects") <= 2);
        dm_free(text);
        rig_close(&r);
    }
    assert_true(killed >= 10 && killed < 40);
}

/* The acceptance case: killed while the tool runs; after the resume the side effect is there once, and what is
 * prefilled is what is new and at most one replay interval. */
static void a_kill_while_the_tool_runs_costs_no_prefill(void **state)
{
    (void)state;
    rig r;
    memset(&r, 0, sizeof r);
    rig_dirs(&r, "acceptance");
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        execl("/proc/self/exe", "test_agent_crash", "child", r.state, r.ws, "two turns", "", (char *)NULL);
        _exit(9);
    }
    /* The second tool has had its effect and sleeps; by then the turn's state is on disk as a rule (the flush runs
     * beside the tool), so we only wait for what the client would see. */
    for (int i = 0; i < 2000 && lines_of(&r, "effects") < 2; i++) usleep(5000);
    assert_int_equal(lines_of(&r, "effects"), 2);
    usleep(200000);
    kill(pid, SIGKILL);
    int status;
    waitpid(pid, &status, 0);
    char *text = get_file(&r, "finished");
    bool finished = *text;
    dm_free(text);
    if (finished) {
        print_message("# the child was faster than the kill\n");
        return;
    }
    char id[DM_SESSION_ID_CHARS + 1];
    text = get_file(&r, "id");
    memcpy(id, text, sizeof id);
    dm_free(text);
    const json_t *res;
    text = resume(&r, id, "two turns", &res);
    assert_int_equal(lines_of(&r, "effects"), 2);
    const json_t *t = turn_of(res, 0);
    assert_true(int_of(t, "prefilled_tokens") <= int_of(t, "new_tokens") + 256);
    assert_string_equal(str_of(t, "restored_from"), "disk");
    dm_free(text);
    rig_close(&r);
}

/* Q36: an approval that was given is not asked for again. */
static void an_approval_survives_the_crash(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    const json_t *res;
    crash(&r, "approved", "write", "call.approved=kill", id);
    rig_open_at(&r, NULL);
    load(&r, scene_named("write"));
    dm_session_opts so = rig_session_opts(&r);
    so.ask = true;
    rig_resume(&r, id, &so);
    res = rig_send(&r, NULL);
    assert_subtype(res, "success");
    assert_int_equal(lines_of(&r, "effects"), 1);
    rig_close(&r);
}

/* A09: a message after the crash is accepted, and the open call has a text. */
static void a_message_after_the_crash_is_accepted(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    crash(&r, "a09", "batch", "call.started:3=kill", id);
    rig_open_at(&r, NULL);
    load(&r, scene_named("batch"));
    rig_resume(&r, id, NULL);
    const json_t *res = rig_send(&r, "Never mind.");
    assert_subtype(res, "success");
    json_t *list = rig_journal(&r, id);
    char *text = journal_text(&r, list);
    assert_int_equal(count_of(text, "<tool_result>"), 3);
    assert_non_null(strstr(text, "Never mind."));
    dm_free(text);
    json_decref(list);
    rig_close(&r);
}

int main(int argc, char **argv)
{
    if (argc == 6 && !strcmp(argv[1], "child")) return child(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_write_happens_once_wherever_it_dies),
        cmocka_unit_test(a_read_is_simply_done_again),
        cmocka_unit_test(of_a_batch_only_the_open_one_is_in_doubt),
        cmocka_unit_test(a_crash_at_any_commit_can_be_resumed),
        cmocka_unit_test(a_kill_while_the_tool_runs_costs_no_prefill),
        cmocka_unit_test(an_approval_survives_the_crash),
        cmocka_unit_test(a_message_after_the_crash_is_accepted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
