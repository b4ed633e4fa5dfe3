/* fuzz_corpus DIR: runs every input in DIR/<target>/ through its target, whole and cut short at some places; no clang,
 * no fuzzer.  A target without inputs is a failure: it would pass by doing nothing. */
#include <dirent.h>
#include <stdio.h>

#include "tests/fuzz/lib.h"

typedef int (*entry)(const uint8_t *data, size_t n);
#define X(name) int name(const uint8_t *data, size_t n);
#include "fuzz_list.h"
#undef X
static const struct { const char *name; entry fn; } targets[] = {
#define X(name) {#name, name},
#include "fuzz_list.h"
#undef X
};

enum { CUTS = 24 };

/* The target gets a copy of exactly n bytes, so that a sanitizer sees a read past them. */
static void run(entry fn, const uint8_t *p, size_t n)
{
    uint8_t *copy = malloc(n ? n : 1);
    FUZZ_CHECK(copy != NULL);
    if (n) memcpy(copy, p, n);
    fn(copy, n);
    free(copy);
}

static int replay_file(entry fn, const char *path)
{
    dm_buf b = {0};
    dm_err e = {0};
    if (dm_file_read(path, 1 << 20, &b, &e) < 0) {
        printf("not ok %s: %s\n", path, e.text);
        return -1;
    }
    fprintf(stderr, "# %s\n", path); /* the last one named is the one at fault */
    for (size_t i = 0; i < CUTS; i++) run(fn, b.p, b.n * i / CUTS);
    run(fn, b.p, b.n);
    dm_buf_free(&b);
    return 0;
}

static int compare(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }
static int shown(const struct dirent *x) { return x->d_name[0] != '.'; }

static int replay_target(const char *corpus, size_t i)
{
    char path[1024];
    struct dirent **list;
    snprintf(path, sizeof path, "%s/%s", corpus, targets[i].name);
    int n = scandir(path, &list, shown, compare), failed = n <= 0;
    for (int k = 0; k < n; k++) {
        snprintf(path, sizeof path, "%s/%s/%s", corpus, targets[i].name, list[k]->d_name);
        failed |= replay_file(targets[i].fn, path) < 0;
        free(list[k]);
    }
    if (n >= 0) free(list);
    printf("%s %zu - %s: %d inputs\n", failed ? "not ok" : "ok", i + 1, targets[i].name, n < 0 ? 0 : n);
    fflush(stdout);
    return failed;
}

int main(int argc, char **argv)
{
    int failed = 0;
    if (argc != 2) {
        fprintf(stderr, "usage: fuzz_corpus DIR\n");
        return 2;
    }
    printf("1..%zu\n", DM_COUNT(targets));
    for (size_t i = 0; i < DM_COUNT(targets); i++) failed |= replay_target(argv[1], i);
    return failed;
}
