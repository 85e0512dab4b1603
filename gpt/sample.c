#include "gpt/sample.h"

#include <stdlib.h>
#include <string.h>

#include "gpt/decode.h"
#include "gpt/text_stream.h"
#include "runtime/error.h"
#include "runtime/log.h"

/* One of the texts that are drawn at once. */
typedef struct {
    TextStream stream;
    char *memory; /* what the stream writes to where there are several samples */
    size_t bytes;
    bool done;
} Sample;

struct GptText {
    const Tokenizer *tokenizer;
    TextOptions options;
    GptDecoder *decoder;
    Device *device;
    Sample *samples;
    int32_t *drawn;  /* (samples) of one step */
    int32_t *tokens; /* the text so far */
    size_t n, capacity;
    int32_t end; /* the tokenizer's end of text; -1: none */
    size_t count;
    double seconds;
};

GptText *gpt_text_open(Gpt *model, const Tokenizer *tokenizer, const TextOptions *options) {
    GptText *text = calloc(1, sizeof *text);
    if (text) text->samples = calloc(options->samples, sizeof *text->samples);
    if (text) text->drawn = calloc(options->samples, sizeof *text->drawn);
    if (!text || !text->samples || !text->drawn) {
        error_set("out of host memory");
        gpt_text_close(text);
        return NULL;
    }
    text->tokenizer = tokenizer;
    text->options = *options;
    if (!text->options.until) text->options.until = "";
    text->device = gpt_device(model);
    text->end = tokenizer_special(tokenizer, "<|endoftext|>");
    text->decoder = gpt_decoder_create(model, options->samples, &options->sampling);
    if (text->decoder) return text;
    gpt_text_close(text);
    return NULL;
}

void gpt_text_close(GptText *text) {
    if (!text) return;
    gpt_decoder_free(text->decoder);
    free(text->samples);
    free(text->drawn);
    free(text->tokens);
    free(text);
}

static void append(GptText *text, const int32_t *tokens, size_t n) {
    if (text->capacity - text->n < n) {
        text->capacity = 2 * (text->n + n);
        text->tokens = realloc(text->tokens, text->capacity * sizeof *text->tokens);
        if (!text->tokens) error_fatal(__FILE__, __LINE__, "out of host memory");
    }
    if (n) memcpy(text->tokens + text->n, tokens, n * sizeof *tokens);
    text->n += n;
}

/* Appends a line break; false if the vocabulary has none. */
static bool append_line_break(GptText *text) {
    size_t n;
    int32_t *line_break = tokenizer_encode(text->tokenizer, "\n", 1, &n);
    if (line_break) append(text, line_break, n);
    free(line_break);
    return line_break != NULL;
}

static bool append_prompt(GptText *text, const char *more, size_t bytes) {
    size_t n = 0;
    int32_t *tokens = NULL;
    if (bytes) {
        tokens = tokenizer_encode_special(text->tokenizer, more, bytes, &n);
        if (!tokens) return false;
    }
    if (text->n > 0)
        append_line_break(text);
    else if (n == 0 && text->end >= 0)
        append(text, &text->end, 1);
    else if (n == 0 && !append_line_break(text))
        append(text, (const int32_t[]){0}, 1);
    append(text, tokens, n);
    free(tokens);
    return true;
}

static bool stopped(const GptText *text) { return text->options.stop && *text->options.stop; }

/* Puts one step's tokens into the samples; returns how many go on. */
static size_t add_drawn(GptText *text) {
    size_t going = 0, bytes;
    for (size_t b = 0; b < text->options.samples; b++) {
        Sample *sample = &text->samples[b];
        int32_t token = text->drawn[b];
        if (sample->done) continue;
        text->count++;
        sample->done = token == text->end;
        if (sample->done) continue;
        if (b == 0) append(text, &token, 1);
        const char *piece = tokenizer_decode(text->tokenizer, token, &bytes);
        sample->done = !text_stream_add(&sample->stream, piece, bytes);
        going += !sample->done;
    }
    if (text->options.samples == 1) fflush(text->options.file);
    return going;
}

static bool draw_all(GptText *text) {
    size_t going = text->options.samples;
    gpt_decoder_start(text->decoder, text->tokens, text->n);
    device_synchronize(text->device); /* so that the speed is that of the tokens alone */
    double start = log_seconds();
    text->count = 0;
    for (size_t i = 0; i < text->options.tokens && going > 0 && !stopped(text); i++) {
        gpt_decoder_next(text->decoder, text->drawn);
        for (size_t b = 0; b < text->options.samples; b++)
            if (text->drawn[b] < 0) return error_set("the model's logits are not finite");
        going = add_drawn(text);
    }
    text->seconds = log_seconds() - start;
    return true;
}

static bool open_streams(GptText *text, const char *more, size_t bytes) {
    for (size_t b = 0; b < text->options.samples; b++) {
        Sample *sample = &text->samples[b];
        bool single = text->options.samples == 1;
        FILE *file = single ? text->options.file : open_memstream(&sample->memory, &sample->bytes);
        sample->stream = (TextStream){.file = file, .until = text->options.until};
        sample->done = false;
        if (!file) return error_set("out of host memory");
        if (text->options.echo) fwrite(more, 1, bytes, file);
    }
    return true;
}

static void close_streams(GptText *text) {
    FILE *file = text->options.file;
    size_t samples = text->options.samples;
    for (size_t b = 0; b < samples; b++) {
        Sample *sample = &text->samples[b];
        if (!sample->stream.file) continue;
        text_stream_end(&sample->stream);
        if (samples > 1) {
            fclose(sample->stream.file);
            fprintf(file, "--- sample %zu of %zu ---\n", b + 1, samples);
            fwrite(sample->memory, 1, sample->bytes, file);
            free(sample->memory);
        }
        fputc('\n', file);
        sample->stream.file = NULL;
    }
    fflush(file);
}

bool gpt_text_continue(GptText *text, const char *more, size_t bytes) {
    if (!append_prompt(text, more, bytes)) return false;
    bool good = open_streams(text, more, bytes) && draw_all(text);
    close_streams(text);
    return good;
}

void gpt_text_speed(const GptText *text, size_t *tokens, double *seconds) {
    *tokens = text->count;
    *seconds = text->seconds;
}

bool gpt_write_text(Gpt *model, const Tokenizer *tokenizer, const char *prompt,
                    const TextOptions *options) {
    GptText *text = gpt_text_open(model, tokenizer, options);
    if (!text) return false;
    bool good = gpt_text_continue(text, prompt, strlen(prompt));
    gpt_text_close(text);
    return good;
}
