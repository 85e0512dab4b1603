/* The order of the windows.
 *
 * Window w starts at w·T in the endlessly repeated ring, so lap e, the windows that start in
 * [eN, (e+1)N), is windows first(e) to first(e+1) - 1 with first(e) = ceil(eN/T). Places of the
 * order fall into the same laps, place p into lap floor(pT/N), and each lap permutes its own. */
#include "data/loader.h"

#include <string.h>

#include "runtime/error.h"
#include "runtime/random.h"

/* Products of a place and T, or of a lap and N, are taken in 128 bits. */
typedef unsigned __int128 Wide;

static uint64_t lap_first(uint64_t lap, uint64_t N, uint64_t T) {
    return (uint64_t)(((Wide)lap * N + T - 1) / T);
}

uint64_t loader_window(const Loader *loader, uint64_t place) {
    uint64_t N = dataset_tokens(loader->dataset), T = loader->T, window = place;
    if (loader->order == LOADER_SHUFFLED) {
        uint64_t lap = (uint64_t)((Wide)place * T / N);
        uint64_t first = lap_first(lap, N, T), windows = lap_first(lap + 1, N, T) - first;
        window = first + random_permute(place - first, windows, random_mix(loader->seed, lap));
    }
    return (uint64_t)((Wide)window * T % N);
}

bool loader_check(const Loader *loader) {
    size_t N = dataset_tokens(loader->dataset), T = loader->T;
    if (loader->B == 0 || T == 0 || loader->rank >= loader->ranks)
        return error_set(
            "a loader of B = %zu, T = %zu for rank %zu of %zu serves nothing: B and T "
            "are at least 1, and ranks are numbered from 0",
            loader->B, T, loader->rank, loader->ranks);
    if (N > T) return true;
    if (N < 2)
        return error_set(
            "the dataset has %zu token and T = %zu needs at least T + 1: one token "
            "cannot be trained on at any T",
            N, T);
    return error_set(
        "the dataset has %zu tokens and T = %zu needs at least T + 1 = %zu; the "
        "largest T that fits is %zu",
        N, T, T + 1, N - 1);
}

bool loader_next(Loader *loader, int32_t *tokens, int32_t *targets) {
    size_t B = loader->B, T = loader->T;
    uint64_t place = (loader->next * loader->ranks + loader->rank) * B;
    for (size_t b = 0; b < B; b++, tokens += T, targets += T) {
        uint64_t start = loader_window(loader, place + b);
        if (!dataset_read(loader->dataset, start, T, tokens) ||
            !dataset_read(loader->dataset, start + T, 1, &targets[T - 1]))
            return false;
        memcpy(targets, tokens + 1, (T - 1) * sizeof *targets);
    }
    loader->next++;
    return true;
}
