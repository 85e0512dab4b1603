/* A merge touches only the words that hold its pair, so each pair keeps its count and a list of
 * words; counts change by what a merge changes. The heap of candidates is lazy: a pair's count may
 * have fallen since it was put there, so what comes out with an old count goes back in with the new
 * one. Counts only grow for pairs with the token just made, which are put in again. */
#include "data/bpe_train.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/progress.h"

typedef struct {
    uint32_t left, right;
} TokenPair;

typedef struct {
    TokenPair pair;
    bool used;
    bool grew; /* by the merge in progress: it is in `grown` */
    int64_t count;
    uint32_t *word; /* (words) that hold the pair, or held it */
    uint32_t words, capacity;
} PairEntry;

typedef struct {
    int64_t count;
    TokenPair pair;
} Candidate;

typedef struct {
    uint32_t *symbol; /* all words' tokens; a word shrinks in its place */
    size_t *start;    /* (words) */
    uint32_t *length; /* (words) in tokens */
    const uint64_t *count;
    uint32_t words;
    PairEntry *entry; /* open addressing; entries is a power of two */
    size_t entries, entries_used;
    Candidate *heap;
    size_t candidates, heap_capacity;
    TokenPair *grown;
    size_t grown_pairs, grown_capacity;
    BpeVocabulary *vocabulary;
} Training;

/* An array with room for one more element; NULL if there is no memory, and the old one stays. */
static void *with_room(void *array, size_t count, size_t *capacity, size_t bytes) {
    if (count < *capacity) return array;
    size_t wanted = *capacity + *capacity / 2 + 64;
    void *larger = realloc(array, wanted * bytes);
    if (larger != NULL) *capacity = wanted;
    return larger;
}

static bool no_memory(void) { return error_set("no memory for the pairs of tokens of this text"); }

/* ---- pairs ---- */

static uint64_t key(TokenPair pair) { return (uint64_t)pair.left << 32 | pair.right; }

static PairEntry *probe(PairEntry *entry, size_t entries, TokenPair pair) {
    size_t at = (size_t)(key(pair) * 0x9E3779B97F4A7C15u >> 20) & (entries - 1);
    while (entry[at].used && key(entry[at].pair) != key(pair)) at = (at + 1) & (entries - 1);
    return &entry[at];
}

/* The pair's entry, a new one if need be; valid until the next call. NULL with error_message(). */
static PairEntry *find_pair(Training *t, TokenPair pair) {
    if (t->entries_used >= t->entries / 2) {
        size_t entries = t->entries == 0 ? 1 << 16 : 2 * t->entries;
        PairEntry *entry = calloc(entries, sizeof *entry);
        if (entry == NULL) return no_memory(), NULL;
        for (size_t i = 0; i < t->entries; i++)
            if (t->entry[i].used) *probe(entry, entries, t->entry[i].pair) = t->entry[i];
        free(t->entry);
        t->entry = entry;
        t->entries = entries;
    }
    PairEntry *found = probe(t->entry, t->entries, pair);
    t->entries_used += !found->used;
    found->used = true;
    found->pair = pair;
    return found;
}

static bool subtract(Training *t, uint32_t left, uint32_t right, int64_t count) {
    PairEntry *entry = find_pair(t, (TokenPair){left, right});
    if (entry == NULL) return false;
    entry->count -= count;
    return true;
}

/* The pair occurs in this word, count times more in all words like it. */
static bool add(Training *t, uint32_t left, uint32_t right, int64_t count, uint32_t word) {
    PairEntry *entry = find_pair(t, (TokenPair){left, right});
    if (entry == NULL) return false;
    entry->count += count;
    if (entry->words == 0 || entry->word[entry->words - 1] != word) {
        size_t capacity = entry->capacity;
        uint32_t *list = with_room(entry->word, entry->words, &capacity, sizeof *list);
        if (list == NULL) return no_memory();
        entry->word = list;
        entry->capacity = (uint32_t)capacity;
        entry->word[entry->words++] = word;
    }
    if (!entry->grew) {
        TokenPair *grown = with_room(t->grown, t->grown_pairs, &t->grown_capacity, sizeof *grown);
        if (grown == NULL) return no_memory();
        t->grown = grown;
        t->grown[t->grown_pairs++] = entry->pair;
        entry->grew = true;
    }
    return true;
}

/* ---- the heap of candidates ---- */

static bool before(Candidate a, Candidate b) {
    return a.count != b.count ? a.count > b.count : key(a.pair) < key(b.pair);
}

static bool push(Training *t, Candidate candidate) {
    Candidate *heap = with_room(t->heap, t->candidates, &t->heap_capacity, sizeof *heap);
    if (heap == NULL) return no_memory();
    t->heap = heap;
    size_t at = t->candidates++;
    for (; at > 0 && before(candidate, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = candidate;
    return true;
}

static Candidate pop(Training *t) {
    Candidate *heap = t->heap, top = heap[0], last = heap[--t->candidates];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < t->candidates; at = child) {
        if (child + 1 < t->candidates && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return top;
}

/* Puts the pairs whose counts grew into the heap. */
static bool push_grown(Training *t) {
    for (size_t i = 0; i < t->grown_pairs; i++) {
        PairEntry *entry = find_pair(t, t->grown[i]);
        entry->grew = false;
        if (entry->count > 0 && !push(t, (Candidate){entry->count, entry->pair})) return false;
    }
    t->grown_pairs = 0;
    return true;
}

/* ---- merging ---- */

/* Replaces the pair by the token in one word, from left to right. */
static bool merge_word(Training *t, uint32_t word, TokenPair pair, uint32_t token) {
    uint32_t *symbol = t->symbol + t->start[word];
    uint32_t length = t->length[word], n = 0; /* symbol[0..n) is the new word */
    int64_t count = (int64_t)t->count[word];
    bool good = true;
    for (uint32_t i = 0; good && i < length; n++) {
        if (i + 1 == length || symbol[i] != pair.left || symbol[i + 1] != pair.right) {
            symbol[n] = symbol[i++];
            continue;
        }
        good = subtract(t, pair.left, pair.right, count);
        if (good && n > 0)
            good = subtract(t, symbol[n - 1], pair.left, count) &&
                   add(t, symbol[n - 1], token, count, word);
        i += 2;
        if (good && i < length)
            good =
                subtract(t, pair.right, symbol[i], count) && add(t, token, symbol[i], count, word);
        symbol[n] = token;
    }
    t->length[word] = n;
    return good;
}

/* The new token is new indeed. For what lies between two ends of tokens has been merged as if it
 * stood alone; were there a token of these bytes, the merge that made it would have been done here
 * too. */
static bool make_token(BpeVocabulary *vocabulary, TokenPair pair, uint32_t *token) {
    StringTable *tokens = &vocabulary->tokens;
    int32_t *merge = vocabulary->merge[tokens->count - 256];
    size_t left, right;
    string_table_get(tokens, pair.left, &left);
    string_table_get(tokens, pair.right, &right);
    char *text = malloc(left + right);
    if (text == NULL) return no_memory();
    memcpy(text, string_table_get(tokens, pair.left, &left), left);
    memcpy(text + left, string_table_get(tokens, pair.right, &right), right);
    merge[0] = (int32_t)pair.left;
    merge[1] = (int32_t)pair.right;
    bool good = string_table_add(tokens, text, left + right, token);
    free(text);
    return good;
}

static bool merge_pair(Training *t, TokenPair pair) {
    uint32_t token;
    if (!make_token(t->vocabulary, pair, &token)) return false;
    PairEntry *entry = find_pair(t, pair);
    uint32_t *word = entry->word, words = entry->words;
    entry->word = NULL; /* the pair doesn't come back: later merges make pairs with newer tokens */
    entry->words = entry->capacity = 0;
    bool good = true;
    for (uint32_t i = 0; good && i < words; i++) good = merge_word(t, word[i], pair, token);
    free(word);
    return good && push_grown(t);
}

/* ---- setting up ---- */

/* GPT-2's order of the bytes: the visible characters of Latin-1, then the others. */
static bool is_visible(unsigned byte) {
    return (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
}

static bool add_bytes(StringTable *tokens, uint32_t id[256]) {
    bool good = true;
    for (int visible = 1; visible >= 0; visible--)
        for (unsigned byte = 0; good && byte < 256; byte++)
            if (is_visible(byte) == (visible == 1)) {
                char text = (char)byte;
                good = string_table_add(tokens, &text, 1, &id[byte]);
            }
    return good;
}

/* Words as the ids of their bytes, and the counts of their pairs. */
static bool begin(Training *t, const WordCounts *counts) {
    uint32_t id[256];
    const StringTable *words = &counts->words;
    t->words = words->count;
    t->count = counts->count;
    t->symbol = malloc((words->text_bytes + 1) * sizeof *t->symbol);
    t->start = malloc((words->count + (size_t)1) * sizeof *t->start);
    t->length = malloc((words->count + (size_t)1) * sizeof *t->length);
    if (t->symbol == NULL || t->start == NULL || t->length == NULL) return no_memory();
    if (!add_bytes(&t->vocabulary->tokens, id)) return false;
    size_t used = 0;
    for (uint32_t i = 0; i < words->count; i++) {
        size_t bytes;
        const char *text = string_table_get(words, i, &bytes);
        uint32_t *symbol = t->symbol + used;
        t->start[i] = used;
        t->length[i] = (uint32_t)bytes;
        used += bytes;
        for (size_t j = 0; j < bytes; j++) symbol[j] = id[(unsigned char)text[j]];
        for (size_t j = 1; j < bytes; j++)
            if (!add(t, symbol[j - 1], symbol[j], (int64_t)counts->count[i], i)) return false;
    }
    return push_grown(t);
}

static void end(Training *t) {
    for (size_t i = 0; i < t->entries; i++) free(t->entry[i].word);
    free(t->entry);
    free(t->symbol);
    free(t->start);
    free(t->length);
    free(t->heap);
    free(t->grown);
}

bool bpe_train(const WordCounts *counts, size_t V, uint64_t least, BpeVocabulary *vocabulary) {
    *vocabulary = (BpeVocabulary){.merge = calloc(V - 255, sizeof *vocabulary->merge)};
    Training t = {.vocabulary = vocabulary};
    bool good = (vocabulary->merge != NULL || no_memory()) && begin(&t, counts);
    Progress progress = progress_begin("merging", "", 0, V - 256);
    while (good && vocabulary->tokens.count < V && t.candidates > 0) {
        Candidate top = pop(&t);
        int64_t count = find_pair(&t, top.pair)->count;
        if (count != top.count) {
            good = count <= 0 || push(&t, (Candidate){count, top.pair});
            continue;
        }
        if ((uint64_t)count < least) break;
        good = merge_pair(&t, top.pair);
        progress_show(&progress, vocabulary->tokens.count - 256);
    }
    progress_end(&progress);
    end(&t);
    if (!good) bpe_vocabulary_free(vocabulary);
    return good;
}

void bpe_vocabulary_free(BpeVocabulary *vocabulary) {
    string_table_free(&vocabulary->tokens);
    free(vocabulary->merge);
    *vocabulary = (BpeVocabulary){0};
}
