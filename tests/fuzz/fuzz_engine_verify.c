/* Files of vectors against a run whose rows are all zeroes: whatever the file says of names, shapes and positions, the
 * comparison stays inside the file and inside the run.
 *
 * An input that begins with '{' is the header of a golden file; behind a FUZZ_PART come its first data bytes, and zeroes
 * after these.  Any other is a file of hashes. */
#include "engine/verify_int.h"
#include "tests/fuzz/lib.h"

enum { DATA_BYTES = 4096, ROW_BYTES = 64, ROWS = 40 };

static dm_config config;

static int read_golden(vref *f, fuzz_bytes in, dm_err *e)
{
    dm_buf b = {0};
    fuzz_bytes header = fuzz_part(&in);
    FUZZ_OK(dm_buf_append(&b, "\0\0\0\0\0\0\0", 8));
    FUZZ_OK(dm_buf_append(&b, header.p, header.n));
    for (int i = 0; i < 8; i++) b.p[i] = (uint8_t)((uint64_t)header.n >> 8 * i);
    FUZZ_OK(dm_buf_append(&b, in.p, in.n < DATA_BYTES ? in.n : DATA_BYTES));
    int rc = vref_read_golden(f, fuzz_file(1, b.p, b.n, b.n - 8 - header.n < DATA_BYTES ? DATA_BYTES - (b.n - 8 - header.n) : 0), e);
    dm_buf_free(&b);
    return rc;
}

static int read_hashes(vref *f, fuzz_bytes in, dm_err *e)
{
    dm_buf text = {0};
    FUZZ_OK(dm_buf_append(&text, in.p, in.n));
    int rc = vref_read_hashes(f, &text, &config, e);
    dm_buf_free(&text);
    return rc;
}

static void check_ref(const vref *f)
{
    FUZZ_CHECK(f->n >= 1 && f->ids && f->npos >= 1);
    for (int64_t i = 0; i < f->npos; i++) FUZZ_CHECK(f->pos[i] >= 0 && f->pos[i] < f->n && (i == 0 || f->pos[i] > f->pos[i - 1]));
    for (int64_t i = 0; i < f->ncut; i++) FUZZ_CHECK(f->cut[i] > 0 && f->cut[i] <= f->n && (i == 0 || f->cut[i] > f->cut[i - 1]));
    for (size_t i = 0; i < f->count; i++) {
        vname v;
        if (vname_parse(&config, f->tensor[i].name, &v)) FUZZ_CHECK(v.layer >= -1 && v.layer <= config.num_hidden_layers && vname_order(&v) >= -1);
    }
}

static void fill_run(vrec *rec, int64_t n)
{
    static const uint8_t zeroes[ROW_BYTES];
    for (int64_t pos = 0; pos < n && pos < ROWS; pos++)
        for (int layer = -1; layer <= config.num_hidden_layers; layer++)
            for (int tag = 0; tag < FT_COUNT; tag++) vrec_row(rec, (forward_tag)tag, layer, pos, zeroes, sizeof zeroes);
}

static void check_report(int rc, const dm_verify_report *r, const dm_err *e)
{
    if (rc < 0) fuzz_told(rc, e);
    else FUZZ_CHECK(r->compared >= 0 && r->differ >= 0 && r->differ <= r->compared);
    FUZZ_CHECK(memchr(r->summary, 0, sizeof r->summary) && memchr(r->first, 0, sizeof r->first));
}

static void compare(const vref *f)
{
    vrec rec = {0};
    dm_err e = {0};
    FUZZ_OK(vrec_init(&rec, &config, f, false, &e));
    fill_run(&rec, f->n);
    dm_verify_report report = {0};
    vfirst first = {0};
    int rc = f->plain && f->golden ? verify_plain(&rec, f, &report, &first, &e) : verify_exact(&rec, f, &report, &first, &e);
    check_report(rc, &report, &e);
    FUZZ_CHECK(memchr(first.text, 0, sizeof first.text));
    vrec_free(&rec);
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    vref f = {0};
    dm_err e = {0};
    if (!config.hidden_size) FUZZ_OK(dm_config_read(&config, fuzz_file(0, fuzz_config(2), strlen(fuzz_config(2)), 0), &e));
    if (!n) return 0; /* refused before anything is read */
    int rc = data[0] == '{' ? read_golden(&f, (fuzz_bytes){data, n}, &e) : read_hashes(&f, (fuzz_bytes){data, n}, &e);
    if (rc < 0) fuzz_told(rc, &e);
    else if (check_ref(&f), f.n <= 2000) compare(&f);
    vref_free(&f);
    return 0;
}
