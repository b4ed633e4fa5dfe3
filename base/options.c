/* Options: one table is the parser, the help and the environment names. */
#include "base.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *field(const dm_opt *o, void *dst) { return (char *)dst + o->offset; }

static int bad_value(const dm_opt *o, const char *from, const char *text, const char *want, dm_err *e)
{
    return dm_err_set(e, DM_EUSAGE, "options", "%s%s wants %s, not '%s'", from, o->name, want, text);
}

static bool in_range(const dm_opt *o, double v) { return (o->min == 0 && o->max == 0) || (v >= o->min && v <= o->max); }

static int set_number(const dm_opt *o, void *dst, const char *from, const char *text, dm_err *e)
{
    char *end, want[96];
    errno = 0;
    if (o->type == DM_OPT_NUMBER) {
        double v = strtod(text, &end);
        snprintf(want, sizeof want, o->min == 0 && o->max == 0 ? "a number" : "a number from %g to %g", o->min, o->max);
        if (end == text || *end || !isfinite(v) || !in_range(o, v)) return bad_value(o, from, text, want, e);
        *(double *)field(o, dst) = v;
        return 0;
    }
    long long v = strtoll(text, &end, 10);
    bool ok = end != text && errno == 0;
    if (o->type == DM_OPT_BYTES && ok && *end) {
        static const char units[] = "KMGT";
        const char *u = strchr(units, *end >= 'a' ? *end - 32 : *end);
        if (u) {
            int shift = 10 * (int)(u - units + 1);
            ok = v >= 0 && v <= (INT64_MAX >> shift);
            if (ok) v <<= shift;
            end++;
            if (*end == 'i') end++;
            if (*end == 'B') end++;
        }
    }
    snprintf(want, sizeof want, o->min == 0 && o->max == 0 ? (o->type == DM_OPT_BYTES ? "a size such as 512M or 4G" : "a whole number")
                                                             : "a whole number from %.0f to %.0f", o->min, o->max);
    if (!ok || *end || (o->type == DM_OPT_BYTES && v < 0) || !in_range(o, (double)v)) return bad_value(o, from, text, want, e);
    *(int64_t *)field(o, dst) = v;
    return 0;
}

static bool one_of(const char *choices, const char *text)
{
    size_t n = strlen(text);
    for (const char *c = choices; n && *c;) {
        size_t len = strcspn(c, "|");
        if (len == n && !memcmp(c, text, n)) return true;
        c += len + (c[len] == '|');
    }
    return false;
}

static int set_value(const dm_opt *o, void *dst, const char *from, const char *text, dm_err *e)
{
    switch (o->type) {
    case DM_OPT_FLAG:
        if (!one_of("1|true|yes|on|0|false|no|off|", text) && *text) return bad_value(o, from, text, "true or false", e);
        *(bool *)field(o, dst) = one_of("1|true|yes|on", text);
        return 0;
    case DM_OPT_STR: *(const char **)field(o, dst) = text; return 0;
    case DM_OPT_STRS: {
        dm_opt_strs *s = field(o, dst);
        if (s->n == DM_OPT_STRS_MAX) return dm_err_set(e, DM_EUSAGE, "options", "%s%s may be given %d times", from, o->name, DM_OPT_STRS_MAX);
        s->v[s->n++] = text;
        return 0;
    }
    case DM_OPT_ENUM: {
        char want[160];
        snprintf(want, sizeof want, "one of %s", o->choices);
        if (!one_of(o->choices, text)) return bad_value(o, from, text, want, e);
        *(const char **)field(o, dst) = text;
        return 0;
    }
    case DM_OPT_HELP: return 0;
    default: return set_number(o, dst, from, text, e);
    }
}

static int unknown_option(const dm_opt *table, size_t count, const char *arg, dm_err *e)
{
    const char *name = arg + strspn(arg, "-"), *near_name = NULL;
    int best = 3;
    for (size_t i = 0; i < count; i++) {
        int d = table[i].help ? dm_text_distance(name, strlen(name), table[i].name, strlen(table[i].name)) : best;
        if (d < best) best = d, near_name = table[i].name;
    }
    if (near_name) return dm_err_set(e, DM_EUSAGE, "options", "unknown option %s; did you mean --%s?", arg, near_name);
    return dm_err_set(e, DM_EUSAGE, "options", "unknown option %s; --help lists them", arg);
}

static const dm_opt *find_option(const dm_opt *table, size_t count, const char *arg, size_t name_bytes, bool *negated)
{
    *negated = false;
    for (size_t i = 0; i < count; i++) {
        const dm_opt *o = &table[i];
        if (arg[1] != '-') {
            if (o->letter && arg[1] == o->letter && name_bytes == 1) return o;
            continue;
        }
        const char *name = arg + 2;
        if (strlen(o->name) == name_bytes && !memcmp(o->name, name, name_bytes)) return o;
        if (o->type == DM_OPT_FLAG && name_bytes > 3 && !memcmp(name, "no-", 3) && strlen(o->name) == name_bytes - 3 && !memcmp(o->name, name + 3, name_bytes - 3)) {
            *negated = true;
            return o;
        }
    }
    return NULL;
}

static int parse_args(const dm_opt *table, size_t count, void *dst, int argc, char **argv, dm_opt_result *out, dm_err *e)
{
    bool rest = false;
    for (int i = 0; i < argc; i++) {
        char *arg = argv[i];
        if (rest || arg[0] != '-' || !arg[1]) { /* "-" alone is an argument: standard input */
            out->args[out->nargs++] = arg;
            continue;
        }
        if (!strcmp(arg, "--")) {
            rest = true;
            continue;
        }
        size_t name_bytes = strcspn(arg, "=") - (arg[1] == '-' ? 2 : 1);
        bool negated;
        const dm_opt *o = find_option(table, count, arg, name_bytes, &negated);
        if (!o) return unknown_option(table, count, arg, e);
        char *eq = strchr(arg, '=');
        if (o->type == DM_OPT_HELP) {
            out->help = true;
            continue;
        }
        if (o->type == DM_OPT_FLAG) {
            if (negated && eq) return dm_err_set(e, DM_EUSAGE, "options", "%s takes no value", arg);
            int rc = set_value(o, dst, "--", negated ? "false" : eq ? eq + 1 : "true", e);
            if (rc < 0) return rc;
            continue;
        }
        const char *value = eq ? eq + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!value) return dm_err_set(e, DM_EUSAGE, "options", "--%s wants a value (%s)", o->name, o->metavar ? o->metavar : o->choices ? o->choices : "see --help");
        int rc = set_value(o, dst, "--", value, e);
        if (rc < 0) return rc;
    }
    return 0;
}

int dm_opt_parse(const dm_opt *table, size_t count, void *dst, int argc, char **argv, dm_opt_result *out, dm_err *e)
{
    *out = (dm_opt_result){0};
    for (size_t i = 0; i < count; i++) {
        const dm_opt *o = &table[i];
        const char *env = o->env ? getenv(o->env) : NULL;
        if (o->def) {
            int rc = set_value(o, dst, "--", o->def, e);
            DM_ASSERT(rc == 0); /* our own table */
        }
        if (env && *env) {
            char from[80];
            snprintf(from, sizeof from, "environment variable %s: ", o->env);
            int rc = set_value(o, dst, from, env, e);
            if (rc < 0) return rc;
        }
    }
    out->args = dm_calloc((size_t)argc + 1, sizeof *out->args);
    if (!out->args) return dm_err_set(e, DM_ENOMEM, "options", "out of memory");
    int rc = parse_args(table, count, dst, argc, argv, out, e);
    if (rc < 0) {
        dm_free(out->args);
        *out = (dm_opt_result){0};
    }
    return rc;
}

int dm_opt_help(const dm_opt *table, size_t count, dm_buf *out)
{
    int rc = 0;
    for (size_t i = 0; i < count && rc == 0; i++) {
        const dm_opt *o = &table[i];
        if (!o->help) continue;
        static const char *const meta[] = {[DM_OPT_FLAG] = "", [DM_OPT_INT] = "N", [DM_OPT_BYTES] = "SIZE", [DM_OPT_NUMBER] = "X", [DM_OPT_STR] = "TEXT", [DM_OPT_STRS] = "TEXT", [DM_OPT_ENUM] = "", [DM_OPT_HELP] = ""};
        const char *m = o->metavar ? o->metavar : o->type == DM_OPT_ENUM ? o->choices : meta[o->type];
        char left[96], letter[8] = "    ";
        if (o->letter) snprintf(letter, sizeof letter, "-%c, ", o->letter);
        snprintf(left, sizeof left, "  %s--%s%s%s", letter, o->name, *m ? " " : "", m);
        rc = dm_buf_printf(out, strlen(left) > 34 ? "%s\n%36s%s" : "%-36s%s%s", left, "", o->help);
        if (rc == 0 && o->def && *o->def && o->type != DM_OPT_FLAG) rc = dm_buf_printf(out, " (default %s)", o->def);
        if (rc == 0 && o->env) rc = dm_buf_printf(out, " [%s]", o->env);
        if (rc == 0) rc = dm_buf_byte(out, '\n');
    }
    return rc;
}
