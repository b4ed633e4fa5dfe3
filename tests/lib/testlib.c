#include "testlib.h"

#include <ftw.h>
#include <unistd.h>

static char dir_path[512];

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static pid_t dir_owner;
static void remove_dir(void)
{
    if (getpid() == dir_owner) nftw(dir_path, remove_one, 32, FTW_DEPTH | FTW_PHYS);
}

const char *test_dir(void)
{
    if (!dir_path[0]) {
        const char *tmp = getenv("TMPDIR");
        snprintf(dir_path, sizeof dir_path, "%s/dmtest.XXXXXX", tmp ? tmp : "/tmp");
        if (!mkdtemp(dir_path)) fail_msg("mkdtemp %s", dir_path);
        dir_owner = getpid();
        atexit(remove_dir);
    }
    return dir_path;
}

uint64_t test_seed(void)
{
    static uint64_t seed;
    if (!seed) {
        const char *s = getenv("DM_TEST_SEED");
        seed = s ? strtoull(s, NULL, 0) : 20261201;
        printf("# seed %llu (DM_TEST_SEED)\n", (unsigned long long)seed);
    }
    return seed;
}

bool test_full(void) { return getenv("DM_TEST_FULL") != NULL; }

void test_skip(const char *why)
{
    printf("# SKIP %s\n", why);
    fflush(stdout);
    if (getenv("DM_TEST_NO_SKIP")) fail_msg("skipping is forbidden here: %s", why);
    skip();
}

const char *test_data(const char *name)
{
    static char buf[4][1024];
    static int k;
    k = (k + 1) & 3;
    snprintf(buf[k], sizeof buf[k], "%s/%s", DM_TEST_DATA, name);
    return buf[k];
}

const char *test_launcher(void) { return DM_BUILD_DIR "/dormouse-sandbox"; }

void test_put(const char *dir, const char *name, const char *text)
{
    char path[1300];
    dm_err e = {0};
    snprintf(path, sizeof path, "%s/%s", dir, name);
    char *slash = strrchr(path, '/');
    *slash = 0;
    assert_ok_e(dm_mkdirs(path, 0755, &e), e);
    *slash = '/';
    assert_ok_e(dm_file_write_atomic(path, text, strlen(text), 0644, &e), e);
}

static pid_t mark_pid;
__attribute__((constructor)) static void mark_set(void) { mark_pid = getpid(); }

static bool is_mark(const char *text, const char *at)
{
    return at - text >= 3 && at[0] == '.' && at[1] == '5' && at[-1] >= '0' && at[-1] <= '9' && at[-2] >= '0' && at[-2] <= '9' && at[-3] >= '3' && at[-3] <= '4';
}

const char *test_marked(const char *text)
{
    static _Thread_local char out[16][8192];
    static _Thread_local int turn;
    char *to = out[turn++ % 16];
    size_t n = 0;
    for (const char *at = text; *at && n + 32 < sizeof out[0];) {
        if (is_mark(text, at)) {
            n += (size_t)snprintf(to + n, sizeof out[0] - n, ".%d5", (int)mark_pid);
            at += 2;
        } else {
            to[n++] = *at++;
        }
    }
    to[n] = 0;
    return to;
}
