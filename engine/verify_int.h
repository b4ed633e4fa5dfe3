/* verify_int.h — the pieces of a conformance run: what a file of vectors asks for (vref), what a run of the
 * model showed (vrec), and one comparison per numeric path. */
#ifndef DM_VERIFY_INT_H
#define DM_VERIFY_INT_H

#include "engine/model_obj_int.h"
#include "engine/trace_int.h"

/* ---- what a file asks for ----------------------------------------------------------------------- */

typedef struct vref_tensor {
    const char *name; /* owned by the vref */
    model_dtype dtype;
    int ndim;
    int64_t dim[MODEL_DIMS_MAX];
    int64_t bytes;
    const uint8_t *data; /* golden: the values; NULL: only their SHA-256 is known */
    dm_hash sha256;
} vref_tensor;

typedef struct vref {
    bool golden;       /* values, not hashes */
    bool plain;        /* made by the plain path */
    bool full;         /* inputs and outputs of sublayers at every position */
    int64_t n;         /* tokens of the run */
    int32_t *ids;      /* [n + 1] */
    int32_t *pos;      /* [npos] chosen positions, ascending */
    int64_t npos;
    int32_t *cut;      /* [ncut] positions of the cuts, ascending */
    int64_t ncut;
    vref_tensor *tensor;
    size_t count;
    st_file file;      /* golden: keeps the values mapped */
    dm_buf text;       /* hash file: keeps the names */
} vref;

/* "# NAME MODE n N seed S full F" and one line per tensor: name dtype ndim dims… sha256 */
int vref_read_hashes(vref *r, dm_buf *text, const dm_config *c, dm_err *e); /* takes over the text */
int vref_read_golden(vref *r, const char *safetensors_path, dm_err *e);
void vref_free(vref *r);
/* One line "name dtype ndim dims… sha256", cut up in place; false: not such a line. */
bool vref_parse_line(char *line, vref_tensor *out);

/* ---- names ------------------------------------------------------------------------------------------ */

typedef enum vname_kind { VN_TOKENS, VN_POS, VN_ROWS, VN_CUT } vname_kind;
typedef struct vname {
    vname_kind kind;
    forward_tag tag; /* VN_ROWS; VN_CUT: the K or S rows */
    int layer;       /* as in trace_int.h: −1 the trunk's head, num_hidden_layers the MTP layer */
    bool mtp;        /* layer is the MTP layer */
    int64_t cut;
    bool prev;       /* VN_CUT: lane A of the previous window, else the rows of the unfinished one */
} vname;
bool vname_parse(const dm_config *c, const char *name, vname *out);
/* Order of computation: smaller comes first. */
int vname_order(const vname *v);
/* "layers.3." / "mtp.0." / "" and the tag's name, as the vectors spell it. */
void vname_text(const dm_config *c, forward_tag tag, int layer, char out[96]);

/* ---- what a run showed ---------------------------------------------------------------------------------- */

typedef struct vrow { int64_t pos; size_t at, n; } vrow;
typedef struct vlane { dm_buf data; vrow *row; size_t nrows, cap; } vlane;
typedef struct vrec {
    const dm_config *c;
    vlane *lane;       /* [FT_COUNT][layers + 2], the last column is layer −1 */
    uint8_t *keep;     /* [n] bits: VREC_POS, VREC_K4, VREC_K128 */
    int64_t n;
    bool full, all;    /* all: also the rows that judging the fast path takes */
    int rc;            /* DM_ENOMEM once a row could not be kept */
} vrec;
#define VREC_POS 1
#define VREC_K4 2
#define VREC_K128 4

int vrec_init(vrec *r, const dm_config *c, const vref *f, bool all, dm_err *e);
void vrec_free(vrec *r);
void vrec_row(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t nbytes); /* a trace's row */
/* NULL: not seen. */
const void *vrec_get(const vrec *r, forward_tag tag, int layer, int64_t pos, size_t *nbytes);
/* The bytes of a tensor of the file as this run showed them.  DM_EMISMATCH with a sentence in e when the run has no
 * such thing or of another shape. */
int vrec_tensor(const vrec *r, const vref *f, const vref_tensor *t, const vname *name, dm_buf *out, dm_err *e);
/* Position, or entry number, that row `row` of the tensor stands for. */
int64_t vrec_row_pos(const vref *f, const vname *name, int64_t row);

/* One run of the model over the file's ids, MTP layer included (on the streams that `streams` holds). */
typedef struct vrun {
    const dm_model *m;
    const dm_verify_opts *o; /* threads and chunk */
    dm_numerics numerics;
    const char *isa, *what;
    const vref *f;
    const forward_trace *trace;
    const vrec *streams;
    dm_progress fn;
    void *ctx;
    char numerics_id[48];    /* out */
} vrun;
int vrun_go(vrun *v, dm_err *e);

/* ---- comparisons --------------------------------------------------------------------------------------------- */

/* The first difference in the order of computation wins the report's `first`. */
typedef struct vfirst { int order; int64_t pos; char text[256]; } vfirst;
void vfirst_offer(vfirst *f, int order, int64_t pos, const char *fmt, ...) DM_PRINTF(4, 5);

int verify_exact(const vrec *r, const vref *f, dm_verify_report *out, vfirst *first, dm_err *e);
int verify_plain(const vrec *r, const vref *f, dm_verify_report *out, vfirst *first, dm_err *e);
/* r holds every row of an exact run. */
int verify_fast(vrun *v, const vrec *r, dm_verify_report *out, vfirst *first, dm_err *e);

int verify_tokenizer(const char *dir, const dm_buf *file, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e);
int verify_chat(const char *dir, const dm_buf *file, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e);
int verify_checkpoint(const char *dir, dm_buf *file, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e);

#endif
