/* Byte-level byte pair encoding (Sennrich, Haddow and Birch 2016; Radford et al. 2019).
 *
 * A text is split into words (data/pretokenize.h). A word begins as the tokens of its bytes. Then,
 * as long as two neighbours are the left and right of a merge, the merge of lowest rank, and of
 * several such places the leftmost, makes one token of them.
 *
 * Tokens are named as vocab.json names them: each byte is a visible character (byte_character). A
 * name with any other character stands for itself. A word of n bytes takes O(n log n) steps. */
#ifndef DATA_BPE_H
#define DATA_BPE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "data/string_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The character that stands for a byte in names: itself (in Latin-1) where that is visible, else
 * the next unused one from U+0100 on (Radford et al. 2019, bytes_to_unicode). */
uint32_t byte_character(unsigned byte);

typedef struct {
    bool add_prefix_space; /* a text that begins with no space is encoded as if it did */
    bool ignore_merges;    /* a word that is a token is that token, whatever the merges say */
    bool whole_text;       /* the text is one word: the pattern isn't used */
    const char *unknown;   /* the token for bytes that have none, or NULL */
} BpeOptions;

typedef struct {
    uint32_t left, right, result; /* tokens */
} BpeMerge;

/* A token that is found in the text before the text is split into words. */
typedef struct {
    uint32_t id;
    bool special;    /* else a word that someone added to a vocabulary */
    bool normalized; /* looked for between those that are not */
} BpeAdded;

typedef struct BpeWorker BpeWorker; /* what a thread needs to encode, see bpe_encode.c */

#define BPE_NO_MERGE UINT32_MAX

typedef struct {
    uint32_t left, right, rank; /* rank: BPE_NO_MERGE in a free place */
} BpePair;

typedef struct {
    bool add_prefix_space, ignore_merges, whole_text;
    StringTable names;    /* of the tokens; their numbers are the ids */
    uint32_t V_model;     /* ids from here on are added tokens that the model doesn't have */
    char *text;           /* the tokens' bytes, each beginning where its name does in names.text */
    uint32_t *length;     /* (V) their numbers */
    int32_t unknown;      /* -1: none */
    int32_t byte_id[256]; /* -1: none */
    bool has_every_byte;
    BpeMerge *merge; /* (merge_count), by rank */
    size_t merge_count, merge_capacity;
    BpePair *pair; /* (pairs) hash table of the merges; pairs is a power of two */
    size_t pairs;
    BpeAdded *added; /* (added_count) */
    size_t added_count;
    BpeWorker *idle;      /* kept for the next call, with their caches */
    pthread_mutex_t lock; /* of idle */
} Bpe;

/* In this order: all tokens, the merges, added tokens, bpe_finish. Functions that return bool or a
 * pointer fail with error_message(). */
Bpe *bpe_new(void);
void bpe_free(Bpe *bpe);
/* The next id is the token of this name, which must be new and not empty. */
bool bpe_add_token(Bpe *bpe, const char *name, size_t bytes);
/* The next rank. The three tokens must exist. Of equal merges the last one counts. */
bool bpe_add_merge(Bpe *bpe, const char *left, size_t left_bytes, const char *right,
                   size_t right_bytes);
/* The next rank, in training: the result is the token of that name, or the next id if there is
 * none. */
bool bpe_learn_merge(Bpe *bpe, uint32_t left, uint32_t right);
/* A name that is no token yet becomes the next id. */
bool bpe_add_added(Bpe *bpe, const char *name, size_t bytes, bool special, bool normalized);
bool bpe_finish(Bpe *bpe, const BpeOptions *options);

/* The id of a special token, or -1. */
int32_t bpe_special(const Bpe *bpe, const char *name);

/* The rank of the merge of these tokens, or BPE_NO_MERGE. */
uint32_t bpe_rank(const Bpe *bpe, uint32_t left, uint32_t right);

/* The bytes of a token, *bytes of them; "" for an id out of range. */
const char *bpe_text(const Bpe *bpe, int32_t id, size_t *bytes);

/* The ids of the text. As tokenizer_encode_special if `special`, else as tokenizer_encode. */
int32_t *bpe_encode(const Bpe *bpe, const char *text, size_t bytes, bool special, size_t *count);
/* As tokenizer_cut. */
size_t bpe_cut(const Bpe *bpe, const char *text, size_t bytes);
/* For bpe_free. */
void bpe_free_workers(BpeWorker *workers);

#ifdef __cplusplus
}
#endif
#endif
