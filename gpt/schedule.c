#include "gpt/schedule.h"

#include <math.h>

double schedule_lr(const Schedule *s, uint64_t step) {
    const double pi = 3.14159265358979323846;
    if (step < s->warmup) return s->lr * (double)(step + 1) / (double)(s->warmup + 1);
    if (s->kind == SCHEDULE_CONSTANT) return s->lr;
    if (step >= s->steps) return s->minimum;
    double progress = (double)(step - s->warmup) / (double)(s->steps - s->warmup);
    double remaining = s->kind == SCHEDULE_COSINE ? 0.5 * (1 + cos(pi * progress)) : 1 - progress;
    return s->minimum + remaining * (s->lr - s->minimum);
}
