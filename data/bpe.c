/* The vocabulary and the merges; see bpe.h. */
#include "data/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "data/utf8.h"
#include "runtime/error.h"

enum { BYTE_CHARACTERS = 0x144 }; /* byte_character is below this */
enum { MOST_ADDED = 1 << 14 };    /* each is looked for at every place of a text */

uint32_t byte_character(unsigned byte) {
    if (byte < 0x21) return 0x100 + byte;
    if (byte < 0x7F) return byte;
    if (byte < 0xA1) return 0x121 + byte - 0x7F;
    return byte == 0xAD ? 0x143 : byte;
}

Bpe *bpe_new(void) {
    Bpe *bpe = calloc(1, sizeof *bpe);
    if (bpe == NULL)
        error_set("no memory for a tokenizer");
    else
        pthread_mutex_init(&bpe->lock, NULL);
    return bpe;
}

void bpe_free(Bpe *bpe) {
    if (bpe == NULL) return;
    string_table_free(&bpe->names);
    free(bpe->text);
    free(bpe->length);
    free(bpe->merge);
    free(bpe->pair);
    free(bpe->added);
    bpe_free_workers(bpe->idle);
    pthread_mutex_destroy(&bpe->lock);
    free(bpe);
}

static bool add_name(Bpe *bpe, const char *name, size_t bytes) {
    uint32_t number, count = bpe->names.count, code;
    if (bytes == 0) return error_set("the token of id %u is empty", count);
    for (size_t offset = 0, length; offset < bytes; offset += length)
        if ((length = utf8_decode(name + offset, bytes - offset, &code)) == 0)
            return error_set("the token of id %u is not UTF-8", count);
    if (count == INT32_MAX) return error_set("more than %u tokens", count);
    if (!string_table_add(&bpe->names, name, bytes, &number)) return false;
    return number == count || error_set("the token \"%.*s\" is there twice, as id %u and as id %u",
                                        (int)(bytes < 80 ? bytes : 80), name, number, count);
}

bool bpe_add_token(Bpe *bpe, const char *name, size_t bytes) {
    if (!add_name(bpe, name, bytes)) return false;
    bpe->V_model = bpe->names.count;
    return true;
}

static bool find_name(const Bpe *bpe, const char *name, size_t bytes, uint32_t *id) {
    return string_table_find(&bpe->names, name, bytes, id) ||
           error_set("merge %zu needs the token \"%.*s\", which is not in the vocabulary",
                     bpe->merge_count, (int)(bytes < 80 ? bytes : 80), name);
}

/* The names of two tokens in one, to be freed; NULL with error_message(). */
static char *join(const char *left, size_t left_bytes, const char *right, size_t right_bytes) {
    char *both = malloc(left_bytes + right_bytes + 1);
    if (both == NULL) {
        error_set("no memory for a token of %zu bytes", left_bytes + right_bytes);
        return NULL;
    }
    memcpy(both, left, left_bytes);
    memcpy(both + left_bytes, right, right_bytes);
    return both;
}

static bool push_merge(Bpe *bpe, BpeMerge merge) {
    if (bpe->merge_count == bpe->merge_capacity) {
        size_t capacity = 2 * bpe->merge_capacity + 1024;
        BpeMerge *grown = realloc(bpe->merge, capacity * sizeof *grown);
        if (grown == NULL) return error_set("no memory for %zu merges", capacity);
        bpe->merge = grown;
        bpe->merge_capacity = capacity;
    }
    bpe->merge[bpe->merge_count++] = merge;
    return true;
}

bool bpe_add_merge(Bpe *bpe, const char *left, size_t left_bytes, const char *right,
                   size_t right_bytes) {
    BpeMerge merge;
    if (!find_name(bpe, left, left_bytes, &merge.left) ||
        !find_name(bpe, right, right_bytes, &merge.right))
        return false;
    char *both = join(left, left_bytes, right, right_bytes);
    bool good = both != NULL && find_name(bpe, both, left_bytes + right_bytes, &merge.result) &&
                push_merge(bpe, merge);
    free(both);
    return good;
}

bool bpe_learn_merge(Bpe *bpe, uint32_t left, uint32_t right) {
    BpeMerge merge = {.left = left, .right = right};
    if (left >= bpe->names.count || right >= bpe->names.count)
        return error_set("merge %zu is of the tokens %u and %u, and there are %u", bpe->merge_count,
                         left, right, bpe->names.count);
    size_t left_bytes, right_bytes;
    const char *left_name = string_table_get(&bpe->names, left, &left_bytes);
    const char *right_name = string_table_get(&bpe->names, right, &right_bytes);
    char *both = join(left_name, left_bytes, right_name, right_bytes);
    size_t bytes = left_bytes + right_bytes;
    bool good = both != NULL &&
                (string_table_find(&bpe->names, both, bytes, &merge.result) ||
                 (bpe_add_token(bpe, both, bytes) &&
                  string_table_find(&bpe->names, both, bytes, &merge.result))) &&
                push_merge(bpe, merge);
    free(both);
    return good;
}

bool bpe_add_added(Bpe *bpe, const char *name, size_t bytes, bool special, bool normalized) {
    uint32_t id;
    if (bpe->added_count == MOST_ADDED) return error_set("more than %d added tokens", MOST_ADDED);
    if (!string_table_find(&bpe->names, name, bytes, &id)) {
        id = bpe->names.count;
        if (!add_name(bpe, name, bytes)) return false;
    }
    for (size_t i = 0; i < bpe->added_count; i++)
        if (bpe->added[i].id == id)
            return error_set("the added token \"%.*s\" is there twice",
                             (int)(bytes < 80 ? bytes : 80), name);
    BpeAdded *grown = realloc(bpe->added, (bpe->added_count + 1) * sizeof *grown);
    if (grown == NULL) return error_set("no memory for %zu added tokens", bpe->added_count + 1);
    bpe->added = grown;
    grown[bpe->added_count++] = (BpeAdded){.id = id, .special = special, .normalized = normalized};
    return true;
}

/* Writes what the token's name stands for, at most as many bytes as it has, and returns their
 * number. */
static uint32_t name_to_bytes(const char *name, size_t bytes, const int16_t *byte_of, char *text) {
    uint32_t count = 0, code;
    for (size_t offset = 0; offset < bytes; count++) {
        offset += utf8_decode(name + offset, bytes - offset, &code);
        if (code >= BYTE_CHARACTERS || byte_of[code] < 0) {
            memcpy(text, name, bytes);
            return (uint32_t)bytes;
        }
        text[count] = (char)byte_of[code];
    }
    return count;
}

static bool fill_text(Bpe *bpe) {
    int16_t byte_of[BYTE_CHARACTERS];
    memset(byte_of, -1, sizeof byte_of);
    for (int16_t byte = 0; byte < 256; byte++) byte_of[byte_character((unsigned)byte)] = byte;
    size_t V = bpe->names.count, bytes;
    bpe->text = malloc(bpe->names.text_bytes + 1);
    bpe->length = malloc((V + 1) * sizeof *bpe->length);
    if (bpe->text == NULL || bpe->length == NULL)
        return error_set("no memory for a vocabulary of %zu tokens", V);
    for (uint32_t id = 0; id < V; id++) {
        const char *name = string_table_get(&bpe->names, id, &bytes);
        char *text = bpe->text + (name - bpe->names.text);
        bpe->length[id] = name_to_bytes(name, bytes, byte_of, text);
    }
    return true;
}

/* The place of the pair, or the free place where it belongs. */
static BpePair *find_pair(const Bpe *bpe, uint32_t left, uint32_t right) {
    uint64_t hash = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
    size_t at = (hash ^ hash >> 32) & (bpe->pairs - 1);
    while (bpe->pair[at].rank != BPE_NO_MERGE &&
           (bpe->pair[at].left != left || bpe->pair[at].right != right))
        at = (at + 1) & (bpe->pairs - 1);
    return &bpe->pair[at];
}

uint32_t bpe_rank(const Bpe *bpe, uint32_t left, uint32_t right) {
    return find_pair(bpe, left, right)->rank;
}

static bool fill_pairs(Bpe *bpe) {
    for (bpe->pairs = 16; bpe->pairs < 2 * bpe->merge_count;) bpe->pairs *= 2;
    bpe->pair = malloc(bpe->pairs * sizeof *bpe->pair);
    if (bpe->pair == NULL) return error_set("no memory for %zu merges", bpe->merge_count);
    memset(bpe->pair, 0xFF, bpe->pairs * sizeof *bpe->pair);
    for (size_t rank = 0; rank < bpe->merge_count; rank++) {
        BpeMerge merge = bpe->merge[rank];
        *find_pair(bpe, merge.left, merge.right) =
            (BpePair){.left = merge.left, .right = merge.right, .rank = (uint32_t)rank};
    }
    return true;
}

bool bpe_finish(Bpe *bpe, const BpeOptions *options) {
    bpe->add_prefix_space = options->add_prefix_space;
    bpe->ignore_merges = options->ignore_merges;
    bpe->whole_text = options->whole_text;
    bpe->unknown = -1;
    uint32_t id;
    if (options->unknown != NULL) {
        if (!string_table_find(&bpe->names, options->unknown, strlen(options->unknown), &id))
            return error_set("the unknown token \"%.80s\" is not in the vocabulary",
                             options->unknown);
        bpe->unknown = (int32_t)id;
    }
    bpe->has_every_byte = true;
    for (unsigned byte = 0; byte < 256; byte++) {
        char name[4];
        size_t bytes = utf8_encode(byte_character(byte), name);
        bool found = string_table_find(&bpe->names, name, bytes, &id) && id < bpe->V_model;
        bpe->byte_id[byte] = found ? (int32_t)id : bpe->unknown;
        bpe->has_every_byte = bpe->has_every_byte && bpe->byte_id[byte] >= 0;
    }
    return fill_text(bpe) && fill_pairs(bpe);
}

int32_t bpe_special(const Bpe *bpe, const char *name) {
    uint32_t id;
    if (string_table_find(&bpe->names, name, strlen(name), &id))
        for (size_t i = 0; i < bpe->added_count; i++)
            if (bpe->added[i].id == id && bpe->added[i].special) return (int32_t)id;
    return -1;
}

const char *bpe_text(const Bpe *bpe, int32_t id, size_t *bytes) {
    *bytes = 0;
    if (id < 0 || (uint32_t)id >= bpe->names.count) return "";
    *bytes = bpe->length[id];
    size_t unused;
    return bpe->text + (string_table_get(&bpe->names, (uint32_t)id, &unused) - bpe->names.text);
}
