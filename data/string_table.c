#include "data/string_table.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

static uint32_t hash_string(const char *text, size_t bytes) {
    uint64_t hash = bytes;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ (unsigned char)text[i]) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(hash >> 32);
}

const char *string_table_get(const StringTable *table, uint32_t number, size_t *bytes) {
    size_t start = number == 0 ? 0 : table->end[number - 1];
    *bytes = table->end[number] - start;
    return table->text + start;
}

/* The slot that holds the string, or the free one where it belongs. */
static uint32_t *find_slot(const StringTable *table, const char *text, size_t bytes) {
    uint32_t mask = table->slots - 1, at = hash_string(text, bytes) & mask;
    for (; table->slot[at] != 0; at = (at + 1) & mask) {
        size_t length;
        const char *there = string_table_get(table, table->slot[at] - 1, &length);
        if (length == bytes && memcmp(there, text, bytes) == 0) break;
    }
    return &table->slot[at];
}

static bool grow_slots(StringTable *table) {
    uint32_t slots = table->slots == 0 ? 1024 : 2 * table->slots;
    uint32_t *slot = calloc(slots, sizeof *slot);
    if (slot == NULL) return false;
    free(table->slot);
    table->slot = slot;
    table->slots = slots;
    for (uint32_t i = 0; i < table->count; i++) {
        size_t bytes;
        const char *text = string_table_get(table, i, &bytes);
        *find_slot(table, text, bytes) = i + 1;
    }
    return true;
}

/* Room for one more string of so many bytes. */
static bool reserve(StringTable *table, size_t bytes) {
    if (table->count >= table->slots / 2 && (table->slots > UINT32_MAX / 2 || !grow_slots(table)))
        return false;
    if (table->count == table->capacity) {
        uint32_t capacity = table->capacity + table->capacity / 2 + 1024;
        size_t *end = realloc(table->end, capacity * sizeof *end);
        if (end == NULL) return false;
        table->end = end;
        table->capacity = capacity;
    }
    if (bytes > table->text_capacity - table->text_bytes) {
        size_t capacity = table->text_bytes + table->text_bytes / 2 + bytes + 4096;
        char *text = realloc(table->text, capacity);
        if (text == NULL) return false;
        table->text = text;
        table->text_capacity = capacity;
    }
    return true;
}

bool string_table_add(StringTable *table, const char *text, size_t bytes, uint32_t *number) {
    if (!reserve(table, bytes))
        return error_set("no memory for more than %u distinct strings", table->count);
    uint32_t *slot = find_slot(table, text, bytes);
    if (*slot == 0) {
        if (bytes > 0) memcpy(table->text + table->text_bytes, text, bytes);
        table->text_bytes += bytes;
        table->end[table->count] = table->text_bytes;
        *slot = ++table->count;
    }
    *number = *slot - 1;
    return true;
}

bool string_table_find(const StringTable *table, const char *text, size_t bytes, uint32_t *number) {
    uint32_t slot = table->slots == 0 ? 0 : *find_slot(table, text, bytes);
    if (slot != 0) *number = slot - 1;
    return slot != 0;
}

void string_table_free(StringTable *table) {
    free(table->text);
    free(table->end);
    free(table->slot);
    *table = (StringTable){0};
}
