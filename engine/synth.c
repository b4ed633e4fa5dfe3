/* synth.c — a random checkpoint in the official layout: shards, index, config.json.
 *
 * Everything is written into a fresh directory beside the target, which is renamed into place at the end; a
 * failure (disk full, cancelled) removes it, so a directory under the target's name is always whole.
 * A shard is cut into jobs of about a megabyte; the calling thread and a few more make and write them. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/synth_int.h"

#define WHERE "synth"
#define JOB_BYTES (1 << 20)
#define THREADS_MAX 16

typedef struct item {
    char *name;
    model_dtype dtype;
    int ndim, shard;
    int64_t dim[2], bytes;
    int64_t at;         /* offset of its data in the shard file */
    synth_tensor tensor;
    int64_t scale_of;   /* weight whose scale this is, or −1: such an item makes no job */
} item;

typedef struct checkpoint {
    dm_config config;
    json_t *json;       /* config.json, edited when layers are cut */
    dm_buf config_text;
    uint64_t seed;
    char *dir, *target;
    item *items;        /* in walk order; the scale of items[i] is items[i + 1] */
    size_t nitems, cap;
    int nshards;
    int64_t total, done;
    dm_progress fn;
    void *ctx;
} checkpoint;

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory"); }

/* ---- what to write ------------------------------------------------------------------------------ */

static int collect(void *ctx, model_want *w) {
    checkpoint *k = ctx;
    if (k->nitems == k->cap) {
        size_t cap = k->cap ? 2 * k->cap : 1024;
        item *p = dm_realloc(k->items, cap * sizeof *p);
        if (!p) return DM_ENOMEM;
        k->items = p, k->cap = cap;
    }
    item *it = &k->items[k->nitems];
    memset(it, 0, sizeof *it);
    it->name = dm_strdup(w->name);
    if (!it->name) return DM_ENOMEM;
    it->dtype = w->dtype, it->ndim = w->ndim, it->shard = w->shard;
    it->dim[0] = w->dim[0], it->dim[1] = w->dim[1];
    it->bytes = model_want_bytes(w);
    it->scale_of = k->nitems > 0 && k->items[k->nitems - 1].tensor.quantised ? (int64_t)k->nitems - 1 : -1;
    if (it->scale_of < 0) synth_tensor_init(&it->tensor, w, &k->config, k->seed);
    k->total += it->bytes;
    k->nitems++;
    return 0;
}

static int collect_all(checkpoint *k, dm_err *e) {
    model_table table;
    int rc = model_table_init(&table, &k->config, e);
    if (rc < 0) return rc;
    rc = model_table_walk(&table, &k->config, collect, k);
    model_table_free(&table);
    k->nshards = k->config.num_hidden_layers + 2 + (k->config.num_nextn_predict_layers > 0);
    return rc < 0 ? no_memory(e) : 0;
}

/* Keeps the first n layers; entries of compress_ratios behind the layers stay at the end. */
static int cut_layers(checkpoint *k, int n, dm_err *e) {
    json_t *ratios = json_object_get(k->json, "compress_ratios");
    int L = k->config.num_hidden_layers;
    if (n > L) return dm_err_set(e, DM_EINVAL, WHERE, "%d layers were asked for, but the configuration has %d", n, L);
    for (int i = n; i < L; i++) json_array_remove(ratios, (size_t)n);
    int hash = k->config.num_hash_layers < n ? k->config.num_hash_layers : n;
    if (json_object_set_new(k->json, "num_hidden_layers", json_integer(n)) < 0 || json_object_set_new(k->json, "num_hash_layers", json_integer(hash)) < 0)
        return no_memory(e);
    char *text = json_dumps(k->json, JSON_INDENT(2));
    if (!text) return no_memory(e);
    dm_buf_clear(&k->config_text);
    int rc = dm_buf_str(&k->config_text, text);
    free(text);
    if (rc < 0) return no_memory(e);
    memmove(&k->config.compress_ratio[n], &k->config.compress_ratio[L], (size_t)(k->config.compress_ratio_count - L) * sizeof(int));
    k->config.compress_ratio_count -= L - n;
    k->config.num_hidden_layers = n;
    k->config.num_hash_layers = hash;
    return 0;
}

static int read_config(checkpoint *k, const char *path, int layers, dm_err *e) {
    struct stat st;
    int rc = dm_config_read(&k->config, path, e);
    if (rc < 0) return rc;
    char *file = stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? dm_path_join(path, "config.json") : dm_strdup(path);
    if (!file) return no_memory(e);
    rc = dm_file_read(file, 1 << 20, &k->config_text, e);
    dm_free(file);
    if (rc < 0 || layers <= 0) return rc;
    k->json = json_loadb(dm_buf_cstr(&k->config_text), k->config_text.n, JSON_REJECT_DUPLICATES, NULL);
    return k->json ? cut_layers(k, layers, e) : no_memory(e);
}

/* ---- one shard ------------------------------------------------------------------------------------ */

static int shard_order(const void *a, const void *b) {
    const item *x = *(item *const *)a, *y = *(item *const *)b;
    int sx = model_dtype_size(x->dtype), sy = model_dtype_size(y->dtype);
    return sx != sy ? sy - sx : strcmp(x->name, y->name);
}

static void shard_name(const checkpoint *k, int shard, char out[64]) {
    snprintf(out, 64, "model-%05d-of-%05d.safetensors", shard + 1, k->nshards);
}

/* Header of the shard into out; gives every item its place. */
static int layout(checkpoint *k, int shard, item **order, size_t *count, dm_buf *out) {
    size_t n = 0;
    int64_t at = 0;
    for (size_t i = 0; i < k->nitems; i++)
        if (k->items[i].shard == shard) order[n++] = &k->items[i];
    qsort(order, n, sizeof *order, shard_order);
    static const char opening[] = "\0\0\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"}"; /* 8 bytes for the length */
    int rc = dm_buf_append(out, opening, sizeof opening - 1);
    for (size_t i = 0; i < n && rc >= 0; i++) {
        item *it = order[i];
        rc = dm_buf_printf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", it->name, model_dtype_name(it->dtype), (long long)it->dim[0]);
        if (rc >= 0 && it->ndim > 1) rc = dm_buf_printf(out, ",%lld", (long long)it->dim[1]);
        if (rc >= 0) rc = dm_buf_printf(out, "],\"data_offsets\":[%lld,%lld]}", (long long)at, (long long)(at + it->bytes));
        it->at = at;
        at += it->bytes;
    }
    if (rc >= 0) rc = dm_buf_byte(out, '}');
    while (rc >= 0 && out->n % 8) rc = dm_buf_byte(out, ' ');
    if (rc < 0) return rc;
    for (int i = 0; i < 8; i++) out->p[i] = (uint8_t)((uint64_t)(out->n - 8) >> 8 * i);
    for (size_t i = 0; i < n; i++) order[i]->at += (int64_t)out->n;
    *count = n;
    return 0;
}

typedef struct job { const item *it, *scale; int64_t r0, r1; } job;

typedef struct shard_work {
    checkpoint *k;
    int fd;
    job *jobs;
    size_t njobs;
    int64_t out_bytes, scale_bytes; /* of the largest job */
    atomic_size_t next;
    atomic_llong written;
    atomic_int rc; /* first failure */
} shard_work;

static int write_at(int fd, const uint8_t *p, int64_t n, int64_t at) {
    if (dm_fault("synth.write")) return DM_ENOSPC;
    while (n > 0) {
        ssize_t got = pwrite(fd, p, (size_t)n, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? -errno : DM_EIO;
        p += got, n -= got, at += got;
    }
    return 0;
}

static int64_t job_rows(const synth_tensor *t) {
    int64_t rows = JOB_BYTES / synth_row_bytes(t);
    if (t->quantised && !t->fp4) rows = rows / 128 * 128;
    return rows > 0 ? rows : t->quantised && !t->fp4 ? 128 : 1;
}

static int plan_jobs(shard_work *w, item **order, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        if (order[i]->scale_of < 0) count += (size_t)((order[i]->tensor.out + job_rows(&order[i]->tensor) - 1) / job_rows(&order[i]->tensor));
    w->jobs = dm_malloc((count + 1) * sizeof *w->jobs);
    if (!w->jobs) return DM_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        const item *it = order[i];
        const synth_tensor *t = &it->tensor;
        if (it->scale_of >= 0) continue;
        for (int64_t r = 0, step = job_rows(t); r < t->out; r += step) {
            int64_t r1 = r + step < t->out ? r + step : t->out;
            w->jobs[w->njobs++] = (job){it, t->quantised ? it + 1 : NULL, r, r1};
            int64_t bytes = (r1 - r) * synth_row_bytes(t), scales = synth_scale_bytes(t, r1 - r);
            if (bytes > w->out_bytes) w->out_bytes = bytes;
            if (scales > w->scale_bytes) w->scale_bytes = scales;
        }
    }
    return 0;
}

static int do_job(shard_work *w, const job *j, uint8_t *out, uint8_t *scale) {
    const synth_tensor *t = &j->it->tensor;
    int64_t row = synth_row_bytes(t), bytes = (j->r1 - j->r0) * row, scales = synth_scale_bytes(t, j->r1 - j->r0);
    synth_rows(t, j->r0, j->r1, out, scale);
    int rc = write_at(w->fd, out, bytes, j->it->at + j->r0 * row);
    /* Towards the disk while the next rows are made, so that the sync at the end of the shard finds little to do. */
    if (rc == 0) (void)sync_file_range(w->fd, (off_t)(j->it->at + j->r0 * row), (off_t)bytes, SYNC_FILE_RANGE_WRITE);
    if (rc == 0 && j->scale) rc = write_at(w->fd, scale, scales, j->scale->at + synth_scale_bytes(t, j->r0));
    atomic_fetch_add(&w->written, bytes + scales);
    return rc;
}

/* main: this is the caller's thread, which also reports progress */
static void work(shard_work *w, bool main_thread) {
    uint8_t *out = dm_aligned(64, (size_t)(w->out_bytes + 63) / 64 * 64), *scale = dm_malloc((size_t)w->scale_bytes + 1);
    int rc = out && scale ? 0 : DM_ENOMEM;
    while (rc == 0 && atomic_load(&w->rc) == 0) {
        size_t i = atomic_fetch_add(&w->next, 1);
        if (i >= w->njobs) break;
        rc = do_job(w, &w->jobs[i], out, scale);
        checkpoint *k = w->k;
        if (rc == 0 && main_thread && k->fn && !k->fn(k->ctx, "writing the checkpoint", k->done + atomic_load(&w->written), k->total)) rc = DM_ECANCELED;
    }
    int none = 0;
    if (rc < 0) atomic_compare_exchange_strong(&w->rc, &none, rc);
    dm_free(out);
    dm_free(scale);
}

static void *worker(void *arg) {
    work(arg, false);
    return NULL;
}

static void run_jobs(shard_work *w) {
    pthread_t thread[THREADS_MAX];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int want = (int)(cores < 1 ? 1 : cores > THREADS_MAX ? THREADS_MAX : cores) - 1, n = 0;
    while (n < want && (size_t)n + 1 < w->njobs && pthread_create(&thread[n], NULL, worker, w) == 0) n++;
    work(w, true);
    while (n > 0) pthread_join(thread[--n], NULL);
}

static int fail(dm_err *e, int rc, const char *name) {
    if (rc == DM_ENOMEM) return no_memory(e);
    if (rc == DM_ECANCELED) return dm_err_set(e, rc, WHERE, "cancelled; nothing was kept");
    if (rc == DM_ENOSPC) return dm_err_set(e, rc, WHERE, "the disk is full while writing %s; nothing was kept", name);
    return dm_err_sys(e, -rc, WHERE, "cannot write %s", name);
}

static int write_shard_fd(checkpoint *k, int fd, int shard, item **order) {
    dm_buf header = {0};
    shard_work w = {.k = k, .fd = fd};
    size_t n = 0;
    int rc = layout(k, shard, order, &n, &header);
    if (rc >= 0) rc = plan_jobs(&w, order, n);
    if (rc >= 0) rc = write_at(fd, header.p, (int64_t)header.n, 0);
    if (rc >= 0) run_jobs(&w), rc = atomic_load(&w.rc);
    if (rc >= 0 && fsync(fd) < 0) rc = -errno;
    k->done += atomic_load(&w.written);
    dm_buf_free(&header);
    dm_free(w.jobs);
    return rc < 0 ? rc : 0;
}

static int write_shard(checkpoint *k, int shard, item **order, dm_err *e) {
    char name[64];
    shard_name(k, shard, name);
    char *path = dm_path_join(k->dir, name);
    if (!path) return no_memory(e);
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
    int rc = fd < 0 ? -errno : write_shard_fd(k, fd, shard, order);
    if (fd >= 0 && close(fd) < 0 && rc == 0) rc = -errno;
    dm_free(path);
    return rc < 0 ? fail(e, rc, name) : 0;
}

/* ---- index, configuration, directory ----------------------------------------------------------------- */

static int by_item_name(const void *a, const void *b) { return strcmp((*(item *const *)a)->name, (*(item *const *)b)->name); }

static int index_text(const checkpoint *k, item **order, dm_buf *out) {
    for (size_t i = 0; i < k->nitems; i++) order[i] = &k->items[i];
    qsort(order, k->nitems, sizeof *order, by_item_name);
    int rc = dm_buf_printf(out, "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n  \"weight_map\": {", (long long)k->total);
    for (size_t i = 0; i < k->nitems && rc >= 0; i++) {
        char name[64];
        shard_name(k, order[i]->shard, name);
        rc = dm_buf_printf(out, "%s\n    \"%s\": \"%s\"", i ? "," : "", order[i]->name, name);
    }
    return rc < 0 ? rc : dm_buf_str(out, "\n  }\n}\n");
}

static int write_text(const checkpoint *k, const char *name, const dm_buf *text, dm_err *e) {
    char *path = dm_path_join(k->dir, name);
    if (!path) return no_memory(e);
    int rc = dm_file_write_atomic(path, text->p, text->n, 0644, e);
    dm_free(path);
    return rc < 0 ? rc : 0;
}

static int write_all(checkpoint *k, dm_err *e) {
    item **order = dm_malloc((k->nitems + 1) * sizeof *order);
    dm_buf index = {0};
    int rc = order ? 0 : no_memory(e);
    for (int i = 0; i < k->nshards && rc == 0; i++) rc = write_shard(k, i, order, e);
    if (rc == 0 && index_text(k, order, &index) < 0) rc = no_memory(e);
    if (rc == 0) rc = write_text(k, "model.safetensors.index.json", &index, e);
    if (rc == 0) rc = write_text(k, "config.json", &k->config_text, e);
    dm_buf_free(&index);
    dm_free(order);
    return rc;
}

/* A directory beside the target, so that the rename stays on one file system. */
static int make_directory(checkpoint *k, const char *out_dir, dm_err *e) {
    uint32_t salt;
    dm_buf b = {0};
    k->target = dm_strdup(out_dir);
    if (!k->target) return no_memory(e);
    size_t n = strlen(k->target);
    while (n > 1 && k->target[n - 1] == '/') k->target[--n] = '\0';
    if (rmdir(k->target) < 0 && errno != ENOENT)
        return errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR
                   ? dm_err_set(e, DM_EEXIST, WHERE, "%.300s is there already and is not an empty directory", k->target)
                   : dm_err_sys(e, errno, WHERE, "cannot use %.300s", k->target);
    const char *slash = strrchr(k->target, '/');
    if (slash && slash != k->target) {
        char *parent = dm_strndup(k->target, (size_t)(slash - k->target));
        int rc = parent ? dm_mkdirs(parent, 0755, e) : no_memory(e);
        dm_free(parent);
        if (rc < 0) return rc;
    }
    dm_random(&salt, sizeof salt);
    if (dm_buf_printf(&b, "%s.partial-%08x", k->target, salt) < 0) return no_memory(e);
    if (mkdir(dm_buf_cstr(&b), 0755) < 0) {
        int rc = dm_err_sys(e, errno, WHERE, "cannot make %.300s", dm_buf_cstr(&b));
        dm_buf_free(&b);
        return rc;
    }
    k->dir = (char *)b.p; /* owned from here on; removed when anything fails */
    return 0;
}

static void remove_file(const checkpoint *k, const char *name) {
    char path[4200];
    if (snprintf(path, sizeof path, "%s/%s", k->dir, name) < (int)sizeof path) unlink(path);
}

static void remove_directory(checkpoint *k) {
    char name[64];
    for (int i = 0; i < k->nshards; i++) {
        shard_name(k, i, name);
        remove_file(k, name);
    }
    remove_file(k, "model.safetensors.index.json");
    remove_file(k, "config.json");
    rmdir(k->dir);
}

static int publish(checkpoint *k, dm_err *e) {
    if (rename(k->dir, k->target) < 0) return dm_err_sys(e, errno, WHERE, "cannot rename to %.300s", k->target);
    dm_free(k->dir);
    k->dir = NULL;
    return 0;
}

int dm_model_synth(const char *config_path, const char *out_dir, uint64_t seed, int layers, dm_progress fn, void *ctx, dm_err *e) {
    checkpoint k = {.seed = seed, .fn = fn, .ctx = ctx};
    if (layers < 0) return dm_err_set(e, DM_EINVAL, WHERE, "layers is %d, below 0", layers);
    int rc = read_config(&k, config_path, layers, e);
    if (rc >= 0) rc = collect_all(&k, e);
    if (rc >= 0) rc = make_directory(&k, out_dir, e);
    if (rc >= 0) rc = write_all(&k, e);
    if (rc >= 0) rc = publish(&k, e);
    if (k.dir) remove_directory(&k);
    for (size_t i = 0; i < k.nitems; i++) dm_free(k.items[i].name);
    dm_free(k.items);
    dm_free(k.dir);
    dm_free(k.target);
    dm_buf_free(&k.config_text);
    json_decref(k.json);
    return rc;
}

/* ---- test sequences ------------------------------------------------------------------------------------ */

int dm_synth_tokens(int32_t *out, int64_t n, uint64_t seed, int vocab, dm_err *e) {
    if (n < 0 || vocab < 1) return dm_err_set(e, DM_EINVAL, WHERE, "a sequence of %lld ids from a vocabulary of %d", (long long)n, vocab);
    uint64_t ids = synth_key(seed, "tokens", ""), repeat = synth_key(seed, "tokens", ".repeat");
    for (int64_t i = 0; i < n; i++) out[i] = (int32_t)(synth_number(ids, (uint64_t)i + 1) % (uint64_t)vocab);
    for (int64_t i = 1; i < n; i++) {
        uint64_t z = synth_number(repeat, (uint64_t)i + 1), back = (uint64_t)(i < 200 ? i : 200);
        if (z % 4 == 0) out[i] = out[i - 1 - (int64_t)((z >> 8) % back)];
    }
    return 0;
}
