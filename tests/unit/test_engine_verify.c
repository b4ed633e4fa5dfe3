/* The judge itself: a difference of any kind is found and named, and what cannot be judged is refused in words. */
#include "tests/lib/engine_files.h"

#include <math.h>

#include "engine/verify_int.h"

static dm_verify_report report;

static int verify(const char *file, dm_numerics numerics, dm_err *e)
{
    dm_verify_opts o = {.numerics = numerics, .threads = 1};
    return dm_model_verify(synthetic("tiny"), file, &o, &report, NULL, NULL, e);
}

/* ---- a run to play with -------------------------------------------------------------------------- */

typedef struct rig {
    dm_model *m;
    vref f;
    vrec rec;
    dm_verify_opts o;
    forward_trace trace;
    vrun run;
} rig;

/* An exact run over the 5 or 129 tokens of a hash file, with every row that judging the fast path takes. */
static void rig_open(rig *r, int n)
{
    dm_err e;
    dm_buf text;
    char name[64];
    memset(r, 0, sizeof *r);
    snprintf(name, sizeof name, "vectors/hash/tiny-ref-n%d.txt", n);
    text = slurp(test_data(name));
    assert_ok_e(dm_model_open(&r->m, synthetic("tiny"), &e), e);
    assert_ok_e(vref_read_hashes(&r->f, &text, dm_model_config(r->m), &e), e);
    assert_ok_e(vrec_init(&r->rec, dm_model_config(r->m), &r->f, true, &e), e);
    r->trace = (forward_trace){.ctx = &r->rec, .row = vrec_row, .all_logits = true};
    r->o.threads = 1;
    r->run = (vrun){.m = r->m, .o = &r->o, .numerics = DM_NUM_EXACT, .what = "test", .f = &r->f, .trace = &r->trace, .streams = &r->rec};
    assert_ok_e(vrun_go(&r->run, &e), e);
}

static void rig_close(rig *r)
{
    vrec_free(&r->rec);
    vref_free(&r->f);
    dm_model_close(r->m);
}

/* The fast path against the (perhaps tampered) exact run. */
static int judge(rig *r, vfirst *first)
{
    dm_err e;
    memset(&report, 0, sizeof report);
    memset(first, 0, sizeof *first);
    r->run.numerics = DM_NUM_FAST;
    assert_ok_e(verify_fast(&r->run, &r->rec, &report, first, &e), e);
    return (int)report.differ;
}

static void *row(rig *r, forward_tag tag, int layer, int64_t pos)
{
    size_t n;
    const void *p = vrec_get(&r->rec, tag, layer, pos, &n);
    assert_non_null(p);
    return (void *)(uintptr_t)p;
}

static void write_golden(rig *r, const char *path, const char *change, size_t at)
{
    json_t *h = json_object();
    dm_buf data = {0}, mine = {0};
    for (size_t i = 0; i < r->f.count; i++) {
        const vref_tensor *t = &r->f.tensor[i];
        vname v;
        dm_err e;
        assert_true(vname_parse(dm_model_config(r->m), t->name, &v));
        assert_ok_e(vrec_tensor(&r->rec, &r->f, t, &v, &mine, &e), e);
        if (change && strcmp(t->name, change) == 0) mine.p[at] ^= 1;
        json_t *shape = json_array();
        for (int d = 0; d < t->ndim; d++) json_array_append_new(shape, json_integer(t->dim[d]));
        json_object_set_new(h, t->name, json_pack("{s:s,s:o,s:[I,I]}", "dtype", model_dtype_name(t->dtype), "shape", shape, "data_offsets", (json_int_t)data.n,
                                                  (json_int_t)(data.n + mine.n)));
        if (mine.n) assert_ok(dm_buf_append(&data, mine.p, mine.n));
    }
    char *text = json_dumps(h, 0);
    write_safetensors(path, text, strlen(text), data.p, data.n);
    free(text);
    json_decref(h);
    dm_buf_free(&data);
    dm_buf_free(&mine);
}

/* ---- names ------------------------------------------------------------------------------------------ */

static void names_are_read_as_the_vectors_spell_them(void **s)
{
    (void)s;
    dm_config c;
    dm_err e;
    vname v;
    assert_ok_e(dm_config_read(&c, test_data("vectors/tiny.config.json"), &e), e);
    assert_true(vname_parse(&c, "layers.3.attn.kv", &v) && v.kind == VN_ROWS && v.layer == 3 && v.tag == FT_ATTN_KV);
    assert_true(vname_parse(&c, "mtp.0.head.x", &v) && v.layer == 6 && v.tag == FT_HEAD_X);
    assert_true(vname_parse(&c, "mtp.logits", &v) && v.layer == 6 && v.tag == FT_LOGITS);
    assert_true(vname_parse(&c, "logits", &v) && v.layer == -1);
    assert_true(vname_parse(&c, "cut127.layers.4.attn.indexer.compressor.prevS", &v) && v.kind == VN_CUT && v.cut == 127 && v.prev && v.tag == FT_INDEX_COMP_S);
    assert_true(vname_parse(&c, "cut1.layers.4.attn.compressor.curK", &v) && !v.prev && v.tag == FT_COMP_K);
    static const char *const bad[] = {"", "layers", "layers.", "layers.6.attn.kv", "layers.-1.attn.kv", "layers.1.attn", "layers.1x.attn.kv", "mtp.1.attn.kv",
                                      "cut", "cut.layers.4.attn.compressor.curK", "cut-1.layers.4.attn.compressor.curK", "cut5.layers.4.attn.compressor.nextK", "x"};
    for (size_t i = 0; i < DM_COUNT(bad); i++) assert_false(vname_parse(&c, bad[i], &v));
}

static void earlier_in_the_computation_comes_first(void **s)
{
    (void)s;
    static const char *const order[] = {"tokens", "layers.0.hin", "layers.0.attn.x", "layers.0.attn.kv", "layers.0.attn.y", "layers.0.h", "layers.2.attn.q",
                                        "cut5.layers.2.attn.compressor.curK", "layers.2.ffn.y", "head.x", "logits", "mtp.0.hin", "mtp.0.h", "mtp.logits"};
    dm_config c;
    dm_err e;
    vname a, b;
    assert_ok_e(dm_config_read(&c, test_data("vectors/tiny.config.json"), &e), e);
    for (size_t i = 1; i < DM_COUNT(order); i++) {
        assert_true(vname_parse(&c, order[i - 1], &a) && vname_parse(&c, order[i], &b));
        if (vname_order(&a) >= vname_order(&b)) fail_msg("%s does not come before %s", order[i - 1], order[i]);
    }
}

/* ---- exact ------------------------------------------------------------------------------------------- */

static void a_changed_value_is_named_with_tensor_position_and_element(void **s)
{
    (void)s;
    static const struct { const char *tensor; size_t at; const char *says; } cases[] = {
        {"layers.3.attn.q", (2 * 2048 + 7) * 2, "layers.3.attn.q, position 2, element 7"},
        {"layers.4.attn.kv", 584 * 3 + 100, "layers.4.attn.kv, position 3, element 100"},
        {"layers.2.attn.compressor.ent", 580, "layers.2.attn.compressor.ent, entry 0, element 580"},
        {"cut5.layers.2.attn.compressor.prevK", 512 * 4, "cut5.layers.2.attn.compressor.prevK, cut 5"},
        {"layers.5.ffn.route.id", 4 * 9, "layers.5.ffn.route.id, position 4, element 1"},
        {"mtp.logits", 512 * 4 * 4, "mtp.logits, position 4, element 0"},
    };
    rig r;
    dm_err e;
    rig_open(&r, 5);
    write_golden(&r, scratch("good.safetensors"), NULL, 0);
    assert_ok_e(verify(scratch("good.safetensors"), DM_NUM_EXACT, &e), e);
    assert_string_equal(report.kind, "golden");
    assert_int_equal(report.compared, 219);
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        write_golden(&r, scratch("bad.safetensors"), cases[i].tensor, cases[i].at);
        assert_err(DM_EMISMATCH, verify(scratch("bad.safetensors"), DM_NUM_EXACT, &e));
        assert_int_equal(report.differ, 1);
        assert_text(report.first, cases[i].says);
        assert_text(e.text, cases[i].says);
    }
    /* the other names of a golden run stand for the same file */
    spit(scratch("good.json"), "{}", 2);
    spit(scratch("good.txt"), "", 0);
    assert_ok_e(verify(scratch("good.json"), DM_NUM_EXACT, &e), e);
    assert_ok_e(verify(scratch("good.txt"), DM_NUM_EXACT, &e), e);
    rig_close(&r);
}

static void a_changed_hash_names_its_tensor(void **s)
{
    (void)s;
    dm_err e;
    dm_buf b = slurp(test_data("vectors/hash/tiny-ref-n3.txt"));
    char *line = strstr((char *)b.p, "layers.4.attn.indexer.q ");
    assert_non_null(line);
    char *digit = strchr(line, '\n') - 1;
    *digit = *digit == '0' ? '1' : '0';
    spit(scratch("hash.txt"), b.p, b.n);
    dm_buf_free(&b);
    assert_err(DM_EMISMATCH, verify(scratch("hash.txt"), DM_NUM_EXACT, &e));
    assert_string_equal(report.kind, "hash");
    assert_int_equal(report.compared, 177);
    assert_int_equal(report.differ, 1);
    assert_text(report.first, "layers.4.attn.indexer.q");
    assert_err(DM_EMISMATCH, verify(scratch("hash.txt"), DM_NUM_FAST, &e)); /* the exact run comes first there too */
}

static void a_changed_checkpoint_names_its_tensor(void **s)
{
    (void)s;
    dm_err e;
    dm_verify_opts o = {0};
    const char *dir = tiny_copy("changed");
    dm_buf f = slurp(in_dir(dir, "model-00009-of-00009.safetensors"));
    f.p[f.n - 1] ^= 1; /* the last name of the last shard */
    spit(in_dir(dir, "model-00009-of-00009.safetensors"), f.p, f.n);
    dm_buf_free(&f);
    assert_err(DM_EMISMATCH, dm_model_verify(dir, test_data("vectors/hash/tiny.checkpoint.txt"), &o, &report, NULL, NULL, &e));
    assert_string_equal(report.kind, "checkpoint");
    assert_int_equal(report.differ, 1);
    assert_text(report.first, "mtp.0.");
    /* a file that leaves tensors out does not pass as the whole */
    spit(scratch("few.txt"), "# tiny seed 1\n", 14);
    assert_err(DM_EFORMAT, dm_model_verify(synthetic("tiny"), scratch("few.txt"), &o, &report, NULL, NULL, &e));
    dm_buf b = slurp(test_data("vectors/hash/tiny.checkpoint.txt"));
    b.n = (size_t)(strstr((char *)b.p, "layers.3.") - (char *)b.p);
    spit(scratch("few.txt"), b.p, b.n);
    dm_buf_free(&b);
    assert_err(DM_EMISMATCH, dm_model_verify(synthetic("tiny"), scratch("few.txt"), &o, &report, NULL, NULL, &e));
    assert_text(report.first, "the model has 585");
}

/* ---- plain ------------------------------------------------------------------------------------------------ */

static void plain_logits_within_the_bound_pass_and_beyond_it_fail(void **s)
{
    (void)s;
    dm_err e;
    dm_buf b = slurp(test_data("vectors/tiny-plain-n257.safetensors"));
    json_t *h = json_loadb((char *)b.p + 8, (size_t)header_length(&b), 0, NULL);
    static const struct { const char *tensor; float add; int rc; } cases[] = {{"logits", 4e-4f, 0}, {"logits", 6e-4f, DM_EMISMATCH}, {"mtp.logits", -6e-4f, DM_EMISMATCH}};
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        size_t at = 8 + (size_t)header_length(&b) + (size_t)json_integer_value(json_array_get(json_object_get(json_object_get(h, cases[i].tensor), "data_offsets"), 0)) + 4 * (3 * 512 + 9);
        float was, now;
        memcpy(&was, b.p + at, 4);
        now = was + cases[i].add;
        memcpy(b.p + at, &now, 4);
        spit(scratch("plain.safetensors"), b.p, b.n);
        memcpy(b.p + at, &was, 4);
        int rc = verify(scratch("plain.safetensors"), DM_NUM_PLAIN, &e);
        if (rc != cases[i].rc) fail_msg("case %zu: %s", i, dm_err_name(rc));
        assert_string_equal(report.kind, "plain");
        if (rc < 0) assert_text(report.first, "position 3, element 9");
    }
    size_t at = 8 + (size_t)header_length(&b) + (size_t)json_integer_value(json_array_get(json_object_get(json_object_get(h, "layers.4.attn.indexer.sel"), "data_offsets"), 0)) + 4 * 16 * 200;
    b.p[at] ^= 1;
    spit(scratch("plain.safetensors"), b.p, b.n);
    assert_err(DM_EMISMATCH, verify(scratch("plain.safetensors"), DM_NUM_PLAIN, &e));
    assert_text(report.first, "layers.4.attn.indexer.sel, position 200");
    json_decref(h);
    dm_buf_free(&b);
}

static void a_file_for_another_path_is_refused_with_the_way_out(void **s)
{
    (void)s;
    dm_err e;
    assert_err(DM_EINVAL, verify(test_data("vectors/tiny-plain-n257.safetensors"), DM_NUM_EXACT, &e));
    assert_text(e.text, "--numerics plain");
    assert_err(DM_EINVAL, verify(test_data("vectors/tiny-plain-n257.safetensors"), DM_NUM_FAST, &e));
    assert_err(DM_EINVAL, verify(test_data("vectors/hash/tiny-ref-n5.txt"), DM_NUM_PLAIN, &e));
    assert_text(e.text, "--numerics exact or fast");
    dm_verify_opts o = {.chunk = -1};
    assert_err(DM_EINVAL, dm_model_verify(synthetic("tiny"), test_data("vectors/hash/tiny-ref-n5.txt"), &o, &report, NULL, NULL, &e));
}

/* ---- fast -------------------------------------------------------------------------------------------------- */

static void tamper_outputs(rig *r, forward_tag tag, int layer, float factor)
{
    for (int64_t p = 0; p < r->f.n; p++) {
        float *y = row(r, tag, layer, p);
        for (int i = 0; i < 256; i++) y[i] *= factor;
    }
}

static void a_sublayer_beyond_its_tolerance_is_found(void **s)
{
    (void)s;
    rig r;
    vfirst first;
    rig_open(&r, 129);
    if (judge(&r, &first)) fail_msg("the untouched run differs: %s", first.text);
    assert_text(report.summary, "attn.y");
    static const struct { forward_tag tag; int layer; float inside, outside; const char *name; } cases[] = {
        {FT_ATTN_Y, 3, 1.02f, 1.10f, "layers.3.attn.y"}, /* one layer of seven: 0.02 there is below 0.012 over all */
        {FT_FFN_Y, 2, 1.001f, 1.05f, "layers.2.ffn.y"},
    };
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        tamper_outputs(&r, cases[i].tag, cases[i].layer, cases[i].inside);
        if (judge(&r, &first)) fail_msg("%s within its tolerance: %s", cases[i].name, first.text);
        tamper_outputs(&r, cases[i].tag, cases[i].layer, cases[i].outside / cases[i].inside);
        assert_true(judge(&r, &first) > 0);
        assert_text(first.text, cases[i].name);
        tamper_outputs(&r, cases[i].tag, cases[i].layer, 1 / cases[i].outside);
    }
    for (int l = 0; l < 7; l++) tamper_outputs(&r, FT_ATTN_Y, l, 1.02f); /* every row fine by itself, the whole not */
    assert_int_equal(judge(&r, &first), 1);
    assert_text(first.text, "over all layers");
    rig_close(&r);
}

static void one_wrong_row_of_any_kind_is_found(void **s)
{
    (void)s;
    rig r;
    vfirst first;
    rig_open(&r, 5);
    float *k = row(&r, FT_COMP_K, 4, 3), was = k[700];
    k[700] += 0.01f * (fabsf(was) + 1);
    assert_true(judge(&r, &first) > 0);
    assert_text(first.text, "layers.4.attn.compressor.K, position 3");
    k[700] = was;
    uint8_t *kv = row(&r, FT_ATTN_KV, 6, 2), code = kv[5];
    kv[5] ^= 0x18;
    assert_true(judge(&r, &first) > 0);
    assert_text(first.text, "mtp.0.attn.kv, position 2: dimension 5");
    kv[5] = code;
    uint8_t *scale = kv + 576 + 3;
    *scale += 2;
    assert_true(judge(&r, &first) > 0);
    assert_text(first.text, "mtp.0.attn.kv, position 2");
    *scale -= 2;
    uint8_t *key = row(&r, FT_INDEX_ENT, 2, 0);
    code = key[10];
    key[10] = (uint8_t)((code & 0x8F) | ((code >> 4 & 7) < 4 ? 0x70 : 0));
    assert_true(judge(&r, &first) > 0);
    assert_text(first.text, "layers.2.attn.indexer.compressor.ent, entry 0");
    key[10] = code;
    int32_t *route = row(&r, FT_ROUTE_ID, 5, 4), expert = route[1];
    route[1] = expert == 7 ? 6 : 7;
    float *margin = row(&r, FT_FFN_MARGIN, 5, 4), wide = *margin;
    *margin = 0.5f;
    assert_true(judge(&r, &first) > 0);
    assert_text(first.text, "layers.5.ffn.route.id, position 4");
    *margin = 5e-6f; /* a tie: allowed */
    if (judge(&r, &first)) fail_msg("a tie is allowed: %s", first.text);
    route[1] = expert, *margin = wide;
    rig_close(&r);
}

static void a_wrong_selection_is_found_unless_it_is_a_tie(void **s)
{
    (void)s;
    rig r;
    vfirst first;
    rig_open(&r, 129);
    int32_t *sel = row(&r, FT_INDEX_SEL, 4, 128);
    float *margin = row(&r, FT_INDEX_MARGIN, 4, 128);
    sel[0] += 1;
    *margin = 1e6f;
    assert_true(judge(&r, &first) > 0);
    assert_text(first.text, "layers.4.attn.indexer.sel, position 128");
    *margin = 0;
    if (judge(&r, &first)) fail_msg("a tie is allowed: %s", first.text);
    rig_close(&r);
}

static void too_few_equal_rows_are_found(void **s)
{
    (void)s;
    rig r;
    vfirst first;
    rig_open(&r, 129);
    int changed = 0;
    for (int64_t p = 0; p < 129 && changed < 24; p++) /* 2 % of 7 · 129 rows is 18.1; one code step each */
        for (int i = 0; i < 448; i++) {
            uint8_t *kv = row(&r, FT_ATTN_KV, 2, p);
            if ((kv[i] & 7) == 3) {
                kv[i]++, changed++;
                break;
            }
        }
    assert_int_equal(changed, 24);
    assert_int_equal(judge(&r, &first), 1);
    assert_text(first.text, "below 98 %");
    rig_close(&r);
}

/* ---- hostile files ------------------------------------------------------------------------------------------ */

static void malformed_files_are_refused_with_the_line(void **s)
{
    (void)s;
    static const struct { const char *text, *word; } cases[] = {
        {"", "known kinds"},
        {"hello\n", "known kinds"},
        {"{}\n", "known kinds"},
        {"# tiny ref n 5", "first line"},
        {"# tiny ref n 5 seed 1\n", "first line"},
        {"# tiny fuzzy n 5 seed 1 full 1\n", "unknown mode"},
        {"# tiny ref n 0 seed 1 full 1\n", "0 tokens"},
        {"# tiny ref n 99999999999 seed 1 full 1\n", "tokens"},
        {"# tiny ref n 5 seed 1 full 1\n", "nothing in it"},
        {"# tiny ref n 5 seed 1 full 1\nlogits F32 2 5\n", "line 2"},
        {"# tiny ref n 5 seed 1 full 1\nlogits F99 2 5 512 aa\n", "line 2"},
        {"# tiny ref n 5 seed 1 full 1\nlogits F32 2 9223372036854775807 512 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n", "line 2"},
        {"# tiny ref n 5 seed 1 full 1\nlogits F32 2 -5 512 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n", "line 2"},
        {"# tiny ref n 5 seed 1 full 1\nlayers.9.h F32 1 0 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n", "layers.9.h"},
        {"# tiny ref n 5 seed 1 full 1\ncut9.layers.2.attn.compressor.curK F32 1 0 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n", "cut"},
        {"# tiny seed 1\nx\n", "line"},
    };
    dm_err e;
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        spit(scratch("bad.vectors"), cases[i].text, strlen(cases[i].text));
        int rc = verify(scratch("bad.vectors"), DM_NUM_EXACT, &e);
        if (rc != DM_EFORMAT) fail_msg("case %zu gave %s", i, dm_err_name(rc));
        assert_text(e.text, cases[i].word);
    }
    assert_err(DM_ENOENT, verify(scratch("nowhere.txt"), DM_NUM_EXACT, &e));
    assert_err(DM_ENOENT, verify(scratch("nowhere.safetensors"), DM_NUM_EXACT, &e));
}

/* Vectors of another configuration differ; they do not crash. */
static void vectors_of_another_model_are_a_difference(void **s)
{
    (void)s;
    dm_err e;
    int rc = verify(test_data("vectors/hash/tiny2-ref-n5.txt"), DM_NUM_EXACT, &e);
    assert_true(rc == DM_EMISMATCH || rc == DM_EFORMAT);
    rc = verify(test_data("vectors/tiny2-plain-n257.safetensors"), DM_NUM_PLAIN, &e);
    assert_true(rc == DM_EMISMATCH || rc == DM_EFORMAT);
}

static void flipped_bytes_of_a_golden_file_do_no_harm(void **s)
{
    (void)s;
    rig r;
    dm_err e;
    uint64_t rng = test_seed();
    rig_open(&r, 5);
    write_golden(&r, scratch("flip.safetensors"), NULL, 0);
    rig_close(&r);
    dm_buf b = slurp(scratch("flip.safetensors"));
    size_t header = 8 + (size_t)header_length(&b);
    for (int i = 0; i < 30; i++) {
        size_t at = dm_splitmix64(&rng) % (i % 2 ? header : b.n);
        uint8_t was = b.p[at];
        b.p[at] = (uint8_t)dm_splitmix64(&rng);
        spit(scratch("flip.safetensors"), b.p, b.n);
        int rc = verify(scratch("flip.safetensors"), DM_NUM_EXACT, &e);
        assert_true(rc == 0 || rc == DM_EMISMATCH || rc == DM_EFORMAT || rc == DM_EMODEL || rc == DM_EINVAL);
        b.p[at] = was;
    }
    dm_buf_free(&b);
}

static bool stop(void *ctx, const char *what, int64_t done, int64_t total)
{
    (void)ctx, (void)what, (void)done, (void)total;
    return false;
}

static void a_run_can_be_cancelled(void **s)
{
    (void)s;
    dm_err e;
    dm_verify_opts o = {.numerics = DM_NUM_EXACT, .threads = 1};
    assert_err(DM_ECANCELED, dm_model_verify(synthetic("tiny"), test_data("vectors/hash/tiny-ref-n5.txt"), &o, &report, stop, NULL, &e));
}

static void a_failed_allocation_leaks_nothing(void **s)
{
    (void)s;
    dm_err e;
    const char *file = test_data("vectors/hash/tiny-ref-n1.txt");
    int64_t start = dm_fault_alloc_count();
    assert_ok_e(verify(file, DM_NUM_FAST, &e), e);
    int64_t total = dm_fault_alloc_count() - start;
    for (int64_t n = 1; n <= total; n += 1 + n / 12) {
        dm_fault_alloc_after(n);
        int rc = verify(file, DM_NUM_FAST, &e);
        dm_fault_alloc_after(-1);
        if (rc != 0 && rc != DM_ENOMEM) fail_msg("allocation %lld: %s: %s", (long long)n, dm_err_name(rc), e.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_read_as_the_vectors_spell_them),
        cmocka_unit_test(earlier_in_the_computation_comes_first),
        cmocka_unit_test(a_changed_value_is_named_with_tensor_position_and_element),
        cmocka_unit_test(a_changed_hash_names_its_tensor),
        cmocka_unit_test(a_changed_checkpoint_names_its_tensor),
        cmocka_unit_test(plain_logits_within_the_bound_pass_and_beyond_it_fail),
        cmocka_unit_test(a_file_for_another_path_is_refused_with_the_way_out),
        cmocka_unit_test(a_sublayer_beyond_its_tolerance_is_found),
        cmocka_unit_test(one_wrong_row_of_any_kind_is_found),
        cmocka_unit_test(a_wrong_selection_is_found_unless_it_is_a_tie),
        cmocka_unit_test(too_few_equal_rows_are_found),
        cmocka_unit_test(malformed_files_are_refused_with_the_line),
        cmocka_unit_test(vectors_of_another_model_are_a_difference),
        cmocka_unit_test(flipped_bytes_of_a_golden_file_do_no_harm),
        cmocka_unit_test(a_run_can_be_cancelled),
        cmocka_unit_test(a_failed_allocation_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
