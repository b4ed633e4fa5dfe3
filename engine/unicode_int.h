/* Character classes of Unicode 16.0, the version that the tokenizer was trained with.  The system's own
 * libraries know other versions (PCRE2 10.42: 14.0), and thousands of characters would be split differently. */
#ifndef DM_ENGINE_UNICODE_INT_H
#define DM_ENGINE_UNICODE_INT_H

#include <stddef.h>
#include <stdint.h>

typedef struct unicode_range { uint32_t first, last; } unicode_range;
typedef struct unicode_set {
    const unicode_range *ranges; /* ascending, disjoint, not touching */
    size_t count;
} unicode_set;

extern const unicode_set unicode_number;       /* N */
extern const unicode_set unicode_letter_mark;  /* L, M */
extern const unicode_set unicode_punct_symbol; /* P, S */
extern const unicode_set unicode_space;        /* \s */

#endif
