/* Draws the next token of each sequence from its logits, on the device, so that the next step can
 * begin without the host.
 *
 *   kept      = the top_k largest logits (and any equal to the least of them)
 *   w[v]      = exp((logits[v] - max) / temperature) for the kept, 0 for the others
 *   nucleus   = the fewest largest w that sum to top_p of all, with equals (Holtzman et al. 2020)
 *   token     = the first v whose w[0] + … + w[v] within the nucleus exceeds a uniform random share
 *
 * w is an integer, rounded at 2^-31 of the largest, so sums do not depend on their order, and from
 * equal logits the CPU and CUDA draw the same token. Draw number n of a sequence depends on nothing
 * but the seed, n and the sequence's number. */
#ifndef LAYERS_SAMPLE_H
#define LAYERS_SAMPLE_H

#include <stdint.h>

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    float temperature; /* 0: the largest logit always, the first one of equals */
    float top_p;       /* in (0, 1]; 1: all */
    size_t top_k;      /* 0: all */
    uint64_t seed;
} Sampling;

/* Also advances the sequence: positions and draws grow by 1. A token is -1 where a logit is NaN or
 * the largest one is infinite. */
typedef void SampleForward(int32_t *tokens,    /* (N), = */
                           int32_t *positions, /* (N), += 1 */
                           uint64_t *draws,    /* (N), += 1; the number of this draw before */
                           uint32_t *weights,  /* (N,V), overwritten */
                           const void *logits, /* (N,V) acc */
                           size_t N, size_t V, Sampling sampling, Device *device);

LAYER_TWINS(SampleForward, sample_forward);

#ifdef __cplusplus
}
#endif
#endif
