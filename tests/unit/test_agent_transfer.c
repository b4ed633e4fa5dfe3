/* Exports as bytes, the journal that takes a session in, addresses, and the answer on a connection. */
#include "testlib.h"

#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent/transfer.h"

static const char sid[] = "01ARZ3NDEKTSV4RRFFQ69G5FAV";

/* ---- bytes ----------------------------------------------------------------------------------------------- */

typedef struct source { const uint8_t *p; size_t n; } source;

static int64_t from_memory(void *ctx, void *p, size_t n, dm_err *e)
{
    source *s = ctx;
    size_t got = n < s->n ? n : s->n;
    (void)e;
    if (got) memcpy(p, s->p, got);
    s->p += got;
    s->n -= got;
    return (int64_t)got;
}

static int to_memory(void *ctx, const void *p, size_t n, dm_err *e)
{
    (void)e;
    return dm_buf_append(ctx, p, n);
}

static xfer_head small_head(void)
{
    xfer_head h = { .block_bytes = 50, .events = 2, .tokens = 600 };
    memset(h.root.b, 1, 32);
    memset(h.weights.b, 2, 32);
    memset(h.tokenizer.b, 3, 32);
    memcpy(h.session, sid, sizeof sid);
    snprintf(h.numerics, sizeof h.numerics, "fast/test");
    return h;
}

static void write_small(dm_buf *out)
{
    uint8_t block[50] = { 9 };
    xfer_head h = small_head();
    xfer_writer w;
    assert_ok(xfer_write_head(&w, to_memory, out, &h, NULL));
    assert_ok(xfer_write_record(&w, XFER_EVENT, 1, "{\"a\":1}", 7, NULL));
    assert_ok(xfer_write_record(&w, XFER_EVENT, 2, "{\"b\":2}", 7, NULL));
    assert_ok(xfer_write_record(&w, XFER_BLOCK, 0, block, sizeof block, NULL));
    assert_ok(xfer_write_record(&w, XFER_BLOCK, 1, block, sizeof block, NULL));
    assert_ok(xfer_write_record(&w, XFER_STATE, 512, "s", 1, NULL));
    assert_ok(xfer_write_record(&w, XFER_STATE, 600, NULL, 0, NULL));
    assert_ok(xfer_write_end(&w, NULL));
}

/* 0: whole and nothing behind it. */
static int read_small(const uint8_t *p, size_t n, int *records, dm_err *e)
{
    source s = { p, n };
    xfer_reader r;
    *records = 0;
    int rc = xfer_reader_begin(&r, from_memory, &s, e);
    while (rc == 0 && (rc = xfer_reader_next(&r, e)) == 1) rc = 0, ++*records, assert_true(*records < 10);
    xfer_reader_free(&r);
    return rc == 0 && s.n ? DM_ELIMIT : rc;
}

static void what_is_written_is_read(void **state)
{
    (void)state;
    dm_buf b = { 0 };
    dm_err e = { 0 };
    int records;
    write_small(&b);
    assert_ok_e(read_small(b.p, b.n, &records, &e), e);
    assert_int_equal(records, 6);
    source s = { b.p, b.n };
    xfer_reader r;
    xfer_head h = small_head();
    assert_ok_e(xfer_reader_begin(&r, from_memory, &s, &e), e);
    assert_memory_equal(&r.head, &h, sizeof h);
    assert_int_equal(xfer_reader_next(&r, &e), 1);
    assert_string_equal((char *)r.payload.p, "{\"a\":1}");
    xfer_reader_free(&r);
    dm_buf_free(&b);
}

static void every_cut_is_told(void **state)
{
    (void)state;
    dm_buf b = { 0 };
    write_small(&b);
    for (size_t n = 0; n < b.n; n++) {
        dm_err e = { 0 };
        int records, rc = read_small(b.p, n, &records, &e);
        if (rc != (n < 8 ? DM_EFORMAT : DM_ECORRUPT)) fail_msg("cut at %zu: %s", n, dm_err_name(rc));
        assert_true(e.text[0]);
    }
    dm_buf_free(&b);
}

static void every_flipped_bit_is_told(void **state)
{
    (void)state;
    dm_buf b = { 0 };
    write_small(&b);
    for (size_t bit = 0; bit < b.n * 8; bit++) {
        dm_err e = { 0 };
        int records;
        b.p[bit / 8] ^= (uint8_t)(1u << bit % 8);
        int rc = read_small(b.p, b.n, &records, &e);
        if (rc != DM_ECORRUPT && rc != DM_EFORMAT && rc != DM_EVERSION) fail_msg("bit %zu: %s", bit, dm_err_name(rc));
        b.p[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    dm_buf_free(&b);
}

static void a_writer_keeps_to_what_readers_take(void **state)
{
    (void)state;
    dm_buf b = { 0 };
    dm_err e = { 0 };
    xfer_writer w;
    xfer_head h = small_head();
    char *big = calloc(1, XFER_EVENT_BYTES_MAX + 1);
    assert_non_null(big);
    assert_ok(xfer_write_head(&w, to_memory, &b, &h, &e));
    assert_err(DM_ELIMIT, xfer_write_record(&w, XFER_EVENT, 1, big, XFER_EVENT_BYTES_MAX + 1, &e));
    free(big);
    dm_buf_free(&b);
}

/* ---- the journal --------------------------------------------------------------------------------------------- */

typedef struct given { const char *const *text; int64_t n, asked, big; char *filler; } given;

static int row(void *ctx, int64_t seq, const char **text, size_t *bytes, dm_err *e)
{
    given *g = ctx;
    (void)e;
    assert_in_range(seq, 1, g->n);
    g->asked++;
    *text = g->filler && seq == g->big ? g->filler : g->text[seq - 1];
    *bytes = strlen(*text);
    return 0;
}

static int adopt(dm_journal *j, const char *const *text, int64_t n, bool only, int64_t *added, dm_err *e)
{
    given g = { .text = text, .n = n };
    dm_journal_rows rows = { .n = n, .bytes = 1000, .row = row, .ctx = &g };
    *e = (dm_err){ 0 };
    return dm_journal_adopt(j, sid, &rows, only, added, e);
}

static int count_event(void *ctx, int64_t seq, const json_t *event)
{
    (void)event;
    *(int64_t *)ctx = seq;
    return 0;
}

static int64_t events_of(dm_journal *j)
{
    int64_t n = 0;
    dm_err e;
    int rc = dm_journal_read(j, sid, count_event, &n, &e);
    if (rc == DM_ENOENT) return 0;
    assert_ok_e(rc, e);
    return n;
}

static dm_journal *open_journal(const char *name)
{
    char dir[700];
    dm_journal *j;
    dm_err e;
    snprintf(dir, sizeof dir, "%s/%s", test_dir(), name);
    assert_ok_e(dm_journal_open(&j, dir, false, &e), e);
    return j;
}

static int same_head(void *ctx, const json_t *head)
{
    json_t **first = ctx;
    if (!*first) *first = json_deep_copy(head);
    else assert_true(json_equal(*first, head));
    return 0;
}

static const char *const session_text[] = {
    "{\"type\":\"created\",\"model\":\"m\",\"workspace\":\"/w\",\"t\":1}", "{\"type\":\"message\",\"text\":\"hello\",\"t\":2}",
    "{\"type\":\"tokens\",\"what\":\"prompt\",\"ids\":[1,2],\"t\":3}",      "{\"type\":\"tokens\",\"what\":\"reply\",\"ids\":[3],\"t\":4}",
};
static const char *const other_text[] = { "{\"type\":\"created\",\"model\":\"m\",\"workspace\":\"/w\",\"t\":1}", "{\"type\":\"message\",\"text\":\"good bye\",\"t\":2}" };

static void a_session_is_taken_in_and_brought_forward(void **state)
{
    (void)state;
    dm_journal *j = open_journal("adopt"), *k = open_journal("append");
    int64_t added;
    dm_err e;
    assert_ok_e(adopt(j, session_text, 4, true, &added, &e), e);
    assert_int_equal(added, 4);
    assert_int_equal(events_of(j), 0);
    assert_ok_e(adopt(j, session_text, 2, false, &added, &e), e);
    assert_int_equal(added, 2);
    assert_ok_e(adopt(j, session_text, 4, false, &added, &e), e);
    assert_int_equal(added, 2);
    assert_ok_e(adopt(j, session_text, 4, false, &added, &e), e);
    assert_int_equal(added, 0);
    assert_int_equal(events_of(j), 4);
    assert_err(DM_EEXIST, adopt(j, session_text, 3, false, &added, &e)); /* it has gone on */
    assert_err(DM_EEXIST, adopt(j, other_text, 2, false, &added, &e));   /* it went another way */
    assert_err(DM_EEXIST, adopt(j, other_text, 2, true, &added, &e));
    assert_int_equal(events_of(j), 4);
    for (int i = 0; i < 4; i++) { /* listed as if it had been run here */
        json_t *ev = json_loads(session_text[i], 0, NULL);
        assert_ok_e(dm_journal_append(k, sid, &ev, 1, NULL, &e), e);
        json_decref(ev);
    }
    json_t *head = NULL;
    assert_ok_e(dm_journal_list(k, same_head, &head, &e), e);
    assert_ok_e(dm_journal_list(j, same_head, &head, &e), e);
    assert_int_equal(json_integer_value(json_object_get(head, "tokens")), 3);
    json_decref(head);
    dm_journal_close(j);
    dm_journal_close(k);
}

static void taking_in_is_all_or_nothing(void **state)
{
    (void)state;
    static const char *const broken[] = { "{\"type\":\"created\",\"t\":1}", "{\"type\":\"mess" }, *const no_type[] = { "{\"type\":\"created\",\"t\":1}", "{}" };
    dm_journal *j = open_journal("all");
    int64_t added;
    dm_err e;
    assert_err(DM_EFORMAT, adopt(j, broken, 2, false, &added, &e));
    assert_err(DM_EFORMAT, adopt(j, no_type, 2, false, &added, &e));
    assert_int_equal(events_of(j), 0);
    assert_ok(dm_fault_arm("journal.commit=fail", &e));
    assert_true(adopt(j, session_text, 4, false, &added, &e) < 0);
    assert_ok(dm_fault_arm(NULL, &e));
    assert_int_equal(events_of(j), 0);
    assert_ok_e(adopt(j, session_text, 4, false, &added, &e), e);
    assert_int_equal(events_of(j), 4);
    dm_journal_close(j);
}

/* More than the journal's address space: it is made larger, and the events are asked for again. */
static void a_large_session_is_taken_in(void **state)
{
    (void)state;
    dm_journal *j = open_journal("large");
    size_t n = (size_t)40 << 20;
    char *filler = malloc(n + 1);
    assert_non_null(filler);
    int at = snprintf(filler, n, "{\"type\":\"message\",\"t\":2,\"text\":\"");
    memset(filler + at, 'x', n - (size_t)at - 2);
    memcpy(filler + n - 2, "\"}", 3);
    given g = { .text = session_text, .n = 4, .filler = filler, .big = 2 };
    dm_journal_rows rows = { .n = 4, .bytes = (int64_t)n + 1000, .row = row, .ctx = &g };
    int64_t added;
    dm_err e = { 0 };
    assert_ok_e(dm_journal_adopt(j, sid, &rows, false, &added, &e), e);
    assert_true(g.asked > 4);
    assert_int_equal(added, 4);
    assert_int_equal(events_of(j), 4);
    dm_journal_close(j);
    free(filler);
}

/* ---- addresses and answers -------------------------------------------------------------------------------------- */

static void addresses(void **state)
{
    (void)state;
    static const struct { const char *text, *host, *port, *path; } good[] = {
        { "localhost:80", "localhost", "80", "" }, { "127.0.0.1:0", "127.0.0.1", "0", "" },     { ":4000", "127.0.0.1", "4000", "" },
        { "[::1]:65535", "::1", "65535", "" },     { "unix:/run/x:1", "", "", "/run/x:1" },    { "unix:rel", "", "", "rel" },
    };
    static const char *const wrong[] = { "", "localhost", "localhost:", "localhost:x", "a:65536", "a:-1", "a:+1", "::1:80", "unix:", "a:80x", "1:2:3" };
    net_addr a;
    dm_err e;
    for (size_t i = 0; i < DM_COUNT(good); i++) {
        assert_ok_e(net_parse(&a, good[i].text, &e), e);
        assert_string_equal(a.host, good[i].host);
        assert_string_equal(a.port, good[i].port);
        assert_string_equal(a.path, good[i].path);
    }
    for (size_t i = 0; i < DM_COUNT(wrong); i++)
        if (net_parse(&a, wrong[i], &e) != DM_EUSAGE) fail_msg("\"%s\" is taken as an address", wrong[i]);
    char longer[400];
    memset(longer, 'p', sizeof longer);
    memcpy(longer, "unix:", 5);
    longer[sizeof longer - 1] = 0;
    assert_err(DM_EUSAGE, net_parse(&a, longer, &e));
    longer[5 + sizeof a.path] = 0;
    assert_err(DM_EUSAGE, net_parse(&a, longer, &e));
}

static void other_machines_only_on_request(void **state)
{
    (void)state;
    net n = { .timeout_ms = 1000 };
    net_addr a;
    char name[320];
    dm_err e;
    assert_ok(net_parse(&a, "0.0.0.0:0", &e));
    assert_err(DM_EUSAGE, net_listen(&n, &a, false, name, &e));
    assert_err(DM_EUSAGE, net_connect(&n, &a, false, &e));
    assert_ok_e(net_listen(&n, &a, true, name, &e), e);
    net_unlisten(&n, &a);
}

/* What net_answered makes of these bytes. */
static int answered(const char *bytes, bool *lost, dm_err *e)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    net n = { .fd = pair[0], .timeout_ms = 5000 };
    *e = (dm_err){ 0 };
    assert_int_equal(write(pair[1], bytes, strlen(bytes)), (ssize_t)strlen(bytes));
    close(pair[1]);
    int rc = net_answered(&n, lost, e);
    close(pair[0]);
    return rc;
}

static void answers(void **state)
{
    (void)state;
    bool lost;
    dm_err e;
    assert_ok(answered("+\n", &lost, &e));
    assert_false(lost);
    assert_ok(answered("....+\n", &lost, &e));
    assert_err(DM_EEXIST, answered("..-17 it is here\n", &lost, &e));
    assert_false(lost);
    assert_string_equal(e.text, "the receiver refused: it is here");
    assert_err(DM_EEXIST, answered("-17 a\033[2Jb\n", &lost, &e)); /* nothing that steers a terminal */
    assert_null(strchr(e.text, '\033'));
    static const char *const cut[] = { "", ".", "...", "+", "-17 it" };
    for (size_t i = 0; i < DM_COUNT(cut); i++) {
        assert_err(DM_EPIPE, answered(cut[i], &lost, &e));
        assert_true(lost);
    }
    static const char *const strange[] = { "HTTP/1.1 400\n", "-\n", "-x y\n", "-0 fine\n", "-17\n", "++\n", "-99999999999999999999 x\n", "-17 \xff\n" };
    for (size_t i = 0; i < DM_COUNT(strange); i++) {
        int rc = answered(strange[i], &lost, &e);
        if (rc != DM_EFORMAT) fail_msg("\"%s\" is taken as an answer: %s", strange[i], dm_err_name(rc));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read),
        cmocka_unit_test(every_cut_is_told),
        cmocka_unit_test(every_flipped_bit_is_told),
        cmocka_unit_test(a_writer_keeps_to_what_readers_take),
        cmocka_unit_test(a_session_is_taken_in_and_brought_forward),
        cmocka_unit_test(taking_in_is_all_or_nothing),
        cmocka_unit_test(a_large_session_is_taken_in),
        cmocka_unit_test(addresses),
        cmocka_unit_test(other_machines_only_on_request),
        cmocka_unit_test(answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
