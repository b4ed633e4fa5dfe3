#include "tests/fuzz/lib.h"

#include <ftw.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

void fuzz_fail(const char *file, int line, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    abort();
}

uint8_t fuzz_byte(fuzz_bytes *b)
{
    if (!b->n) return 0;
    b->n--;
    return *b->p++;
}

fuzz_bytes fuzz_part(fuzz_bytes *b)
{
    fuzz_bytes part = *b;
    const uint8_t *end = b->n ? memchr(b->p, FUZZ_PART, b->n) : NULL;
    if (end) part.n = (size_t)(end - b->p);
    b->p += part.n + (end != NULL);
    b->n -= part.n + (end != NULL);
    return part;
}

/* ---- files ---- */

static void fill(int fd, const void *p, size_t n, size_t zeros)
{
    FUZZ_CHECK(ftruncate(fd, 0) == 0);
    FUZZ_CHECK(n == 0 || pwrite(fd, p, n, 0) == (ssize_t)n);
    if (zeros) FUZZ_CHECK(ftruncate(fd, (off_t)(n + zeros)) == 0);
}

const char *fuzz_file(int slot, const void *p, size_t n, size_t zeros)
{
    static struct { int fd; char path[32]; } files[4];
    FUZZ_CHECK(slot >= 0 && (size_t)slot < DM_COUNT(files));
    if (!files[slot].path[0]) {
        files[slot].fd = memfd_create("fuzz", MFD_CLOEXEC);
        FUZZ_CHECK(files[slot].fd >= 0);
        snprintf(files[slot].path, sizeof files[slot].path, "/proc/self/fd/%d", files[slot].fd);
    }
    fill(files[slot].fd, p, n, zeros);
    return files[slot].path;
}

static char dir_path[256];

static void dir_file_path(char out[512], const char *name) { snprintf(out, 512, "%s/%s", dir_path, name); }

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static void remove_dir(void) { nftw(dir_path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

const char *fuzz_dir(void)
{
    if (!dir_path[0]) {
        const char *tmp = getenv("TMPDIR");
        snprintf(dir_path, sizeof dir_path, "%s/dmfuzz.XXXXXX", tmp ? tmp : "/tmp");
        FUZZ_CHECK(mkdtemp(dir_path) != NULL);
        atexit(remove_dir);
    }
    return dir_path;
}

void fuzz_dir_file(const char *name, const void *p, size_t n, size_t zeros)
{
    char path[512];
    fuzz_dir();
    dir_file_path(path, name);
    if (!p) {
        unlink(path);
        return;
    }
    FILE *f = fopen(path, "wb");
    FUZZ_CHECK(f != NULL);
    fill(fileno(f), p, n, zeros);
    FUZZ_CHECK(fclose(f) == 0);
}

const char *fuzz_config(int layers)
{
    static char text[2048];
    static const char *const ratios[] = {"4", "4,128", "4,128,0"};
    FUZZ_CHECK(layers >= 1 && (size_t)layers <= DM_COUNT(ratios));
    snprintf(text, sizeof text,
             "{\"model_type\":\"deepseek_v4\",\"num_hidden_layers\":%d,\"hidden_size\":128,\"num_attention_heads\":1,\"head_dim\":512,"
             "\"qk_rope_head_dim\":64,\"q_lora_rank\":128,\"o_groups\":1,\"o_lora_rank\":128,\"sliding_window\":128,\"index_n_heads\":1,"
             "\"index_head_dim\":128,\"index_topk\":1,\"n_routed_experts\":2,\"num_experts_per_tok\":1,\"moe_intermediate_size\":128,"
             "\"num_hash_layers\":1,\"hc_mult\":4,\"hc_sinkhorn_iters\":1,\"vocab_size\":2,\"bos_token_id\":0,\"eos_token_id\":1,"
             "\"routed_scaling_factor\":1.5,\"swiglu_limit\":10.0,\"hc_eps\":1e-6,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,"
             "\"compress_rope_theta\":160000.0,\"max_position_embeddings\":1024,\"compress_ratios\":[%s],"
             "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":16,\"beta_fast\":32,\"beta_slow\":1,\"original_max_position_embeddings\":64}}",
             layers, ratios[layers - 1]);
    return text;
}

/* ---- errors ---- */

void fuzz_told(int rc, const dm_err *e)
{
    FUZZ_CHECK(rc < 0 && strcmp(dm_err_name(rc), "DM_E?") != 0);
    if (e->code != rc) FUZZ_FAIL("returned %s, told %s: %s", dm_err_name(rc), dm_err_name(e->code), e->text);
    FUZZ_CHECK(e->where[0] && memchr(e->where, 0, sizeof e->where) && memchr(e->text, 0, sizeof e->text));
    if (strlen(e->text) < 4 || strchr(e->text, '\n') || !dm_utf8_valid(e->text, strlen(e->text))) FUZZ_FAIL("not a sentence: '%s'", e->text);
}
