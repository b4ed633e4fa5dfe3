/* The environment of a command: an allowlist, because every denylist misses a name (DATABASE_URL, GH_PAT, …). */
#include <string.h>

#include "sandbox/wire_int.h"

static const char *const kept[] = {"PATH", "HOME", "LANG", "TZ", "USER", "SHELL"};

/* The same for everyone: no pager, no prompt, no colour, no buffering; nothing waits for a person. */
static const char *const fixed[] = {
    "TERM=dumb", "TMPDIR=/tmp", "PAGER=cat", "GIT_PAGER=cat", "GIT_TERMINAL_PROMPT=0", "GIT_OPTIONAL_LOCKS=0",
    "NO_COLOR=1", "CI=1", "PYTHONUNBUFFERED=1", "DEBIAN_FRONTEND=noninteractive",
};

static bool allowed(const char *entry) {
    for (size_t i = 0; i < DM_COUNT(kept); i++) {
        const size_t n = strlen(kept[i]);
        if (strncmp(entry, kept[i], n) == 0 && entry[n] == '=') return true;
    }
    return strncmp(entry, "LC_", 3) == 0 && strchr(entry, '=');
}

int sb_environ(dm_buf *out, const char *const *from) {
    int rc = 0;
    bool path = false;
    for (size_t i = 0; rc == 0 && from && from[i]; i++) {
        if (!allowed(from[i]) || strlen(from[i]) > 32768) continue;
        path |= dm_str_prefix(from[i], "PATH=");
        rc = sb_put_text(out, SB_T_ENV, from[i]);
    }
    if (rc == 0 && !path) rc = sb_put_text(out, SB_T_ENV, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    for (size_t i = 0; rc == 0 && i < DM_COUNT(fixed); i++) rc = sb_put_text(out, SB_T_ENV, fixed[i]);
    return rc;
}
