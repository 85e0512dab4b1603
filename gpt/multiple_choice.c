#include "gpt/multiple_choice.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/files.h"

enum { MAGIC = 20240522, VERSION = 1, HEADER_BYTES = 1024, START = 65535 };

/* One completion after its context, and what the model makes of it. */
typedef struct {
    const uint16_t *context, *completion;
    size_t context_length, completion_length;
    double mean_loss;
} Row;

typedef struct {
    size_t first, count, label; /* rows; the right one of them */
} Example;

/* A file in memory, checked. */
typedef struct {
    char *text;
    Row *rows;
    Example *examples;
    size_t row_count, example_count;
} Questions;

bool multiple_choice_is(const char *path) {
    int32_t magic = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool is = file >= 0 && read(file, &magic, sizeof magic) == sizeof magic && magic == MAGIC;
    if (file >= 0) close(file);
    return is;
}

/* --- Reading -------------------------------------------------------------------------------- */

/* A length and as many tokens, from *at on; NULL if they do not end before `end`. */
static const uint16_t *take_tokens(const uint16_t **at, const uint16_t *end, size_t *length) {
    if (*at == end) return NULL;
    const uint16_t *tokens = *at + 1;
    *length = **at;
    if (*length < 1 || *length > (size_t)(end - tokens)) return NULL;
    *at = tokens + *length;
    return tokens;
}

static bool check_row(const char *path, size_t number, const Row *row, const Gpt *model) {
    size_t V = gpt_config(model)->V, T = gpt_options(model)->T;
    /* The last token is predicted and not read. */
    size_t length = row->context_length + row->completion_length - 1;
    if (length > T)
        return error_set(
            "%s: example %zu has a completion that takes %zu tokens with its context; "
            "the model reads %zu",
            path, number, length, T);
    for (size_t i = 0; i < row->context_length + row->completion_length; i++) {
        size_t token =
            i < row->context_length ? row->context[i] : row->completion[i - row->context_length];
        if (token >= V)
            return error_set("%s: example %zu has token %zu, which is not in the vocabulary of %zu",
                             path, number, token, V);
    }
    return true;
}

/* The example at `at`, which ends at `end`; its rows are appended. */
static bool read_example(const char *path, Questions *questions, const uint16_t *at,
                         const uint16_t *end, const Gpt *model) {
    size_t number = questions->example_count;
    Example *example = &questions->examples[questions->example_count++];
    *example = (Example){questions->row_count, at[4], at[3]};
    if (example->label >= example->count)
        return error_set("%s: example %zu has %zu completions, and number %zu is said to be right",
                         path, number, example->count, example->label);
    Row *rows = realloc(questions->rows, (questions->row_count + example->count) * sizeof *rows),
        row;
    if (!rows) return error_set("no memory for the examples of %s", path);
    questions->rows = rows;
    at += 5;
    row.context = take_tokens(&at, end, &row.context_length);
    for (size_t i = 0; row.context && i < example->count; i++) {
        row.completion = take_tokens(&at, end, &row.completion_length);
        if (!row.completion) break;
        if (!check_row(path, number, &row, model)) return false;
        questions->rows[questions->row_count++] = row;
    }
    return (questions->row_count == example->first + example->count && at == end) ||
           error_set("%s: example %zu is damaged: its context and %zu completions do not fill it",
                     path, number, example->count);
}

static bool parse(const char *path, Questions *questions, size_t bytes, const Gpt *model) {
    const int32_t *header = (const int32_t *)questions->text;
    if (bytes < HEADER_BYTES || header[0] != MAGIC || header[1] != VERSION || header[2] < 1)
        return error_set("%s is not a file of multiple-choice examples: it has %zu bytes%s", path,
                         bytes,
                         bytes < HEADER_BYTES ? "" : " and another magic number, version or count");
    size_t count = (size_t)header[2];
    const uint16_t *at = (const uint16_t *)(questions->text + HEADER_BYTES);
    const uint16_t *end = at + (bytes - HEADER_BYTES) / 2;
    /* An example has at least 9 numbers, which bounds what a wrong count can ask for. */
    if (count > (size_t)(end - at) / 9)
        return error_set("%s has %zu bytes, too few for its %zu examples: the file is cut short",
                         path, bytes, count);
    questions->examples = malloc(count * sizeof *questions->examples);
    if (!questions->examples) return error_set("no memory for the examples of %s", path);
    for (size_t i = 0; i < count; i++) {
        size_t left = (size_t)(end - at), length = left < 9 ? 0 : at[1] / 2;
        if (length < 9 || length > left || at[0] != START || at[1] % 2 || at[2] != i % 65536)
            return error_set("%s: example %zu is cut short or damaged, at byte %zu", path, i,
                             bytes - 2 * left);
        if (!read_example(path, questions, at, at + length, model)) return false;
        at += length;
    }
    return (at == end && bytes % 2 == 0) ||
           error_set("%s has something after its %zu examples", path, count);
}

/* --- Judging -------------------------------------------------------------------------------- */

/* Mean losses of up to B rows, side by side; causality hides what pads the shorter ones. buffer: 2
 * B T tokens; losses: B T. */
static void score(Gpt *model, Row *rows, size_t count, int32_t *buffer, double *losses) {
    size_t longest = 0, most = gpt_options(model)->T;
    for (size_t i = 0; i < count; i++) {
        size_t length = rows[i].context_length + rows[i].completion_length - 1;
        if (length > longest) longest = length;
    }
    size_t T =
        (longest + 15) / 16 * 16; /* few different lengths, so that matmul plans are reused */
    if (T > most) T = most;
    int32_t *tokens = buffer, *targets = buffer + count * T;
    for (size_t i = 0; i < count; i++) {
        const Row *row = &rows[i];
        int32_t *read = tokens + i * T, *predicted = targets + i * T;
        for (size_t t = 0; t < T; t++) {
            size_t next = t + 1, n = row->context_length, m = row->completion_length;
            read[t] = t < n ? row->context[t] : t < n + m ? row->completion[t - n] : 0;
            predicted[t] = next >= n && next < n + m ? row->completion[next - n] : -1;
        }
    }
    gpt_forward(model, tokens, targets, count, T, GPT_EVALUATE);
    gpt_losses(model, losses);
    for (size_t i = 0; i < count; i++) {
        double sum = 0;
        for (size_t t = 0; t < T; t++) sum += losses[i * T + t];
        rows[i].mean_loss = sum / (double)rows[i].completion_length;
    }
}

static size_t count_correct(const Questions *questions, bool *finite) {
    size_t correct = 0;
    *finite = true;
    for (size_t i = 0; i < questions->example_count; i++) {
        const Example *example = &questions->examples[i];
        const Row *rows = questions->rows + example->first;
        size_t best = 0;
        for (size_t j = 0; j < example->count; j++) {
            if (rows[j].mean_loss < rows[best].mean_loss) best = j;
            *finite = *finite && isfinite(rows[j].mean_loss);
        }
        correct += best == example->label;
    }
    return correct;
}

bool gpt_multiple_choice(Gpt *model, const char *path, size_t *correct, size_t *examples) {
    size_t bytes, B = gpt_options(model)->B, T = gpt_options(model)->T;
    Questions questions = {.text = file_read(path, (size_t)1 << 33, &bytes)};
    int32_t *buffer = malloc(2 * B * T * sizeof *buffer);
    double *losses = malloc(B * T * sizeof *losses);
    bool good = questions.text && parse(path, &questions, bytes, model);
    if (good && (!buffer || !losses)) good = error_set("out of host memory");
    for (size_t i = 0; good && i < questions.row_count; i += B) {
        size_t count = questions.row_count - i < B ? questions.row_count - i : B;
        score(model, questions.rows + i, count, buffer, losses);
    }
    if (good) {
        bool finite;
        *correct = count_correct(&questions, &finite);
        *examples = questions.example_count;
        good = finite || error_set("the model's losses are not finite");
    }
    free(losses);
    free(buffer);
    free(questions.examples);
    free(questions.rows);
    free(questions.text);
    return good;
}
