/* C1 through the store and across processes: one process runs a sequence and spills its blocks and, at random cuts,
 * its states; other processes open the store, restore at a cut, feed the rest, and must get the uninterrupted run's
 * logits byte for byte.  No thread exists when a process is forked: every child makes its own engine. */
#include "tests/lib/testlib.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/engine.h"
#include "kvstore/kvstore.h"

typedef struct plan {
    char model[600], store[600], answer[600];
    int64_t n;       /* length of the run */
    int64_t cuts[256];
    int ncuts;
    uint64_t seed;
} plan;

typedef struct rig {
    dm_model *m;
    dm_forward *f;
    dm_kv *kv;
    int32_t *ids;
    dm_hash root;
} rig;

static int die(const char *what, const dm_err *e)
{
    fprintf(stderr, "# %s: %s: %s\n", what, e->where, e->text);
    return 1;
}

static int rig_open(rig *r, const plan *p, int threads, int rows_max)
{
    dm_err e = {0};
    *r = (rig){0};
    if (dm_model_open(&r->m, p->model, &e) < 0) return die("model", &e);
    if (dm_forward_create(&r->f, r->m, &(dm_forward_opts){.threads = threads, .rows_max = rows_max}, &e) < 0) return die("forward", &e);
    if (dm_model_fingerprint(r->m, NULL, &r->root, NULL, NULL, &e) < 0) return die("fingerprint", &e);
    if (dm_kv_open(&r->kv, &(dm_kv_opts){.dir = p->store, .root = r->root, .block_bytes = r->f->block_bytes}, &e) < 0) return die("store", &e);
    r->ids = dm_malloc(sizeof(int32_t) * (size_t)p->n);
    if (!r->ids || dm_synth_tokens(r->ids, p->n, p->seed, r->f->vocab, &e) < 0) return die("tokens", &e);
    return 0;
}

static void rig_close(rig *r)
{
    dm_kv_close(r->kv);
    dm_forward_destroy(r->f);
    dm_model_close(r->m);
    dm_free(r->ids);
}

static int feed(rig *r, dm_fseq *s, int64_t to, int chunk, float *logits)
{
    dm_err e = {0};
    for (int64_t pos = r->f->ops->seq_pos(s); pos < to;) {
        int n = (int)(to - pos < chunk ? to - pos : chunk);
        dm_run run = {.seq = s, .ids = r->ids + pos, .n = n, .logits = pos + n == to ? logits : NULL};
        if (r->f->ops->step(r->f, &run, 1, &e) < 0) return die("step", &e);
        pos += n;
    }
    return 0;
}

static void key_at(const rig *r, int64_t blocks, dm_hash *h)
{
    *h = r->root;
    for (int64_t i = 0; i < blocks; i++) dm_kv_chain(h, h, r->ids + i * DM_KV_BLOCK);
}

static int spill_state(rig *r, dm_fseq *s, int64_t pos)
{
    dm_err e = {0};
    dm_buf b = {0};
    dm_hash last;
    key_at(r, pos / DM_KV_BLOCK, &last);
    int tail = (int)(pos % DM_KV_BLOCK);
    if (r->f->ops->state_save(r->f, s, &b, &e) < 0) return die("state_save", &e);
    int rc = dm_kv_put_state(r->kv, &last, r->ids + pos - tail, tail, b.p, b.n, &e);
    dm_buf_free(&b);
    return rc < 0 ? die("put_state", &e) : 0;
}

/* The process that is never interrupted but once per cut, to save: writes the logits of its last row. */
static int writer(const plan *p)
{
    rig r;
    dm_err e = {0};
    dm_fseq *s;
    if (rig_open(&r, p, 2, 0)) return 1;
    if (r.f->ops->seq_create(r.f, &s, &e) < 0) return die("seq", &e);
    float *logits = dm_calloc((size_t)r.f->vocab, sizeof(float));
    for (int i = 0; i < p->ncuts; i++) {
        if (feed(&r, s, p->cuts[i], 64, NULL) || spill_state(&r, s, p->cuts[i])) return 1;
    }
    if (feed(&r, s, p->n, 256, logits)) return 1;
    for (int64_t i = 0; i < p->n / DM_KV_BLOCK; i++) {
        const void *bytes;
        dm_hash key;
        key_at(&r, i + 1, &key);
        if (r.f->ops->block(r.f, s, i, &bytes, &e) < 0 || dm_kv_put_block(r.kv, &key, bytes, r.f->block_bytes, &e) < 0) return die("block", &e);
    }
    if (dm_kv_flush(r.kv, 60000, &e) < 0) return die("flush", &e);
    r.f->ops->seq_destroy(r.f, s);
    /* The answer comes from a run that was cut nowhere. */
    if (r.f->ops->seq_create(r.f, &s, &e) < 0) return die("seq", &e);
    if (feed(&r, s, p->n, 256, logits)) return 1;
    if (dm_file_write_atomic(p->answer, logits, sizeof(float) * (size_t)r.f->vocab, 0600, &e) < 0) return die("answer", &e);
    r.f->ops->seq_destroy(r.f, s);
    dm_free(logits);
    rig_close(&r);
    return 0;
}

static int restore_at(rig *r, const plan *p, int64_t cut, int chunk, const float *want)
{
    dm_err e = {0};
    dm_kv_hit hit;
    dm_fseq *s;
    dm_kv_tier tier;
    if (dm_kv_find(r->kv, r->ids, p->n, cut, &hit, &e) < 0) return die("find", &e);
    if (hit.pos != cut) return fprintf(stderr, "# cut %lld: the store offers %lld\n", (long long)cut, (long long)hit.pos), 1;
    if (r->f->ops->seq_create(r->f, &s, &e) < 0) return die("seq", &e);
    void *block = dm_malloc(r->f->block_bytes);
    dm_buf state = {0};
    for (int64_t i = 0; i < hit.blocks; i++)
        if (dm_kv_read_block(r->kv, &hit, i, block, &tier, &e) < 0 || r->f->ops->block_load(r->f, s, i, block, &e) < 0) return die("block", &e);
    if (dm_kv_read_state(r->kv, &hit, &state, &tier, &e) < 0 || r->f->ops->state_load(r->f, s, state.p, state.n, &e) < 0) return die("state", &e);
    dm_kv_hit_end(r->kv, &hit);
    float *logits = dm_calloc((size_t)r->f->vocab, sizeof(float));
    int rc = feed(r, s, p->n, chunk, logits);
    if (rc == 0 && memcmp(logits, want, sizeof(float) * (size_t)r->f->vocab)) {
        fprintf(stderr, "# cut %lld, chunk %d, seed %llu: logits differ\n", (long long)cut, chunk, (unsigned long long)p->seed);
        rc = 1;
    }
    r->f->ops->seq_destroy(r->f, s);
    dm_free(logits), dm_free(block);
    dm_buf_free(&state);
    return rc;
}

/* A new process: restores at every second cut, with its own thread count and chunk size. */
static int reader(const plan *p, int part)
{
    static const int chunks[] = {1, 7, 64, 256};
    rig r;
    dm_err e = {0};
    dm_buf want = {0};
    if (rig_open(&r, p, 1 + part % 2, 0)) return 1;
    if (dm_file_read(p->answer, 1 << 24, &want, &e) < 0) return die("answer", &e);
    int rc = 0;
    for (int i = part; i < p->ncuts && rc == 0; i += 2) {
        int64_t rest = p->n - p->cuts[i];
        int chunk = chunks[(i / 2) % 4];
        rc = restore_at(&r, p, p->cuts[i], chunk == 1 && rest > 300 ? 7 : chunk, (const float *)(void *)want.p);
    }
    dm_buf_free(&want);
    rig_close(&r);
    return rc;
}

static void in_child(int (*fn)(const plan *, int), const plan *p, int part)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) _exit(fn(p, part));
    int status;
    assert_true(waitpid(pid, &status, 0) == pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) fail_msg("the child failed (status %x)", status);
}
static int writer_part(const plan *p, int part)
{
    (void)part;
    return writer(p);
}
static int synth_part(const plan *p, int part)
{
    (void)part;
    dm_err e = {0};
    return dm_model_synth(test_data("vectors/tiny2.config.json"), p->model, 2, 0, NULL, NULL, &e) < 0 ? die("synth", &e) : 0;
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void run_plan(const char *model, int64_t n, int ncuts, uint64_t seed)
{
    static int serial;
    plan p = {.n = n, .ncuts = 0, .seed = seed};
    snprintf(p.model, sizeof p.model, "%s", model);
    snprintf(p.store, sizeof p.store, "%s/kv%d", test_dir(), serial);
    snprintf(p.answer, sizeof p.answer, "%s/answer%d", test_dir(), serial++);
    for (int i = 0; i < ncuts; i++) p.cuts[i] = 1 + (int64_t)(dm_splitmix64(&seed) % (uint64_t)(n - 1));
    qsort(p.cuts, (size_t)ncuts, sizeof *p.cuts, by_value);
    for (int i = 0; i < ncuts; i++)
        if (!p.ncuts || p.cuts[i] != p.cuts[p.ncuts - 1]) p.cuts[p.ncuts++] = p.cuts[i];
    in_child(writer_part, &p, 0);
    in_child(reader, &p, 0);
    in_child(reader, &p, 1);
}

/* A sanitizer watches the manners of the few cuts that it has time for. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { QUICK_LENGTH = 300, QUICK_CUTS = 4 };
#else
enum { QUICK_LENGTH = 700, QUICK_CUTS = 12 };
#endif

static void a_random_model_resumes_in_another_process_to_the_bit(void **state)
{
    (void)state;
    char model[600];
    plan p = {0};
    snprintf(model, sizeof model, "%s/tiny2", test_dir());
    snprintf(p.model, sizeof p.model, "%s", model);
    in_child(synth_part, &p, 0);
    uint64_t s = test_seed();
    if (test_full())
        for (int i = 0; i < 8; i++) run_plan(model, 300 + (int64_t)(dm_splitmix64(&s) % 1201), 25, dm_splitmix64(&s));
    else run_plan(model, QUICK_LENGTH, QUICK_CUTS, s);
}

static void the_embedded_model_resumes_in_another_process_to_the_bit(void **state)
{
    (void)state;
    run_plan(DM_SOURCE_DIR "/examples/models/tiny", test_full() ? 1500 : QUICK_LENGTH, test_full() ? 40 : QUICK_CUTS, test_seed() + 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_random_model_resumes_in_another_process_to_the_bit),
        cmocka_unit_test(the_embedded_model_resumes_in_another_process_to_the_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
