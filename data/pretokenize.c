/* The pattern by hand. Its alternatives begin with a quote, with a space or with what they repeat,
 * so the first character or two choose among them, and none but \s+(?!\S) ever gives a character
 * back. test_bpe.c compares with PCRE2 running the pattern, which is several times slower. */
#include "data/pretokenize.h"

#include <string.h>

#include "data/unicode.h"
#include "data/utf8.h"

#define O UNICODE_OTHER
#define S UNICODE_SPACE
#define L UNICODE_LETTER
#define N UNICODE_NUMBER
static const unsigned char ascii_class[128] = {
    O, O, O, O, O, O, O, O, O, S, S, S, S, S, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O,
    S, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, N, N, N, N, N, N, N, N, N, N, O, O, O, O, O, O,
    O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O,
    O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O,
};
#undef O
#undef S
#undef L
#undef N

/* The class and length of the character that text[0..bytes), bytes > 0, begins with. */
static inline UnicodeClass class_at(const char *text, size_t bytes, size_t *length) {
    unsigned char first = (unsigned char)text[0];
    *length = 1;
    if (first < 0x80) return ascii_class[first];
    uint32_t code;
    size_t decoded = utf8_decode(text, bytes, &code);
    if (decoded == 0) return UNICODE_OTHER;
    *length = decoded;
    return unicode_class(code);
}

/* The end of the run of this class that goes on at `offset`. `last` receives where its last
 * character begins, if one was passed. */
static inline size_t run_end(const char *text, size_t bytes, size_t offset, UnicodeClass class,
                             size_t *last) {
    size_t length;
    while (offset < bytes && class_at(text + offset, bytes - offset, &length) == class) {
        *last = offset;
        offset += length;
    }
    return offset;
}

/* 's|'t|'re|'ve|'m|'ll|'d, or 0. */
static size_t contraction(const char *text, size_t bytes) {
    if (bytes >= 2 && text[0] == '\'') {
        if (text[1] != '\0' && strchr("stmd", text[1]) != NULL) return 2;
        if (bytes >= 3 && (memcmp(text + 1, "re", 2) == 0 || memcmp(text + 1, "ve", 2) == 0 ||
                           memcmp(text + 1, "ll", 2) == 0))
            return 3;
    }
    return 0;
}

size_t pretokenize_word(const char *text, size_t bytes) {
    size_t length, last = 0;
    UnicodeClass class = class_at(text, bytes, &length);
    if (class != UNICODE_SPACE) {
        size_t short_word = contraction(text, bytes);
        return short_word != 0 ? short_word : run_end(text, bytes, length, class, &last);
    }
    if (text[0] == ' ' && bytes > 1) {
        size_t next;
        class = class_at(text + 1, bytes - 1, &next);
        if (class != UNICODE_SPACE) return run_end(text, bytes, 1 + next, class, &last);
    }
    size_t end = run_end(text, bytes, length, UNICODE_SPACE, &last);
    /* \s+(?!\S): before a non-space, a run of several gives its last one to what follows. */
    return end == bytes || last == 0 ? end : last;
}
