/* Tokens that count up, so that each tells its place: in memory, and as a shard. */
#ifndef TEST_COUNTING_H
#define TEST_COUNTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "data/dataset.h"

/* first, first + 1, …: `count` of them, to be freed, or owned by a dataset. */
static inline int32_t *counting(size_t count, int32_t first) {
    int32_t *tokens = malloc(count * sizeof *tokens);
    for (size_t i = 0; i < count; i++) tokens[i] = first + (int32_t)i;
    return tokens;
}

/* Fails the test if it fails. */
static inline void put_shard(const char *path, size_t count, int32_t first) {
    int32_t *tokens = counting(count, first);
    assert_true(dataset_write_shard(path, tokens, count));
    free(tokens);
}

#endif
