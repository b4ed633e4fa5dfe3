/* policy.c — allow or ask, for one call.
 *
 * The wall is the sandbox; asking is for what it does not hold.
 *
 *   effects            confined (full, partial)       not confined (none)
 *   none, read         allow                          allow
 *   write, external    allow; ask with `ask`          ask
 *
 * With `yes` the person has answered beforehand. */
#include "agent/session_int.h"

policy policy_for(const dm_session_opts *o, dm_sandbox_level level, dm_effects effects)
{
    if (effects == DM_FX_NONE || effects == DM_FX_READ) return POLICY_ALLOW;
    if (o->yes) return POLICY_ALLOW;
    return o->ask || level == DM_SANDBOX_NONE ? POLICY_ASK : POLICY_ALLOW;
}
