/* The mean loss of a model over a dataset. */
#ifndef GPT_EVALUATE_H
#define GPT_EVALUATE_H

#include "data/dataset.h"
#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The mean over the first `limit` predictions (0: all): windows of T tokens side by side, the last one
 * shorter, so that each token but the first is predicted exactly once. The ranks share the windows;
 * each gets the same result. *predictions (may be NULL) receives their number. False with
 * error_message() when the dataset has fewer than 2 tokens or cannot be read. */
bool gpt_evaluate(Gpt *model, Comm *comm, const Dataset *dataset, size_t T, size_t limit,
                  double *loss, size_t *predictions);

#ifdef __cplusplus
}
#endif
#endif
