/* train_gpt export: writes a checkpoint as a Hugging Face directory or as a model file of llm.c. */
#include <string.h>

#include "gpt/checkpoint.h"
#include "gpt/commands.h"
#include "gpt/llmc.h"
#include "gpt/options.h"
#include "runtime/error.h"

/* What tokenizers of transformers consist of. */
static const char *const tokenizer_files[] = {
    "tokenizer.json", "tokenizer_config.json",   "vocab.json",
    "merges.txt",     "special_tokens_map.json", "added_tokens.json",
};
enum { TOKENIZER_FILES = sizeof tokenizer_files / sizeof tokenizer_files[0] };

static bool export_model(Gpt *model) {
    const char *precision = strcmp(options.precision, "auto") == 0 ? "fp32" : options.precision;
    static char found[TOKENIZER_FILES][FILE_PATH_BYTES];
    const char *extra[TOKENIZER_FILES + 1] = {NULL};
    char home[FILE_PATH_BYTES];
    size_t count = 0;
    if (!checkpoint_home(options.checkpoint, home)) return false;
    for (size_t i = 0; i < TOKENIZER_FILES; i++) {
        if (!file_join(found[count], home, tokenizer_files[i])) return false;
        if (file_exists(found[count])) extra[count] = found[count], count++;
    }
    return checkpoint_export(options.output, model, precision, extra);
}

/* On the CPU in fp32, which holds every number of a checkpoint exactly. */
bool command_export(Comm *comm) {
    (void)comm;
    if (!options.output[0]) return error_set("--output=DIRECTORY or --output=FILE.bin is needed");
    Device *device = device_open(DEVICE_CPU, 0);
    GptOptions sizes = {.B = 1, .T = 1, .type = TYPE_F32, .use = GPT_INFERENCE};
    Gpt *model = open_checkpoint_as(device, NULL, &sizes);
    bool good = model && export_model(model);
    if (good)
        printf("written to %s%s\n", options.output,
               llmc_is_name(options.output)
                   ? "; to sample from it, put the checkpoint's tokenizer.json beside it"
                   : "");
    gpt_free(model);
    device_close(device);
    return good;
}
