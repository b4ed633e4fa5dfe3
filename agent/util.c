/* util.c — session ids and a few lines around jansson. */
#include "agent/agent_int.h"

#include <string.h>

const char *json_str(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

int64_t json_int(const json_t *o, const char *key, int64_t def)
{
    const json_t *v = json_object_get(o, key);
    return json_is_integer(v) ? json_integer_value(v) : def;
}

/* jansson does not look at every return value of the callback, so a failure is kept here. */
typedef struct line { dm_buf text; bool failed; } line;

static int line_part(const char *p, size_t n, void *ctx)
{
    line *l = ctx;
    if (!l->failed) l->failed = dm_buf_append(&l->text, p, n) < 0;
    return l->failed ? -1 : 0;
}

char *json_line(const json_t *v)
{
    line l = { 0 };
    int rc = json_dump_callback(v, line_part, &l, JSON_COMPACT | JSON_ENCODE_ANY | JSON_PRESERVE_ORDER);
    if (rc == 0 && !l.failed && l.text.p) return (char *)l.text.p;
    dm_buf_free(&l.text);
    return NULL;
}

/* Crockford's base32, most significant first: 10 characters hold 48 bits of time (the first has 3 bits of it),
 * 16 hold 80 random bits. */
void dm_session_id_new(char out[DM_SESSION_ID_CHARS + 1])
{
    static const char digits[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    uint64_t ms = (uint64_t)dm_wall_ms();
    uint8_t r[16];
    dm_random(r, sizeof r);
    for (int i = 9; i >= 0; i--, ms >>= 5) out[i] = digits[ms & 31];
    for (int i = 0; i < 16; i++) out[10 + i] = digits[r[i] & 31];
    out[DM_SESSION_ID_CHARS] = 0;
}
