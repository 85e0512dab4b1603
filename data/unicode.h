/* What GPT-2's pattern asks of a character: is it white space, a letter, a number? By Unicode
 * 16.0.0, which the tokenizers library (0.23) has. A regular expression library would answer by the
 * version that it was built with: with PCRE2 10.42, of Unicode 14, 9,392 code points differ. */
#ifndef DATA_UNICODE_H
#define DATA_UNICODE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    UNICODE_OTHER,
    UNICODE_SPACE,  /* the property White_Space */
    UNICODE_LETTER, /* the general category L */
    UNICODE_NUMBER, /* N */
} UnicodeClass;

/* `code` must be a code point (data/utf8.h). */
UnicodeClass unicode_class(uint32_t code);

#ifdef __cplusplus
}
#endif
#endif
