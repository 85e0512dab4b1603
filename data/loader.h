/* Batches from a dataset.
 *
 * Windows of T tokens tile the ring without gap or overlap: window w starts at w·T mod N. Lap e of
 * the ring holds the windows that start in [eN, (e+1)N), and they are visited in an order shuffled
 * by the seed and e, so every token of a lap is served exactly once, for any number of ranks, and
 * laps cut the text at different places. A batch is a pure function of its number: global batch i
 * holds places i·ranks·B … of the order, rank r taking the B from i·ranks·B + r·B; resuming is
 * setting i. */
#ifndef DATA_LOADER_H
#define DATA_LOADER_H

#include "data/dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { LOADER_SEQUENTIAL, LOADER_SHUFFLED } LoaderOrder;

typedef struct {
    const Dataset *dataset; /* not owned */
    size_t B, T;
    size_t rank, ranks;
    LoaderOrder order;
    uint64_t seed;
    uint64_t next; /* number of the next global batch; set it to resume */
} Loader;

/* False with error_message() if the dataset has fewer than T + 1 tokens: the sentence gives the
 * tokens found, those needed and the largest T that fits. */
bool loader_check(const Loader *loader);

/* tokens (B,T) and targets (B,T), the tokens one place on, of batch `next`; then advances next.
 * False with error_message() when the dataset cannot be read. */
bool loader_next(Loader *loader, int32_t *tokens, int32_t *targets);

/* The start of the window at place p of the order (exposed for the tests of the exactly-once
 * claim). */
uint64_t loader_window(const Loader *loader, uint64_t place);

#ifdef __cplusplus
}
#endif
#endif
