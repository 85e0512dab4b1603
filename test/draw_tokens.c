#include "test/draw_tokens.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>

#include "test/devices.h"

void draw_tokens(Device *device, const float *logits, size_t N, size_t V, Sampling sampling,
                 uint64_t first, int32_t *tokens) {
    int32_t *positions = calloc(N, sizeof *positions);
    uint64_t *draws = malloc(N * sizeof *draws);
    for (size_t n = 0; n < N; n++) positions[n] = (int32_t)n, draws[n] = first;
    int32_t *dpositions = put(device, positions, N * sizeof *positions);
    int32_t *dtokens = put(device, positions, N * sizeof *positions);
    uint64_t *ddraws = put(device, draws, N * sizeof *draws);
    uint32_t *weights = device_alloc(device, N * V * sizeof *weights);
    float *dlogits = put(device, logits, N * V * sizeof *logits);
    layers_get(device->type, TYPE_F32)
        ->sample_forward(dtokens, dpositions, ddraws, weights, dlogits, N, V, sampling, device);
    device_download(device, tokens, dtokens, N * sizeof *tokens);
    device_download(device, positions, dpositions, N * sizeof *positions);
    device_download(device, draws, ddraws, N * sizeof *draws);
    for (size_t n = 0; n < N; n++) {
        assert_int_equal(positions[n], n + 1);
        assert_int_equal(draws[n], first + 1);
    }
    void *const memory[] = {dpositions, dtokens, ddraws, weights, dlogits};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(device, memory[i]);
    free(positions);
    free(draws);
}
