/* A part of a test program, as one needs under a slow checker. */
#ifndef TEST_PART_H
#define TEST_PART_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

/* TEST_FILTER='*cuda*': the tests whose names are so; * and ? as in a shell. */
static inline void choose_tests(void) {
    const char *filter = getenv("TEST_FILTER");
    if (filter && *filter) cmocka_set_test_filter(filter);
}

/* TEST_STRIDE=n: each n-th of many cases. */
static inline size_t stride(void) {
    const char *text = getenv("TEST_STRIDE");
    const long n = text ? strtol(text, NULL, 10) : 1;
    return n > 1 ? (size_t)n : 1;
}

#endif
