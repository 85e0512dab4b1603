/* What the last error was said to be. */
#ifndef TEST_SAID_H
#define TEST_SAID_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/error.h"

/* Fails unless `part` is in the sentence. */
static inline void assert_said(const char *part) {
    if (!strstr(error_message(), part))
        fail_msg("expected \"%s\" in the sentence \"%s\"", part, error_message());
}

#endif
