/* A text to tokens: added tokens are found in it, what is between them is cut into pieces for the
 * threads, pieces are split into words, and words become tokens by way of a cache.
 *
 * A text may be cut between a character that is no white space and a space or newline: each part
 * then has the words that it has in the whole. For no match of the pattern has white space after
 * another character, so the word with that character ends at the cut, where the next one begins;
 * and a match depends on what follows it only in where its run of characters ends, and runs before
 * the cut end at that character or at the cut, be it before white space or at the end. */
#include <stdlib.h>
#include <string.h>

#include "data/bpe.h"
#include "data/bpe_word.h"
#include "data/pretokenize.h"
#include "data/unicode.h"
#include "data/utf8.h"
#include "runtime/error.h"

/* A word and its ids in one cache line. Words that are longer or have more ids are not kept: there
 * are few in English text. */
enum { SLOT_BYTES = 16, SLOT_IDS = 11, LOG2_SLOTS = 15, SLOTS = 1 << LOG2_SLOTS };

typedef struct {
    uint64_t word[2];     /* zeros after its end */
    uint8_t bytes, count; /* bytes = 0: a free slot */
    int32_t ids[SLOT_IDS];
} Slot;

_Static_assert(sizeof(Slot) == 64, "a slot is a cache line");

struct BpeWorker {
    Slot *slot; /* (SLOTS) a word's place is given by its hash; a new word replaces what is there */
    BpeScratch scratch;
    BpeWorker *next;
};

/* The bytes of text for one thread at a time: a fraction of a millisecond's work at the least. */
static const size_t piece_bytes = (size_t)1 << 17;

/* Scratch memory for longer words is not kept between calls. */
static const size_t scratch_kept = (size_t)1 << 16;

static void worker_free(BpeWorker *worker) {
    free(worker->slot);
    bpe_scratch_free(&worker->scratch);
    free(worker);
}

void bpe_free_workers(BpeWorker *workers) {
    for (BpeWorker *next; workers != NULL; workers = next) {
        next = workers->next;
        worker_free(workers);
    }
}

/* The caches don't change what is encoded, so a tokenizer is constant to its users. */
static BpeWorker *take_worker(const Bpe *constant) {
    Bpe *bpe = (Bpe *)constant;
    pthread_mutex_lock(&bpe->lock);
    BpeWorker *worker = bpe->idle;
    if (worker != NULL) bpe->idle = worker->next;
    pthread_mutex_unlock(&bpe->lock);
    if (worker != NULL || (worker = calloc(1, sizeof *worker)) == NULL) return worker;
    worker->slot = aligned_alloc(sizeof(Slot), SLOTS * sizeof(Slot));
    if (worker->slot == NULL) {
        worker_free(worker);
        return NULL;
    }
    memset(worker->slot, 0, SLOTS * sizeof(Slot));
    return worker;
}

static void return_worker(const Bpe *constant, BpeWorker *worker) {
    Bpe *bpe = (Bpe *)constant;
    if (worker->scratch.capacity > scratch_kept) bpe_scratch_free(&worker->scratch);
    pthread_mutex_lock(&bpe->lock);
    worker->next = bpe->idle;
    bpe->idle = worker;
    pthread_mutex_unlock(&bpe->lock);
}

/* ---- words ---- */

/* The token that is the whole word, or -1. */
static int32_t whole_word(const Bpe *bpe, const char *word, size_t bytes) {
    char *name = malloc(2 * bytes); /* no byte's character is longer */
    size_t length = 0;
    uint32_t id;
    for (size_t i = 0; name != NULL && i < bytes; i++)
        length += utf8_encode(byte_character((unsigned char)word[i]), name + length);
    bool found =
        name != NULL && string_table_find(&bpe->names, name, length, &id) && id < bpe->V_model;
    free(name);
    return found ? (int32_t)id : -1;
}

static bool encode_word(const Bpe *bpe, BpeWorker *worker, const char *word, size_t bytes,
                        int32_t *ids, size_t *count) {
    if (bpe->ignore_merges && (ids[0] = whole_word(bpe, word, bytes)) >= 0) {
        *count = 1;
        return true;
    }
    return bpe_word(bpe, &worker->scratch, word, bytes, ids, count);
}

/* The word with zeros after it. Where the text goes on for long enough they are masked out of it: a
 * copy of a varying number of bytes would take longer than all the rest. */
static inline void read_key(uint64_t key[2], const char *word, size_t bytes, size_t left) {
    static const unsigned char ones_and_zeros[2 * SLOT_BYTES] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                                                 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                                                 0xFF, 0xFF, 0xFF, 0xFF};
    if (left < SLOT_BYTES) {
        memset(key, 0, SLOT_BYTES);
        memcpy(key, word, bytes);
        return;
    }
    uint64_t mask[2];
    memcpy(mask, ones_and_zeros + SLOT_BYTES - bytes, SLOT_BYTES);
    memcpy(key, word, SLOT_BYTES);
    key[0] &= mask[0];
    key[1] &= mask[1];
}

/* `left`: bytes of the text from the word on. */
static bool encode_short_word(const Bpe *bpe, BpeWorker *worker, const char *word, size_t bytes,
                              size_t left, int32_t *ids, size_t *count) {
    uint64_t key[2];
    read_key(key, word, bytes, left);
    uint64_t hash = (key[0] ^ key[1] * 0xC2B2AE3D27D4EB4Fu) * 0x9E3779B97F4A7C15u;
    Slot *slot = &worker->slot[hash >> (64 - LOG2_SLOTS)];
    if (slot->bytes == bytes && slot->word[0] == key[0] && slot->word[1] == key[1]) {
        for (size_t i = 0; i < slot->count; i++) ids[i] = slot->ids[i];
        *count = slot->count;
        return true;
    }
    if (!encode_word(bpe, worker, word, bytes, ids, count)) return false;
    if (*count <= SLOT_IDS) {
        *slot = (Slot){.word = {key[0], key[1]}, .bytes = (uint8_t)bytes, .count = (uint8_t)*count};
        memcpy(slot->ids, ids, *count * sizeof *ids);
    }
    return true;
}

static const size_t failed = SIZE_MAX;

/* Writes the ids and returns their number, or `failed`. */
static size_t encode_piece(const Bpe *bpe, BpeWorker *worker, const char *text, size_t bytes,
                           int32_t *ids) {
    size_t total = 0, count;
    for (size_t offset = 0, length; offset < bytes; offset += length, total += count) {
        const char *word = text + offset;
        size_t left = bytes - offset;
        length = bpe->whole_text ? bytes : pretokenize_word(word, left);
        bool good = length <= SLOT_BYTES
                        ? encode_short_word(bpe, worker, word, length, left, ids + total, &count)
                        : encode_word(bpe, worker, word, length, ids + total, &count);
        if (!good) return failed;
    }
    return total;
}

/* ---- pieces ---- */

/* Whether what ends before text[at] is a character and no white space. */
static bool ends_visibly(const char *text, size_t at) {
    size_t start = at - 1;
    while (start > 0 && at - start < 4 && ((unsigned char)text[start] & 0xC0) == 0x80) start--;
    uint32_t code;
    return utf8_decode(text + start, at - start, &code) == at - start && code > ' ' &&
           unicode_class(code) != UNICODE_SPACE;
}

static bool can_cut(const Bpe *bpe, const char *text, size_t at) {
    return (text[at] == ' ' || (text[at] == '\n' && !bpe->add_prefix_space)) &&
           ends_visibly(text, at);
}

/* An added token with a place for a cut inside. */
static bool added_can_be_cut(const Bpe *bpe) {
    for (size_t i = 0; i < bpe->added_count; i++) {
        size_t bytes;
        const char *name = string_table_get(&bpe->names, bpe->added[i].id, &bytes);
        for (size_t at = 1; at < bytes; at++)
            if (can_cut(bpe, name, at)) return true;
    }
    return false;
}

size_t bpe_cut(const Bpe *bpe, const char *text, size_t bytes) {
    if (bpe->whole_text || bytes < 2 || added_can_be_cut(bpe)) return 0;
    size_t at = bytes - 1;
    while (at > 0 && !can_cut(bpe, text, at)) at--;
    return at;
}

/* Ends of pieces of at least piece_bytes, the last one less, that are encoded each for itself. */
static size_t cut_pieces(const Bpe *bpe, const char *text, size_t bytes, size_t *end) {
    size_t pieces = 0, at = piece_bytes;
    while (!bpe->whole_text && at < bytes) {
        if (can_cut(bpe, text, at)) {
            end[pieces++] = at;
            at += piece_bytes;
        } else {
            at++;
        }
    }
    end[pieces++] = bytes;
    return pieces;
}

/* Where the ids of a text are put; there is room for all. */
typedef struct {
    int32_t *ids;
    size_t count;
} Output;

static bool check_bytes(const Bpe *bpe, const char *text, size_t bytes) {
    for (size_t i = 0; !bpe->has_every_byte && i < bytes; i++)
        if (bpe->byte_id[(unsigned char)text[i]] < 0)
            return error_set(
                "the byte 0x%02x has no token in the vocabulary, which was made without "
                "some of the bytes",
                (unsigned char)text[i]);
    return true;
}

/* The text between added tokens. A piece of n bytes has at most n ids, so each thread writes from
 * where its bytes' ids would be if every byte were a token, and then the gaps are closed. */
static bool encode_pieces(const Bpe *bpe, const char *text, size_t bytes, Output *output) {
    if (!check_bytes(bpe, text, bytes)) return false;
    size_t *end = malloc((bytes / piece_bytes + 1) * sizeof *end);
    size_t *count = malloc((bytes / piece_bytes + 1) * sizeof *count);
    if (end == NULL || count == NULL) {
        free(end);
        free(count);
        return error_set("no memory to encode a text of %zu bytes", bytes);
    }
    size_t pieces = cut_pieces(bpe, text, bytes, end);
    int32_t *ids = output->ids + output->count;
#pragma omp parallel if (pieces > 1)
    {
        BpeWorker *worker = take_worker(bpe);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < pieces; i++) {
            size_t start = i == 0 ? 0 : end[i - 1];
            count[i] = worker == NULL
                           ? failed
                           : encode_piece(bpe, worker, text + start, end[i] - start, ids + start);
        }
        if (worker != NULL) return_worker(bpe, worker);
    }
    bool good = true;
    for (size_t i = 0; i < pieces && good; i++) {
        size_t start = i == 0 ? 0 : end[i - 1];
        if (count[i] == failed) {
            good = error_set("no memory to encode a text of %zu bytes", bytes);
        } else {
            memmove(output->ids + output->count, ids + start, count[i] * sizeof *ids);
            output->count += count[i];
        }
    }
    free(end);
    free(count);
    return good;
}

static bool encode_text(const Bpe *bpe, const char *text, size_t bytes, Output *output) {
    if (bytes == 0) return true;
    if (!bpe->add_prefix_space || text[0] == ' ') return encode_pieces(bpe, text, bytes, output);
    char *prefixed = malloc(bytes + 1);
    if (prefixed == NULL) return error_set("no memory to encode a text of %zu bytes", bytes);
    prefixed[0] = ' ';
    memcpy(prefixed + 1, text, bytes);
    bool good = encode_pieces(bpe, prefixed, bytes + 1, output);
    free(prefixed);
    return good;
}

/* ---- added tokens ---- */

/* The longest one of this pass that the text begins with, or NULL. */
static const BpeAdded *added_at(const Bpe *bpe, bool normalized, const char *text, size_t bytes,
                                size_t *length) {
    const BpeAdded *found = NULL;
    *length = 0;
    for (size_t i = 0; i < bpe->added_count; i++) {
        size_t n;
        const char *name = string_table_get(&bpe->names, bpe->added[i].id, &n);
        if (bpe->added[i].normalized == normalized && n > *length && n <= bytes &&
            memcmp(name, text, n) == 0)
            found = &bpe->added[i], *length = n;
    }
    return found;
}

/* Marks the first bytes of the pass's added tokens; false if none of them is to be found. */
static bool first_bytes(const Bpe *bpe, bool normalized, bool special, bool first[256]) {
    bool any = false;
    memset(first, 0, 256 * sizeof *first);
    for (size_t i = 0; i < bpe->added_count; i++) {
        size_t bytes;
        const char *name = string_table_get(&bpe->names, bpe->added[i].id, &bytes);
        if (bpe->added[i].normalized != normalized) continue;
        first[(unsigned char)name[0]] = true;
        any = any || special || !bpe->added[i].special;
    }
    return any;
}

/* As the tokenizers library does it: from left to right the longest added tokens, in one pass those
 * that are not normalized, in a second, between these, the others. A special one that is to be text
 * is passed over. */
static bool encode_pass(const Bpe *bpe, bool normalized, bool special, const char *text,
                        size_t bytes, Output *output) {
    bool first[256];
    size_t start = 0, offset = 0, length;
    bool any = first_bytes(bpe, normalized, special, first);
    while (any && offset < bytes) {
        const BpeAdded *added = NULL;
        if (first[(unsigned char)text[offset]])
            added = added_at(bpe, normalized, text + offset, bytes - offset, &length);
        if (added == NULL) {
            offset++;
        } else if (added->special && !special) {
            offset += length;
        } else {
            if (!(normalized
                      ? encode_text(bpe, text + start, offset - start, output)
                      : encode_pass(bpe, true, special, text + start, offset - start, output)))
                return false;
            output->ids[output->count++] = (int32_t)added->id;
            offset += length;
            start = offset;
        }
    }
    return normalized ? encode_text(bpe, text + start, bytes - start, output)
                      : encode_pass(bpe, true, special, text + start, bytes - start, output);
}

int32_t *bpe_encode(const Bpe *bpe, const char *text, size_t bytes, bool special, size_t *count) {
    /* At most one token a byte, and one for each space that is put before a byte. */
    size_t most = bpe->add_prefix_space ? 2 : 1;
    int32_t *ids = NULL;
    if (bytes < SIZE_MAX / 2 / sizeof *ids - 1) ids = malloc((most * bytes + 1) * sizeof *ids);
    if (ids == NULL) {
        error_set("no memory for the tokens of a text of %zu bytes", bytes);
        return NULL;
    }
    Output output = {.ids = ids};
    if (!encode_pass(bpe, /*normalized=*/false, special, text, bytes, &output)) {
        free(ids);
        return NULL;
    }
    *count = output.count;
    int32_t *fitting = realloc(ids, (output.count + 1) * sizeof *ids);
    return fitting != NULL ? fitting : ids;
}
