/* Named fault points.  Armed by tests, or by main from the environment; a disarmed point costs one load. */
#include "base.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { POINTS_MAX = 16, NAME_MAX_BYTES = 48 };
typedef struct point {
    char name[NAME_MAX_BYTES];
    int64_t pass;  /* acts on this pass, counted from 1 */
    bool sticky;   /* and on every later one ("NAME:3+=fail") */
    bool kill;
    int64_t seen;
} point;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static point points[POINTS_MAX]; /* under lock */
static int npoints;              /* under lock */
static _Atomic bool armed;

static int parse_one(const char *s, size_t n, point *p, dm_err *e)
{
    char text[128];
    if (n >= sizeof text) return dm_err_set(e, DM_EUSAGE, "fault", "fault spec too long");
    memcpy(text, s, n);
    text[n] = 0;
    char *eq = strchr(text, '='), *colon = strchr(text, ':');
    if (!eq || (strcmp(eq + 1, "kill") && strcmp(eq + 1, "fail")))
        return dm_err_set(e, DM_EUSAGE, "fault", "fault spec '%s' is not NAME[:N[+]]=kill|fail", text);
    *eq = 0;
    *p = (point){.pass = 1, .kill = !strcmp(eq + 1, "kill")};
    if (colon && colon < eq) {
        *colon = 0;
        char *end;
        p->pass = strtoll(colon + 1, &end, 10);
        if (*end == '+') p->sticky = true, end++;
        if (*end || p->pass < 1) return dm_err_set(e, DM_EUSAGE, "fault", "fault spec: bad pass number behind '%s'", text);
    }
    if (!*text || strlen(text) >= sizeof p->name) return dm_err_set(e, DM_EUSAGE, "fault", "fault spec: bad name '%s'", text);
    strcpy(p->name, text);
    return 0;
}

int dm_fault_arm(const char *spec, dm_err *e)
{
    point parsed[POINTS_MAX];
    int n = 0, rc = 0;
    for (const char *s = spec ? spec : ""; *s && rc == 0;) {
        size_t len = strcspn(s, ",");
        if (n == POINTS_MAX) return dm_err_set(e, DM_ELIMIT, "fault", "more than %d fault points", POINTS_MAX);
        if (len) rc = parse_one(s, len, &parsed[n++], e);
        s += len + (s[len] == ',');
    }
    if (rc < 0) return rc;
    pthread_mutex_lock(&lock);
    memcpy(points, parsed, sizeof(point) * (size_t)n);
    npoints = n;
    atomic_store(&armed, n > 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

bool dm_fault(const char *name)
{
    if (!atomic_load_explicit(&armed, memory_order_relaxed)) return false;
    bool act = false, fatal = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < npoints; i++) {
        if (strcmp(points[i].name, name)) continue;
        int64_t pass = ++points[i].seen;
        if (pass == points[i].pass || (points[i].sticky && pass > points[i].pass)) act = true, fatal |= points[i].kill;
    }
    pthread_mutex_unlock(&lock);
    if (fatal) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    return act;
}
