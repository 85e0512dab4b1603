/* The last error sentence of each thread, and the fatal exit. */
#include "runtime/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Long enough for a sentence with two paths, or for a memory plan as a table. */
#define MESSAGE_BYTES 8192

/* A new sentence is written into the buffer that error_message() does not show, so its arguments
 * may include the old one. */
static _Thread_local char messages[2][MESSAGE_BYTES];
static _Thread_local int current;

bool error_set(const char *format, ...) {
    char *message = messages[1 - current];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(message, MESSAGE_BYTES, format, arguments);
    va_end(arguments);
    if (length >= MESSAGE_BYTES) memcpy(message + MESSAGE_BYTES - 4, "...", 4);
    current = 1 - current;
    return false;
}

const char *error_message(void) { return messages[current]; }

void error_fatal(const char *file, int line, const char *format, ...) {
    fflush(stdout);
    fprintf(stderr, "%s:%d: ", file, line);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}
