/* UTF-8 (RFC 3629), one character at a time. */
#ifndef DATA_UTF8_H
#define DATA_UTF8_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UTF8_CODES 0x110000u /* code points are below this */

/* The number of bytes, 1 to 4, of the character that text[0..bytes) begins with, and its code
 * point; 0 if no valid character begins there (none left, cut short, overlong, a surrogate, too
 * large). */
size_t utf8_decode(const char *text, size_t bytes, uint32_t *code);

/* Writes the character and returns its number of bytes. `code` must be a code point. */
size_t utf8_encode(uint32_t code, char text[4]);

#ifdef __cplusplus
}
#endif
#endif
