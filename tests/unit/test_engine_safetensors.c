/* One safetensors file: what is well formed is mapped, anything else is refused before it is used. */
#include "tests/lib/engine_files.h"

#include "engine/safetensors_int.h"

static const uint8_t data[64] = {1, 2, 3, 4, 5, 6, 7, 8};

static int open_header(st_file *f, const char *header, size_t bytes, dm_err *e)
{
    write_safetensors(scratch("x.safetensors"), header, strlen(header), data, bytes);
    return st_open(f, scratch("x.safetensors"), e);
}

static void refused(const char *header, size_t bytes, const char *word)
{
    st_file f;
    dm_err e;
    int rc = open_header(&f, header, bytes, &e);
    if (rc != DM_EMODEL) fail_msg("%s gave %s", header, dm_err_name(rc));
    assert_text(e.text, word);
    assert_null(f.map);
    assert_null(f.tensor);
}

static void a_well_formed_file_is_mapped_with_all_its_tensors(void **s)
{
    (void)s;
    st_file f;
    dm_err e;
    assert_ok_e(open_header(&f,
                            "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},"
                            "\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8]},\"none\":{\"dtype\":\"I8\",\"shape\":[0,7],\"data_offsets\":[8,8]},"
                            "\"one\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[32,33]}}",
                            33, &e),
                e);
    assert_int_equal(f.count, 4);
    const model_tensor *t = st_find(&f, "b");
    assert_non_null(t);
    assert_int_equal(t->dtype, MODEL_F32);
    assert_int_equal(t->ndim, 2);
    assert_int_equal(t->dim[1], 3);
    assert_int_equal(t->bytes, 24);
    assert_int_equal(st_find(&f, "a")->data[1], 2);
    assert_int_equal(st_find(&f, "one")->ndim, 0);
    assert_int_equal(st_find(&f, "none")->bytes, 0);
    assert_null(st_find(&f, "__metadata__"));
    assert_null(st_find(&f, "c"));
    st_close(&f);
    st_close(&f);
}

static void every_dtype_has_its_name_and_size(void **s)
{
    (void)s;
    for (int i = 0; i < MODEL_DTYPES; i++) {
        model_dtype back;
        assert_true(model_dtype_parse(model_dtype_name((model_dtype)i), &back));
        assert_int_equal(back, i);
        assert_true(model_dtype_size((model_dtype)i) >= 1);
    }
    model_dtype t;
    assert_false(model_dtype_parse("F8", &t));
}

static void hostile_header_lengths_are_refused(void **s)
{
    (void)s;
    static const uint64_t lengths[] = {0, 1, 3, 100, 101, ST_HEADER_BYTES_MAX, ST_HEADER_BYTES_MAX + 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX - 7, UINT64_MAX};
    uint8_t b[108] = {0};
    memset(b + 8, '{', 100);
    for (size_t i = 0; i < DM_COUNT(lengths); i++) {
        st_file f;
        dm_err e;
        for (int k = 0; k < 8; k++) b[k] = (uint8_t)(lengths[i] >> 8 * k);
        spit(scratch("x.safetensors"), b, sizeof b);
        assert_err(DM_EMODEL, st_open(&f, scratch("x.safetensors"), &e));
    }
    for (size_t n = 0; n < 9; n++) {
        st_file f;
        dm_err e;
        memset(b, 0, 8);
        spit(scratch("x.safetensors"), b, n);
        assert_err(DM_EMODEL, st_open(&f, scratch("x.safetensors"), &e));
    }
}

static void entries_that_do_not_add_up_are_refused(void **s)
{
    (void)s;
    refused("[]", 0, "not a JSON object");
    refused("{\"a\":{}", 0, "not JSON");
    refused("{\"a\":1}", 8, "tensor a");
    refused("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 8, "dtype");
    refused("{\"a\":{\"dtype\":\"Q4_K\",\"shape\":[1],\"data_offsets\":[0,1]}}", 8, "unknown dtype Q4_K");
    refused("{\"a\":{\"dtype\":\"I8\",\"data_offsets\":[0,1]}}", 8, "shape");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 8, "shape");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[1.5],\"data_offsets\":[0,1]}}", 8, "shape");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 8, "dimensions");
    refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 8, "too large");
    refused("{\"a\":{\"dtype\":\"I64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 8, "too large");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[9],\"data_offsets\":[0,9]}}", 8, "cut short");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[6,10]}}", 8, "cut short");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,5]}}", 8, "span 5 bytes");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[5,1]}}", 8, "backwards");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[-4,0]}}", 8, "backwards");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0]}}", 8, "data_offsets");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4,8]}}", 8, "data_offsets");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[4,8]}}", 8, "not JSON");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[3,7]}}", 8, "overlaps");
    refused("{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 8, "overlaps");
}

static void what_is_no_regular_file_is_refused_at_once(void **s)
{
    (void)s;
    st_file f;
    dm_err e;
    assert_err(DM_ENOENT, st_open(&f, scratch("nowhere"), &e));
    assert_int_equal(mkfifo(scratch("fifo"), 0600), 0);
    assert_err(DM_EMODEL, st_open(&f, scratch("fifo"), &e));
    assert_err(DM_EMODEL, st_open(&f, test_dir(), &e));
}

/* Flips bytes of the header; whatever still opens must lie inside the file. */
static void flipped_header_bytes_never_point_outside_the_file(void **s)
{
    (void)s;
    uint64_t rng = test_seed();
    dm_buf b = slurp(in_dir(synthetic("tiny"), "model-00004-of-00009.safetensors"));
    size_t header = 8 + (size_t)header_length(&b);
    int opened = 0;
    const char *path = scratch("flip.safetensors");
    char own[512];
    snprintf(own, sizeof own, "%s", path);
    spit(own, b.p, b.n);
    FILE *file = fopen(own, "r+b");
    assert_non_null(file);
    for (int i = 0; i < 4000; i++) {
        size_t at = dm_splitmix64(&rng) % header;
        uint8_t now = (uint8_t)dm_splitmix64(&rng);
        st_file f;
        dm_err e;
        fseek(file, (long)at, SEEK_SET);
        fputc(now, file);
        fflush(file);
        int rc = st_open(&f, own, &e);
        if (rc == 0) {
            opened++;
            unsigned sum = 0;
            for (size_t k = 0; k < f.count; k++)
                if (f.tensor[k].bytes) sum += f.tensor[k].data[0] + f.tensor[k].data[f.tensor[k].bytes - 1];
            assert_true(sum < 1u << 30);
            st_close(&f);
        } else assert_int_equal(rc, DM_EMODEL);
        fseek(file, (long)at, SEEK_SET);
        fputc(b.p[at], file);
    }
    fclose(file);
    assert_true(opened > 10);
    dm_buf_free(&b);
}

static void a_failed_allocation_leaks_nothing(void **s)
{
    (void)s;
    count_json_memory();
    static const char header[] = "{\"a\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[4,8]}}";
    write_safetensors(scratch("x.safetensors"), header, sizeof header - 1, data, 8);
    st_file f;
    dm_err e;
    int64_t before = dm_fault_alloc_count();
    assert_ok_e(st_open(&f, scratch("x.safetensors"), &e), e);
    int64_t total = dm_fault_alloc_count() - before;
    st_close(&f);
    for (int64_t n = 1; n <= total; n++) {
        dm_fault_alloc_after(n);
        int rc = st_open(&f, scratch("x.safetensors"), &e);
        dm_fault_alloc_after(-1);
        st_close(&f);
        assert_true(rc == 0 || rc == DM_ENOMEM || rc == DM_EMODEL);
    }
    assert_true(total > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_well_formed_file_is_mapped_with_all_its_tensors),
        cmocka_unit_test(every_dtype_has_its_name_and_size),
        cmocka_unit_test(hostile_header_lengths_are_refused),
        cmocka_unit_test(entries_that_do_not_add_up_are_refused),
        cmocka_unit_test(what_is_no_regular_file_is_refused_at_once),
        cmocka_unit_test(flipped_header_bytes_never_point_outside_the_file),
        cmocka_unit_test(a_failed_allocation_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
