/* train_gpt tokenizer: learns a byte-level BPE tokenizer from texts. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/tokenizer_train.h"
#include "gpt/commands.h"
#include "gpt/options.h"
#include "runtime/error.h"

/* The tokenizer's file is replaced in a directory that may hold others, such as a model. */
static bool save_tokenizer(const Tokenizer *tokenizer, const char *directory) {
    bool made = mkdir(directory, 0777) == 0;
    if (!made && errno != EEXIST)
        return error_set("the directory %s cannot be made: %s", directory, strerror(errno));
    bool good = tokenizer_save(tokenizer, directory);
    if (!good && made) rmdir(directory);
    return good;
}

static void report(const Tokenizer *tokenizer, const TokenizerTraining *training) {
    size_t V = tokenizer_vocabulary(tokenizer);
    printf("%.1f MB of text, %llu words, %llu of them distinct\n",
           1e-6 * (double)training->text_bytes, (unsigned long long)training->words,
           (unsigned long long)training->distinct_words);
    if (training->dropped_words)
        printf("rare words were dropped to bound the memory: %.2f%% of the words\n",
               100 * (double)training->dropped_words / (double)training->words);
    if (V < (size_t)options.vocab_size)
        printf("no pair of tokens is left that occurs twice, so the vocabulary ends below %lld\n",
               (long long)options.vocab_size);
    printf("written to %s: %zu tokens, the last is <|endoftext|>\n", options.output, V);
}

bool command_tokenizer(Comm *comm) {
    (void)comm;
    Paths inputs = {0};
    TokenizerTraining training;
    if (!options.output[0]) return error_set("--output=DIRECTORY is needed");
    Tokenizer *tokenizer = NULL;
    if (list_inputs(&inputs))
        tokenizer = tokenizer_train(&inputs, input_format(), (size_t)options.vocab_size, &training);
    bool good = tokenizer && save_tokenizer(tokenizer, options.output);
    if (good) report(tokenizer, &training);
    tokenizer_free(tokenizer);
    paths_free(&inputs);
    return good;
}
