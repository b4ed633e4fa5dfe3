/* What every fuzz target includes.  A target is one function, FUZZ_ENTRY: it takes any bytes, hands them to a reader,
 * and checks what comes back.  A wrong answer ends the program, so that the fuzzer keeps the input.
 *
 * Inputs are text wherever the format is text, so that mutations stay close to it and a corpus can be read:
 *   FUZZ_PART     ends one part of an input (a file, a message, …) and begins the next
 *   \x01 … \x1D   stand for longer texts that the target names at its top; these bytes are no JSON */
#ifndef DM_FUZZ_LIB_H
#define DM_FUZZ_LIB_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

#ifndef FUZZ_ENTRY
#define FUZZ_ENTRY LLVMFuzzerTestOneInput
#endif
int FUZZ_ENTRY(const uint8_t *data, size_t n);

#define FUZZ_PART 0x1E

_Noreturn void fuzz_fail(const char *file, int line, const char *fmt, ...) DM_PRINTF(3, 4);
#define FUZZ_CHECK(x) ((x) ? (void)0 : fuzz_fail(__FILE__, __LINE__, "%s", #x))
#define FUZZ_FAIL(...) fuzz_fail(__FILE__, __LINE__, __VA_ARGS__)
#define FUZZ_OK(x)                                                                   \
    do {                                                                             \
        int rc_ = (x);                                                               \
        if (rc_ < 0) fuzz_fail(__FILE__, __LINE__, "%s: %s", #x, dm_err_name(rc_));  \
    } while (0)

typedef struct fuzz_bytes { const uint8_t *p; size_t n; } fuzz_bytes;

/* Takes bytes from the front; 0 when there are none. */
uint8_t fuzz_byte(fuzz_bytes *b);
/* The bytes up to the next FUZZ_PART or the end; *b goes on behind it. */
fuzz_bytes fuzz_part(fuzz_bytes *b);

/* A file in memory with these bytes and then `zeros` more, replacing what it held; its path.  slot: 0 … 3. */
const char *fuzz_file(int slot, const void *p, size_t n, size_t zeros);
/* A directory of this program's own, removed at exit. */
const char *fuzz_dir(void);
/* dir/name with these bytes and `zeros` more; NULL bytes: no such file. */
void fuzz_dir_file(const char *name, const void *p, size_t n, size_t zeros);

/* config.json of the smallest model there is, with 1 to 3 layers of the ratios 4, 128 and 0; static storage. */
const char *fuzz_config(int layers);

/* A failure must come with its code, a place and one line of valid text that says something. */
void fuzz_told(int rc, const dm_err *e);

#endif
