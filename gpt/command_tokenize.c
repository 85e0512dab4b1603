/* train_gpt tokenize: texts to token shards, or to ids on the output. */
#include <stdio.h>
#include <string.h>

#include "data/survey.h"
#include "data/tokenize.h"
#include "gpt/commands.h"
#include "gpt/options.h"
#include "runtime/error.h"

static TokenizeSplit split(void) {
    if (strcmp(options.split, "end") == 0) return SPLIT_END;
    return strcmp(options.split, "documents") == 0 ? SPLIT_DOCUMENTS : SPLIT_AUTO;
}

static Tokenizer *choose_tokenizer(const Paths *inputs) {
    if (strcmp(options.tokenizer, "bytes") == 0) return tokenizer_bytes();
    if (strcmp(options.tokenizer, "char") == 0) return survey_characters(inputs, input_format());
    return tokenizer_load(options.tokenizer);
}

static void print_part(const char *name, const TokenizePart *part) {
    printf("%-10s %llu tokens, %llu document%s, %zu shard%s\n", name,
           (unsigned long long)part->tokens, (unsigned long long)part->documents,
           part->documents == 1 ? "" : "s", part->shards, part->shards == 1 ? "" : "s");
}

static void report(const TokenizeReport *done) {
    const char *output = options.output;
    if (done->interrupted) {
        printf("interrupted; the same command goes on from there\n");
        return;
    }
    print_part("train", &done->train);
    print_part("validation", &done->validation);
    printf("%.3f bytes a token\n",
           (double)done->text_bytes / (double)(done->train.tokens + done->validation.tokens));
    printf(done->was_complete ? "%s was complete already\n" : "written to %s\n", output);
    printf("train_gpt train --data=%s trains on it\n", output);
}

bool command_tokenize(Comm *comm) {
    (void)comm;
    Paths inputs = {0};
    TokenizeReport done;
    if (!options.print && !options.output[0])
        return error_set("--output=DIRECTORY is needed, or --print");
    Tokenizer *tokenizer = list_inputs(&inputs) ? choose_tokenizer(&inputs) : NULL;
    TokenizeOptions job = {
        .inputs = &inputs,
        .format = input_format(),
        .tokenizer = tokenizer,
        .special = options.special,
        .output = options.output,
        .val_fraction = options.val_fraction,
        .split = split(),
        .seed = (uint64_t)options.seed,
        .shard_tokens = (size_t)options.shard_tokens,
        .stop = &interrupted,
    };
    bool good = tokenizer != NULL;
    if (good && options.print) {
        good = tokenize_print(&job, stdout);
    } else if (good) {
        catch_interrupts();
        good = tokenize(&job, &done);
        if (good) report(&done);
    }
    tokenizer_free(tokenizer);
    paths_free(&inputs);
    return good;
}
