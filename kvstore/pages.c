/* pages.c — is data.mdb a whole LMDB file?  Asked at open, before LMDB is let loose on it.
 *
 * LMDB 0.9 has no checksums and trusts its pages: a cut file is a bus error, a flipped bit in a page number or in the free list
 * makes it overwrite live pages.  So the structure is walked once with plain reads: every page that the roots lead to, of
 * the free list and of our databases.  Extents' contents are not read (they carry their own checksums); their
 * runs of pages are only accounted.  The cost is the index: about 1 page in 250 for 1 MiB extents.
 *
 * What is checked, as the snapshot of the given transaction sees it
 *   P1  the meta page of that transaction is whole and its last page fits the file
 *   P2  every page reached lies in the file, carries its own number, has the kind that its depth asks for
 *   P3  nodes lie within their page and fill it exactly
 *   P4  keys ascend through the whole tree, separators between their children
 *   P5  no page is reached twice, or reached and free
 *   P6  the counts kept beside each root (depth, entries, branch, leaf and overflow pages) are the counts found
 *
 * Layouts (little endian, 64 bit; lmdb 0.9 data format 1)
 *   page   0 number u64 · 8 pad u16 · 10 flags u16 · 12 lower u16 · 14 upper u16 (overflow: 12 pages u32) · 16 node offsets u16…
 *   node   0 low u16 · 2 high u16 · 4 flags u16 · 6 key length u16 · 8 key, then data
 *          leaf: low|high<<16 is the data's length;  branch: low|high<<16|flags<<32 is the child
 *   tree   0 pad u32 · 4 flags u16 · 6 depth u16 · 8 branch · 16 leaf · 24 overflow · 32 entries · 40 root (u64 each)
 *   meta   page header, then 16 magic u32 · 20 version u32 · 24 address · 32 map size · 40 free tree · 88 main tree
 *          · 136 last page u64 · 144 transaction u64;  the free tree's pad is the page size */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

#define PAGE_BRANCH 1
#define PAGE_LEAF 2
#define PAGE_META 8
#define NODE_BIG 1  /* data in a run of overflow pages */
#define NODE_TREE 2 /* data is the record of a named database */
#define LMDB_MAGIC 0xBEEFC0DEu
#define LMDB_FORMAT 1
#define META_END 152
#define TREE_BYTES 48
#define FREE_FLAGS 0x08 /* integer keys */
#define NO_PAGE UINT64_MAX
#define DEPTH_MAX 32
/* A transaction may give back pages at the end that it never wrote; the file is shorter by these. */
#define UNWRITTEN_MAX 4096

typedef struct tree {
    uint16_t flags, depth;
    uint64_t branch, leaf, overflow, entries, root;
} tree;

typedef enum role { ROLE_FREE, ROLE_MAIN, ROLE_DATA } role;

typedef struct walk {
    int fd;
    size_t page_bytes;
    uint64_t last_page, file_pages;
    uint8_t *used; /* owned; one bit per page */
    uint8_t *bufs; /* owned; a page per depth, for the tree and for a tree in it */
    /* of the tree being walked */
    role role;
    tree found; /* counts */
    uint8_t prev[520];
    size_t prev_n;
    bool prev_any, prev_is_separator;
    tree named[KV_DB_COUNT]; /* our databases, as the main tree names them */
    bool have[KV_DB_COUNT];
    uint64_t bad_page;
    const char *why;
} walk;

static uint16_t u16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static uint32_t u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static uint64_t u64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }

static tree read_tree(const uint8_t *p)
{
    return (tree){ .flags = u16(p + 4), .depth = u16(p + 6), .branch = u64(p + 8), .leaf = u64(p + 16), .overflow = u64(p + 24),
        .entries = u64(p + 32), .root = u64(p + 40) };
}

static int damaged(walk *w, uint64_t page, const char *why)
{
    w->bad_page = page;
    w->why = why;
    return DM_ESTORE;
}

static int read_at(int fd, uint8_t *dst, size_t n, uint64_t at)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(fd, dst + done, n - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return DM_EIO;
        if (got == 0) return DM_ESTORE;
        done += (size_t)got;
    }
    return 0;
}

/* P5 for a run of pages. */
static int claim_pages(walk *w, uint64_t page, uint64_t count)
{
    if (page < 2 || page > w->last_page || count > w->last_page - page + 1) return damaged(w, page, "a page number is out of range");
    for (uint64_t i = page; i < page + count; i++) {
        if (w->used[i >> 3] & (1u << (i & 7))) return damaged(w, i, "a page is used twice");
        w->used[i >> 3] |= (uint8_t)(1u << (i & 7));
    }
    return 0;
}

static int claim_used(walk *w, uint64_t page, uint64_t count)
{
    int rc = claim_pages(w, page, count);
    if (!rc && page + count > w->file_pages) rc = damaged(w, page, "the file is cut short");
    return rc;
}

/* ---- keys -------------------------------------------------------------------------------- */

static int compare(const walk *w, const uint8_t *key, size_t n)
{
    if (w->role == ROLE_FREE) {
        uint64_t a = u64(w->prev), b = u64(key);
        return a < b ? -1 : a > b;
    }
    int c = memcmp(w->prev, key, w->prev_n < n ? w->prev_n : n);
    return c ? c : (w->prev_n > n) - (w->prev_n < n);
}

/* P4: keys and separators arrive in the order of the tree. */
static int next_key(walk *w, uint64_t page, const uint8_t *key, size_t n, bool separator)
{
    if (n == 0 || n > 511 || (w->role == ROLE_FREE && n != 8)) return damaged(w, page, "a key has an impossible length");
    if (w->prev_any) {
        int c = compare(w, key, n);
        if (c > 0 || (c == 0 && !w->prev_is_separator)) return damaged(w, page, "keys are out of order");
    }
    memcpy(w->prev, key, n);
    w->prev_n = n;
    w->prev_any = true;
    w->prev_is_separator = separator;
    return 0;
}

/* ---- leaves ---------------------------------------------------------------------------------- */

/* A record of the free list: count, then page numbers descending.  They are claimed, so that none is also in use. */
static int free_record(walk *w, uint64_t page, const uint8_t *list, uint64_t n)
{
    if (n < 8 || n % 8 || u64(list) > n / 8 - 1) return damaged(w, page, "a free list is damaged");
    uint64_t count = u64(list), before = NO_PAGE;
    for (uint64_t i = 1; i <= count; i++) {
        uint64_t free_page = u64(list + 8 * i);
        if (free_page >= before) return damaged(w, page, "a free list is out of order");
        int rc = claim_pages(w, free_page, 1);
        if (rc) return rc;
        before = free_page;
    }
    return 0;
}

static int big_value(walk *w, uint64_t page, const uint8_t *data, uint64_t n)
{
    uint64_t first = u64(data), pages = (15 + n) / w->page_bytes + 1;
    int rc = claim_used(w, first, pages);
    if (rc) return rc;
    w->found.overflow += pages;
    if (w->role != ROLE_FREE) return 0; /* an extent: deletion looks at its header, reading at its checksum */
    uint8_t *run = dm_malloc((size_t)(pages * w->page_bytes));
    if (!run) return DM_ENOMEM;
    rc = read_at(w->fd, run, (size_t)(pages * w->page_bytes), first * w->page_bytes);
    if (!rc && (u64(run) != first || !(u16(run + 10) & 4) || u32(run + 12) != pages)) rc = damaged(w, first, "a run's header is damaged");
    if (!rc) rc = free_record(w, page, run + 16, n);
    dm_free(run);
    return rc;
}

static void named_tree(walk *w, const uint8_t *key, size_t key_n, const uint8_t *data)
{
    for (int i = 0; i < KV_DB_COUNT; i++) {
        if (strlen(kv_db_names[i]) != key_n || memcmp(kv_db_names[i], key, key_n) != 0) continue;
        w->named[i] = read_tree(data);
        w->have[i] = true;
    }
}

static int leaf_node(walk *w, uint64_t page, const uint8_t *node)
{
    uint64_t n = u16(node) | (uint64_t)u16(node + 2) << 16;
    size_t key_n = u16(node + 6);
    unsigned flags = u16(node + 4);
    const uint8_t *key = node + 8, *data = key + key_n;
    w->found.entries++;
    if (w->role == ROLE_MAIN) {
        if (flags == NODE_TREE && n == TREE_BYTES) named_tree(w, key, key_n, data);
        return 0; /* anything else is not ours and never touched */
    }
    if (flags & ~(unsigned)NODE_BIG) return damaged(w, page, "a node has unknown flags");
    if (flags & NODE_BIG) return big_value(w, page, data, n);
    return w->role == ROLE_FREE ? free_record(w, page, data, n) : 0;
}

/* ---- pages ------------------------------------------------------------------------------------- */

static size_t node_bytes(const uint8_t *node, bool leaf)
{
    size_t n = 8 + (size_t)u16(node + 6);
    if (leaf) n += u16(node + 4) & NODE_BIG ? 8 : u16(node) | (size_t)u16(node + 2) << 16;
    return n + (n & 1);
}

/* P2 and P3. */
static int check_layout(walk *w, uint64_t page, const uint8_t *p, bool leaf)
{
    size_t lower = u16(p + 12), upper = u16(p + 14), sum = 0, size = w->page_bytes;
    if (u64(p) != page) return damaged(w, page, "a page carries another number");
    if (u16(p + 10) != (leaf ? PAGE_LEAF : PAGE_BRANCH)) return damaged(w, page, "a page is of another kind");
    if (lower < 16 || lower % 2 || lower > upper || upper > size) return damaged(w, page, "a page's bounds are damaged");
    size_t count = (lower - 16) / 2, least = leaf || w->role == ROLE_FREE ? 1 : 2;
    if (count < least) return damaged(w, page, "a page is empty");
    for (size_t i = 0; i < count; i++) {
        size_t at = u16(p + 16 + 2 * i);
        if (at < upper || at % 2 || at + 8 > size) return damaged(w, page, "a node is out of place");
        size_t n = node_bytes(p + at, leaf);
        if (n > size - at) return damaged(w, page, "a node is too long");
        sum += n;
    }
    return sum == size - upper ? 0 : damaged(w, page, "nodes do not fill their page");
}

static int walk_page(walk *w, uint64_t page, int depth, int depth_max)
{
    bool leaf = depth == depth_max - 1;
    uint8_t *p = w->bufs + (size_t)depth * w->page_bytes;
    int rc = claim_used(w, page, 1);
    if (!rc) rc = read_at(w->fd, p, w->page_bytes, page * w->page_bytes);
    if (!rc) rc = check_layout(w, page, p, leaf);
    if (rc) return rc;
    *(leaf ? &w->found.leaf : &w->found.branch) += 1;
    size_t count = (size_t)(u16(p + 12) - 16) / 2;
    for (size_t i = 0; i < count && !rc; i++) {
        const uint8_t *node = p + u16(p + 16 + 2 * i);
        size_t key_n = u16(node + 6);
        if (leaf || i) rc = next_key(w, page, node + 8, key_n, !leaf); /* the first separator of a branch is empty */
        if (rc) return rc;
        uint64_t child = u16(node) | (uint64_t)u16(node + 2) << 16 | (uint64_t)u16(node + 4) << 32;
        rc = leaf ? leaf_node(w, page, node) : walk_page(w, child, depth + 1, depth_max);
    }
    return rc;
}

static int walk_tree(walk *w, const tree *t, role r)
{
    w->role = r;
    w->found = (tree){ 0 };
    w->prev_any = false;
    if (t->flags != (r == ROLE_FREE ? FREE_FLAGS : 0)) return damaged(w, t->root, "a database has foreign flags");
    if (t->depth > DEPTH_MAX || (t->depth == 0) != (t->root == NO_PAGE)) return damaged(w, t->root, "a tree's depth is damaged");
    int rc = t->depth ? walk_page(w, t->root, 0, t->depth) : 0;
    if (rc) return rc;
    bool same = w->found.branch == t->branch && w->found.leaf == t->leaf && w->found.entries == t->entries && (r == ROLE_MAIN || w->found.overflow == t->overflow);
    return same ? 0 : damaged(w, t->root, "a tree's counts are wrong");
}

/* ---- the file -------------------------------------------------------------------------------------- */

static int bad_file(const char *dir, dm_err *e, const char *what)
{
    return dm_err_set(e, DM_ESTORE, "kv.open", "%s: data.mdb %s; delete the directory, it is a cache", dir, what);
}

/* P1, before LMDB maps as much as the meta pages say. */
static bool fits(uint64_t last_page, uint64_t file_pages) { return last_page >= 1 && last_page <= file_pages + UNWRITTEN_MAX; }

static int check_meta_page(int fd, int which, size_t page_bytes, const char *dir, dm_err *e)
{
    struct stat st;
    uint8_t m[META_END];
    int rc = read_at(fd, m, sizeof m, (uint64_t)which * page_bytes);
    if (rc == DM_EIO || fstat(fd, &st) != 0) return dm_err_set(e, DM_EIO, "kv.open", "%s: data.mdb cannot be read", dir);
    if (rc) return bad_file(dir, e, which ? "is cut short" : "is not an LMDB file");
    if (!(u16(m + 10) & PAGE_META) || u32(m + 16) != LMDB_MAGIC) return bad_file(dir, e, which ? "is damaged" : "is not an LMDB file");
    if (u32(m + 20) != LMDB_FORMAT) return bad_file(dir, e, "has another LMDB format");
    if (u32(m + 40) != page_bytes) return bad_file(dir, e, "was made with another page size, or is damaged");
    return fits(u64(m + 136), (uint64_t)st.st_size / page_bytes) ? 0 : bad_file(dir, e, "is cut short");
}

/* Is it LMDB at all?  *fresh: empty, to be made.  LMDB itself wants both meta pages. */
int kv_pages_precheck(int fd, const char *dir, bool *fresh, dm_err *e)
{
    struct stat st;
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    if (fstat(fd, &st) != 0) return dm_err_sys(e, errno, "kv.open", "%s: data.mdb", dir);
    if (!S_ISREG(st.st_mode)) return dm_err_set(e, DM_ESTORE, "kv.open", "%s: data.mdb is not a regular file", dir);
    *fresh = st.st_size == 0;
    if (*fresh) return 0;
    int rc = check_meta_page(fd, 0, page_bytes, dir, e);
    return rc ? rc : check_meta_page(fd, 1, page_bytes, dir, e);
}

static int walk_file(walk *w, const uint8_t *meta)
{
    tree free_tree = read_tree(meta + 40), main_tree = read_tree(meta + 88);
    int rc = walk_tree(w, &free_tree, ROLE_FREE);
    if (!rc) rc = walk_tree(w, &main_tree, ROLE_MAIN);
    for (int i = 0; i < KV_DB_COUNT && !rc; i++)
        if (w->have[i]) rc = walk_tree(w, &w->named[i], ROLE_DATA);
    return rc;
}

/* DM_EAGAIN: other processes have committed past the transaction; take a new one. */
int kv_pages_check(int fd, MDB_env *env, size_t txn_id, const char *dir, dm_err *e)
{
    MDB_stat ms;
    struct stat st;
    uint8_t meta[META_END];
    if (mdb_env_stat(env, &ms) != 0 || fstat(fd, &st) != 0) return bad_file(dir, e, "cannot be read");
    walk w = { .fd = fd, .page_bytes = ms.ms_psize };
    if (read_at(fd, meta, sizeof meta, (txn_id & 1) * w.page_bytes) != 0) return bad_file(dir, e, "cannot be read");
    if (u64(meta + 144) != txn_id) return DM_EAGAIN;
    w.last_page = u64(meta + 136);
    w.file_pages = (uint64_t)st.st_size / w.page_bytes;
    if (!fits(w.last_page, w.file_pages)) return bad_file(dir, e, "is cut short");
    w.used = dm_calloc((size_t)(w.last_page / 8 + 1), 1);
    w.bufs = dm_malloc(DEPTH_MAX * w.page_bytes);
    int rc = w.used && w.bufs ? walk_file(&w, meta) : DM_ENOMEM;
    dm_free(w.used);
    dm_free(w.bufs);
    if (rc == DM_ENOMEM) return dm_err_set(e, rc, "kv.open", "out of memory");
    if (rc == DM_EIO) return dm_err_set(e, rc, "kv.open", "%s: data.mdb cannot be read", dir);
    if (rc) return dm_err_set(e, DM_ESTORE, "kv.open", "%s: data.mdb is damaged (%s, page %llu); delete the directory, it is a cache", dir,
        w.why ? w.why : "the file is cut short", (unsigned long long)w.bad_page);
    return 0;
}
