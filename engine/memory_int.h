/* memory_int.h — the bound on memory, read from files that a test may put elsewhere. */
#ifndef DM_MEMORY_INT_H
#define DM_MEMORY_INT_H

#include "engine/engine.h"

/* cgroups: a file like /proc/self/cgroup; mount: where the hierarchies are. */
int64_t dm_memory_limit_at(const char *cgroups, const char *mount);

#endif
