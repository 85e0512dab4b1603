/* train_gpt eval: the loss and perplexity of a checkpoint on a text or shards, or its accuracy on
 * multiple-choice examples. */
#include <math.h>
#include <stdio.h>

#include "gpt/commands.h"
#include "gpt/evaluate.h"
#include "gpt/multiple_choice.h"
#include "gpt/options.h"
#include "runtime/error.h"

static bool eval_loss(Gpt *model) {
    const GptConfig *config = gpt_config(model);
    Corpus corpus = {0};
    double loss;
    size_t predictions;
    bool shards = corpus_is_shards(options.data);
    Tokenizer *tokenizer = shards ? NULL : open_tokenizer(options.checkpoint);
    bool good = (shards || tokenizer) &&
                open_corpus(&corpus, tokenizer, config->V, options.eval_fraction) &&
                check_vocabulary(corpus.V, config);
    const Dataset *dataset = corpus.validation ? corpus.validation : corpus.train;
    good = good &&
           gpt_evaluate(model, NULL, dataset, gpt_options(model)->T, (size_t)options.eval_tokens,
                        &loss, &predictions) &&
           (isfinite(loss) || error_set("the model's loss is not finite"));
    if (good && shards && corpus.tokenizer && !corpus.validation)
        fprintf(stderr, "%s has no validation part; this is the loss on its training part\n",
                options.data);
    if (good)
        printf("loss %.6f | perplexity %.4f | %zu predictions\n", loss, exp(loss), predictions);
    corpus_close(&corpus);
    return good;
}

static bool eval_choices(Gpt *model) {
    size_t correct, examples;
    if (!gpt_multiple_choice(model, options.data, &correct, &examples)) return false;
    printf("accuracy %.4f | %zu of %zu examples\n", (double)correct / (double)examples, correct,
           examples);
    return true;
}

bool command_eval(Comm *comm) {
    GptConfig config;
    Device *device = open_device(comm);
    Gpt *model = open_checkpoint(device, &config);
    bool good =
        model && (multiple_choice_is(options.data) ? eval_choices(model) : eval_loss(model));
    gpt_free(model);
    device_close(device);
    return good;
}
