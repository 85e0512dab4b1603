/* Distinct byte strings, numbered from 0 in the order in which they were first added. */
#ifndef DATA_STRING_TABLE_H
#define DATA_STRING_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All zeros is an empty table. */
typedef struct {
    char *text; /* the strings, one after another */
    size_t text_bytes, text_capacity;
    size_t *end; /* (count) where each ends in text */
    uint32_t count, capacity;
    uint32_t *slot, slots; /* open addressing: number + 1, or 0; slots is a power of two */
} StringTable;

/* The number of this string, which is added if it is new: then it is count - 1. False with
 * error_message(). */
bool string_table_add(StringTable *table, const char *text, size_t bytes, uint32_t *number);
/* Whether the table has this string, and its number. */
bool string_table_find(const StringTable *table, const char *text, size_t bytes, uint32_t *number);
/* Valid until the next addition; not NUL-terminated. */
const char *string_table_get(const StringTable *table, uint32_t number, size_t *bytes);
void string_table_free(StringTable *table);

#ifdef __cplusplus
}
#endif
#endif
