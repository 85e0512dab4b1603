#include "gpt/evaluate.h"

#include <stdlib.h>

#include "runtime/error.h"

/* Adds the summed loss of `windows` windows of T predictions from `position`. */
static bool add_batch(Gpt *model, const Dataset *dataset, size_t position, size_t windows, size_t T,
                      int32_t *buffer, double *sum) {
    int32_t *tokens = buffer, *targets = tokens + windows * T;
    if (!dataset_read(dataset, position, windows * T, tokens) ||
        !dataset_read(dataset, position + 1, windows * T, targets))
        return false;
    gpt_forward(model, tokens, targets, windows, T, GPT_EVALUATE);
    *sum += gpt_loss(model) * (double)(windows * T);
    return true;
}

bool gpt_evaluate(Gpt *model, Comm *comm, const Dataset *dataset, size_t T, size_t limit,
                  double *loss, size_t *predictions) {
    size_t N = dataset_tokens(dataset), B = gpt_options(model)->B;
    if (N < 2) return error_set("an evaluation needs at least 2 tokens, and the data has %zu", N);
    size_t total = limit && limit < N - 1 ? limit : N - 1;
    size_t windows = total / T, rest = total % T, batches = (windows + B - 1) / B;
    size_t rank = comm ? comm_rank(comm) : 0, ranks = comm ? comm_ranks(comm) : 1;
    int32_t *buffer = malloc(2 * B * T * sizeof *buffer);
    if (!buffer) return error_set("out of host memory");

    double sum = 0;
    bool good = true;
    for (size_t i = rank; good && i < batches; i += ranks) {
        size_t count = windows - i * B < B ? windows - i * B : B;
        good = add_batch(model, dataset, i * B * T, count, T, buffer, &sum);
    }
    if (good && rest && batches % ranks == rank)
        good = add_batch(model, dataset, windows * T, 1, rest, buffer, &sum);
    free(buffer);
    if (comm && comm_sum_double(comm, !good) > 0)
        return good ? error_set("another rank could not read its share") : false;
    if (!good) return false;
    *loss = (comm ? comm_sum_double(comm, sum) : sum) / (double)total;
    if (predictions) *predictions = total;
    return true;
}
