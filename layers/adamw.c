/* AdamW on the CPU: one pass over parameters, moments and gradients at the speed of memory, 16
 * bytes read and 12 written for each float parameter. */
#include "layers/adamw.h"

#include <tgmath.h> /* sqrt of a float is sqrtf, in vectors */

void LAYER(adamw_update)(void *params_, void *master, void *m_, void *v_, const void *grads_,
                         const uint8_t *decay, const void *norm_, size_t n, AdamW adamw,
                         Device *device) {
    (void)master; /* the parameters themselves: real is acc on the CPU */
    (void)device;
    real *params = params_;
    acc *m = m_, *v = v_;
    const acc *grads = grads_;
    double norm = *(const acc *)norm_;
    if (!isfinite(norm)) return;

    double clip = adamw.clip > 0 ? fmin(1, adamw.clip / (norm + 1e-6)) : 1;
    double correction1 = 1 - pow(adamw.beta1, (double)adamw.step);
    double correction2 = 1 - pow(adamw.beta2, (double)adamw.step);
    acc grad_scale = (acc)clip;
    acc beta1 = adamw.beta1, rest1 = (acc)(1 - (double)adamw.beta1);
    acc beta2 = adamw.beta2, rest2 = (acc)(1 - (double)adamw.beta2);
    acc step_size = (acc)(adamw.lr / correction1);
    acc inverse_root2 = (acc)(1 / sqrt(correction2)), eps = adamw.eps;
#pragma omp parallel for schedule(static)
    for (size_t chunk = 0; chunk < n / ADAMW_CHUNK; chunk++) {
        acc keep = decay[chunk] ? (acc)(1 - (double)adamw.lr * adamw.weight_decay) : 1;
        size_t first = chunk * ADAMW_CHUNK;
#pragma omp simd
        for (size_t i = first; i < first + ADAMW_CHUNK; i++) {
            acc g = grads[i] * grad_scale;
            m[i] = beta1 * m[i] + rest1 * g;
            v[i] = beta2 * v[i] + rest2 * g * g;
            params[i] = keep * params[i] - step_size * m[i] / (sqrt(v[i]) * inverse_root2 + eps);
        }
    }
}
