#include "data/unicode.h"

#include <pthread.h>

#include "data/unicode_ranges.inc"
#include "data/utf8.h"

static const uint32_t space_ranges[][2] = {
    {0x9, 0xD},       {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
    {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000},
};

/* One byte a code point, filled at the first use. Most of its pages stay untouched and take no
 * memory. */
static unsigned char class_of[UTF8_CODES];
static pthread_once_t filled = PTHREAD_ONCE_INIT;

#define FILL(ranges, value)                                     \
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) \
        for (uint32_t code = ranges[i][0]; code <= ranges[i][1]; code++) class_of[code] = value;

static void fill(void){FILL(space_ranges, UNICODE_SPACE) FILL(letter_ranges, UNICODE_LETTER)
                           FILL(number_ranges, UNICODE_NUMBER)}

UnicodeClass unicode_class(uint32_t code) {
    pthread_once(&filled, fill);
    return class_of[code];
}
