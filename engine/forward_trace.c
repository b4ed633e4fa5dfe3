/* forward_trace.c — see trace_int.h. */
#include "engine/forward_int.h"

const char *forward_tag_name(forward_tag tag) {
    static const char *const names[] = {
#define X(t, name) name,
        FORWARD_TRACE_MAP(X)
#undef X
    };
    return tag >= 0 && tag < FT_COUNT ? names[tag] : "?";
}

void forward_set_trace(dm_forward *df, const forward_trace *t) {
    fwd *f = fwd_of(df);
    f->trace = t ? *t : (forward_trace){0};
    f->tracing = t && t->row;
}

bool trace_forces(const fwd *f) { return f->trace.force != NULL; }

void trace_one(const fwd *f, forward_tag tag, int layer, int64_t pos, const void *data, size_t bytes) {
    if (f->tracing) f->trace.row(f->trace.ctx, tag, layer, pos, data, bytes);
}

void trace_bytes(const fwd *f, forward_tag tag, int layer, const uint8_t *base, int64_t stride, int64_t bytes) {
    if (!f->tracing) return;
    for (int r = 0; r < f->rows; r++) trace_one(f, tag, layer, f->row[r].pos, base + r * stride, (size_t)bytes);
}
void trace_f32(const fwd *f, forward_tag tag, int layer, const float *base, int64_t stride, int64_t count) {
    trace_bytes(f, tag, layer, (const uint8_t *)base, stride * 4, count * 4);
}
void trace_i32(const fwd *f, forward_tag tag, int layer, const int32_t *base, int64_t stride, int64_t count) {
    trace_bytes(f, tag, layer, (const uint8_t *)base, stride * 4, count * 4);
}

void trace_force(const fwd *f, forward_tag tag, int layer, float *base, int64_t stride) {
    if (!f->trace.force) return;
    for (int r = 0; r < f->rows; r++) f->trace.force(f->trace.ctx, tag, layer, f->row[r].pos, base + r * stride);
}
