/* agent_int.h — what the files of the agent share and nobody else sees. */
#ifndef DM_AGENT_INT_H
#define DM_AGENT_INT_H

#include "agent/agent.h"

/* ---- journal_claim.c: one runner per session -------------------------------------------- */

/* Locks dir/ID; *fd keeps the lock.  DM_EBUSY names the holder. */
int claim_take(const char *dir, const char *session, int *fd, dm_err *e);
void claim_drop(int fd);
bool claim_held(const char *dir, const char *session);

/* ---- journal_head.c: the row that lists a session ----------------------------------------- */

/* Changes head (an object, maybe empty) by one event. */
int head_apply(json_t *head, const char *session, const json_t *event);

/* ---- small things -------------------------------------------------------------------------- */

/* s or "" of a string member; the number or def of an integer member. */
const char *json_str(const json_t *o, const char *key);
int64_t json_int(const json_t *o, const char *key, int64_t def);
/* Compact text of a value, key order kept; NULL when out of memory; free with dm_free. */
char *json_line(const json_t *v);

#endif
