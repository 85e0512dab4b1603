/* train_gpt sample: continues a prompt with a checkpoint, or a conversation line by line. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpt/commands.h"
#include "gpt/options.h"
#include "gpt/sample.h"
#include "runtime/error.h"
#include "runtime/files.h"

#define PROMPT_BYTES ((size_t)1 << 26)

static TextOptions text_options(uint64_t seed) {
    TextOptions text = {
        .sampling = {(float)options.temperature, (float)options.top_p, (size_t)options.top_k, seed},
        .tokens = (size_t)options.sample_tokens,
        .samples = 1,
        .until = "",
        .file = stdout,
        .stop = &interrupted,
    };
    return text;
}

void write_sample(Gpt *model, const Tokenizer *tokenizer, uint64_t seed) {
    TextOptions text = text_options(seed);
    if (!gpt_write_text(model, tokenizer, "", &text)) printf("no sample: %s\n", error_message());
}

static bool go_on(GptText *text, const char *prompt, size_t bytes) {
    size_t tokens;
    double seconds;
    if (!gpt_text_continue(text, prompt, bytes)) return false;
    gpt_text_speed(text, &tokens, &seconds);
    fprintf(stderr, "%zu tokens in %.3f s: %.0f tokens/s\n", tokens, seconds,
            seconds > 0 ? (double)tokens / seconds : 0.0);
    return true;
}

/* A line in, its continuation out, until the input ends. An interrupt ends a continuation, or the
 * conversation where a line is waited for. */
static bool converse(GptText *text, const char *prompt, size_t bytes) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n = (ssize_t)bytes;
    if (bytes && !go_on(text, prompt, bytes)) return false;
    for (;;) {
        if (interrupted && n >= 0) {
            interrupted = 0;
            catch_interrupts();
        }
        if (isatty(STDIN_FILENO)) fprintf(stderr, "> ");
        n = getline(&line, &capacity, stdin);
        if (n < 0) break;
        if (n > 0 && line[n - 1] == '\n') n--;
        if (!go_on(text, line, (size_t)n)) fprintf(stderr, "train_gpt: %s\n", error_message());
    }
    bool good = interrupted || !ferror(stdin) || error_set("the input cannot be read");
    free(line);
    return good;
}

static bool sample(Gpt *model, const Tokenizer *tokenizer, const char *prompt, size_t bytes) {
    TextOptions want = text_options((uint64_t)options.seed);
    want.samples = (size_t)options.samples;
    want.until = options.stop;
    want.echo = !options.interactive;
    GptText *text = gpt_text_open(model, tokenizer, &want);
    if (!text) return false;
    catch_interrupts();
    bool good = (options.interactive ? converse : go_on)(text, prompt, bytes);
    gpt_text_close(text);
    return good;
}

/* The prompt of --prompt or --prompt-file, to be freed. */
static char *read_prompt(size_t *bytes) {
    if (options.prompt[0] && options.prompt_file[0]) {
        error_set("there can be --prompt or --prompt-file, not both");
        return NULL;
    }
    if (options.prompt_file[0]) return file_read(options.prompt_file, PROMPT_BYTES, bytes);
    *bytes = strlen(options.prompt);
    return strdup(options.prompt);
}

bool command_sample(Comm *comm) {
    GptConfig config;
    size_t bytes;
    if (options.interactive && options.samples > 1)
        return error_set("--interactive goes on with one text; --samples=%lld was given",
                         (long long)options.samples);
    char *prompt = read_prompt(&bytes);
    if (!prompt) return false;
    options.batch = 1;
    Device *device = open_device(comm);
    Gpt *model = open_checkpoint(device, &config);
    Tokenizer *tokenizer = model ? open_tokenizer(options.checkpoint) : NULL;
    bool good = tokenizer && check_vocabulary(tokenizer_vocabulary(tokenizer), &config) &&
                sample(model, tokenizer, prompt, bytes);
    tokenizer_free(tokenizer);
    gpt_free(model);
    device_close(device);
    free(prompt);
    return good;
}
