/* A part of a test program, as one needs under a slow checker. What cannot be done ends the program:
 * a typing error must not look like a test that passed. */
#ifndef TEST_PART_H
#define TEST_PART_H

#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* TEST_FILTER='*cuda*': the tests whose names match, as files' names do in a shell. */
#define choose_tests(tests) choose_tests_of(tests, sizeof(tests) / sizeof(tests)[0])
static inline void choose_tests_of(struct CMUnitTest *tests, size_t n) {
    const char *filter = getenv("TEST_FILTER");
    if (!filter || !*filter) return;
    size_t chosen = n;
    for (size_t i = 0; i < n; i++) {
        if (fnmatch(filter, tests[i].name, 0) == 0) continue;
        tests[i].name = NULL; /* cmocka passes over it */
        chosen--;
    }
    if (chosen) return;
    fprintf(stderr, "TEST_FILTER=%s matches no test here\n", filter);
    exit(2);
}

/* TEST_STRIDE=n: each n-th of many cases. */
static inline size_t stride(void) {
    const char *text = getenv("TEST_STRIDE");
    if (!text || !*text) return 1;
    char *end;
    const long n = strtol(text, &end, 10);
    if (n >= 1 && !*end) return (size_t)n;
    fprintf(stderr, "TEST_STRIDE=%s is no whole number of at least 1\n", text);
    exit(2);
}

/* Of n cases that are alike, one stride-th, and at least one. */
static inline size_t part_of(size_t n) {
    const size_t part = n / stride();
    return part ? part : 1;
}

#endif
