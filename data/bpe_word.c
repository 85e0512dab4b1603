/* The word is a list of symbols, each in the place of its first byte. A heap holds the places where
 * two neighbours have a merge, by rank and then by place. What a merge changes is put on the heap
 * anew; the entries that are out of date by then are noticed when they come up, since the rank of
 * the pair at that place is another one. So a merge costs O(log n), and there are fewer than n. */
#include "data/bpe_word.h"

#include <stdlib.h>

struct BpeSymbol {
    uint32_t id;
    uint32_t rank;           /* of the merge with the next symbol; BPE_NO_MERGE if there is none */
    uint32_t previous, next; /* places; NO_SYMBOL at the ends */
};

typedef struct BpeSymbol Symbol;

#define NO_SYMBOL UINT32_MAX

void bpe_scratch_free(BpeScratch *scratch) {
    free(scratch->symbol);
    free(scratch->heap);
    *scratch = (BpeScratch){0};
}

static bool reserve(BpeScratch *scratch, size_t bytes) {
    if (bytes <= scratch->capacity) return true;
    if (bytes >= NO_SYMBOL) return false;
    bpe_scratch_free(scratch);
    size_t capacity = bytes < 256 ? 256 : bytes;
    scratch->symbol = malloc(capacity * sizeof *scratch->symbol);
    scratch->heap = malloc(2 * capacity * sizeof *scratch->heap);
    if (scratch->symbol != NULL && scratch->heap != NULL) scratch->capacity = capacity;
    return scratch->capacity != 0;
}

/* ---- a heap with the least entry first ---- */

static void sift_down(uint64_t *heap, size_t count, size_t at) {
    uint64_t entry = heap[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= entry) break;
        heap[at] = heap[child];
    }
    heap[at] = entry;
}

static void push(uint64_t *heap, size_t *count, uint64_t entry) {
    size_t at = (*count)++;
    for (size_t parent; at > 0 && heap[parent = (at - 1) / 2] > entry; at = parent)
        heap[at] = heap[parent];
    heap[at] = entry;
}

static uint64_t pop(uint64_t *heap, size_t *count) {
    uint64_t least = heap[0];
    heap[0] = heap[--*count];
    if (*count > 0) sift_down(heap, *count, 0);
    return least;
}

static uint64_t heap_entry(uint32_t rank, uint32_t place) { return (uint64_t)rank << 32 | place; }

/* ---- merging ---- */

/* Finds the merge of the symbol at this place with the next one, and puts it on the heap. */
static void find_merge(const Bpe *bpe, Symbol *symbol, uint32_t place, uint64_t *heap,
                       size_t *heap_count) {
    Symbol *left = &symbol[place];
    left->rank =
        left->next == NO_SYMBOL ? BPE_NO_MERGE : bpe_rank(bpe, left->id, symbol[left->next].id);
    if (left->rank != BPE_NO_MERGE) push(heap, heap_count, heap_entry(left->rank, place));
}

static void merge_all(const Bpe *bpe, Symbol *symbol, uint64_t *heap, size_t heap_count) {
    while (heap_count > 0) {
        uint64_t least = pop(heap, &heap_count);
        uint32_t rank = (uint32_t)(least >> 32), place = (uint32_t)least;
        Symbol *left = &symbol[place];
        if (left->rank != rank) continue;
        Symbol *right = &symbol[left->next];
        right->rank = BPE_NO_MERGE;
        left->id = bpe->merge[rank].result;
        left->next = right->next;
        if (left->next != NO_SYMBOL) symbol[left->next].previous = place;
        find_merge(bpe, symbol, place, heap, &heap_count);
        if (left->previous != NO_SYMBOL) find_merge(bpe, symbol, left->previous, heap, &heap_count);
    }
}

bool bpe_word(const Bpe *bpe, BpeScratch *scratch, const char *word, size_t bytes, int32_t *ids,
              size_t *count) {
    if (!reserve(scratch, bytes)) return false;
    Symbol *symbol = scratch->symbol;
    uint64_t *heap = scratch->heap;
    size_t heap_count = 0;
    for (uint32_t i = 0; i < bytes; i++)
        symbol[i] = (Symbol){.id = (uint32_t)bpe->byte_id[(unsigned char)word[i]],
                             .previous = i == 0 ? NO_SYMBOL : i - 1,
                             .next = i + 1 == bytes ? NO_SYMBOL : i + 1};
    for (uint32_t i = 0; i < bytes; i++) find_merge(bpe, symbol, i, heap, &heap_count);
    merge_all(bpe, symbol, heap, heap_count);
    *count = 0;
    for (uint32_t i = 0; i != NO_SYMBOL; i = symbol[i].next)
        ids[(*count)++] = (int32_t)symbol[i].id;
    return true;
}
