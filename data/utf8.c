#include "data/utf8.h"

size_t utf8_decode(const char *text, size_t bytes, uint32_t *code) {
    if (bytes == 0) return 0;
    const unsigned char *c = (const unsigned char *)text;
    if (c[0] < 0x80) {
        *code = c[0];
        return 1;
    }
    size_t length;
    uint32_t least; /* the smallest code point that needs this length: a smaller one is overlong */
    if ((c[0] & 0xE0) == 0xC0)
        length = 2, least = 0x80;
    else if ((c[0] & 0xF0) == 0xE0)
        length = 3, least = 0x800;
    else if ((c[0] & 0xF8) == 0xF0)
        length = 4, least = 0x10000;
    else
        return 0;
    if (bytes < length) return 0;
    uint32_t value = c[0] & (0xFFu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((c[i] & 0xC0) != 0x80) return 0;
        value = value << 6 | (c[i] & 0x3Fu);
    }
    if (value < least || value >= UTF8_CODES || (value >= 0xD800 && value < 0xE000)) return 0;
    *code = value;
    return length;
}

size_t utf8_encode(uint32_t code, char text[4]) {
    if (code < 0x80) {
        text[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6) text[i] = (char)(0x80 | (code & 0x3F));
    text[0] = (char)(0xF00u >> length | code); /* length ones, then a zero */
    return length;
}
