/* The parsers under a coverage-guided fuzzer (libFuzzer) with AddressSanitizer and UBSan.
 *
 * An input is one letter, which picks a target of the table below, and the files that the target
 * reads, separated by SEPARATOR. A parser may accept or refuse them; it must do so in bounds, in
 * bounded time and without a leak.
 *
 * `make fuzz minutes=60` goes on from the inputs of test/corpus, which `make test` runs too
 * (test/test_fuzz.c). It ends at a finding, a file build/fuzz/found-…: mend the parser, and add the
 * file to test/corpus. Inputs that reach more of the code come to lie in build/fuzz/corpus;
 * `build/fuzz/fuzz_parsers -merge=1 test/corpus build/fuzz/corpus` takes over what adds to it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/dataset.h"
#include "data/json.h"
#include "data/text_source.h"
#include "data/tokenize_record.h"
#include "gpt/checkpoint.h"
#include "gpt/config_json.h"
#include "gpt/generation.h"
#include "gpt/llmc.h"
#include "gpt/multiple_choice.h"
#include "gpt/trainer_json.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/log.h"
#include "runtime/run.h"
#include "runtime/safetensors.h"

#define SEPARATOR "\n%%%%\n"
enum { MOST_FILES = 3, MOST_READ = 256 };

static char directory[64]; /* private, for the files of one input */

typedef struct {
    char path[FILE_PATH_BYTES];
    const uint8_t *data;
    size_t size;
} File;

/* --- The targets: `file` are the input's files, in the target's order ------------------------ */

static void read_some(const Safetensors *tensors) {
    static float values[MOST_READ];
    static int32_t integers[MOST_READ];
    for (size_t i = 0; i < safetensors_count(tensors); i++) {
        const SafetensorsTensor *tensor = safetensors_at(tensors, i);
        size_t n = tensor->elements < MOST_READ ? tensor->elements : MOST_READ;
        safetensors_read_float(tensors, tensor, tensor->elements - n, n, values);
        safetensors_read_int32(tensors, tensor, 0, n, integers);
        safetensors_find(tensors, tensor->name);
    }
}

static void fuzz_safetensors(const File *file) {
    Safetensors *tensors = safetensors_open(file[0].path);
    if (tensors) read_some(tensors);
    safetensors_close(tensors);
}

static void fuzz_index(const File *file) {
    Safetensors *tensors = safetensors_open_index(file[0].path);
    if (tensors) read_some(tensors);
    safetensors_close(tensors);
}

/* The ids of a text, and the text of the ids, cut where it may be. */
static void encode(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    size_t cut = tokenizer_cut(tokenizer, text, bytes), count = 0, length;
    if (cut > bytes) abort();
    free(tokenizer_encode(tokenizer, text, cut, &count));
    int32_t *ids = tokenizer_encode_special(tokenizer, text, bytes, &count);
    for (size_t i = 0; ids && i < count; i++) {
        if (ids[i] < 0 || (size_t)ids[i] >= tokenizer_vocabulary(tokenizer)) abort();
        tokenizer_decode(tokenizer, ids[i], &length);
    }
    free(ids);
}

/* The directory has a tokenizer; the last file is the text. What is read and written again is the
 * same tokenizer: it gives the same ids. */
static void load_and_encode(const File *text) {
    const char *bytes = (const char *)text->data;
    Tokenizer *tokenizer = tokenizer_load(directory);
    if (!tokenizer) return;
    encode(tokenizer, bytes, text->size);
    generation_end(directory, SIZE_MAX);

    Tokenizer *again = tokenizer_save(tokenizer, directory) ? tokenizer_load(directory) : NULL;
    if (!again) error_fatal(__FILE__, __LINE__, "%s", error_message());
    size_t count = 0, count_again = 0;
    int32_t *ids = tokenizer_encode_special(tokenizer, bytes, text->size, &count);
    int32_t *ids_again = tokenizer_encode_special(again, bytes, text->size, &count_again);
    if (count != count_again || !ids != !ids_again) abort();
    if (ids && memcmp(ids, ids_again, count * sizeof *ids) != 0) abort();
    free(ids);
    free(ids_again);
    tokenizer_free(again);
    tokenizer_free(tokenizer);
    char path[FILE_PATH_BYTES]; /* where it was not one of the input's files */
    if (file_join(path, directory, "tokenizer.json")) unlink(path);
}

static void fuzz_tokenizer(const File *file) { load_and_encode(&file[1]); }
static void fuzz_vocabulary(const File *file) { load_and_encode(&file[2]); }

/* The text of a text's ids is the text. */
static void round_trip(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    size_t count = 0, offset = 0, length;
    int32_t *ids = tokenizer_encode(tokenizer, text, bytes, &count);
    if (!ids) abort();
    for (size_t i = 0; i < count; i++, offset += length) {
        const char *piece = tokenizer_decode(tokenizer, ids[i], &length);
        if (length > bytes - offset || memcmp(piece, text + offset, length) != 0) abort();
    }
    if (offset != bytes) abort();
    free(ids);
}

static void fuzz_characters(const File *file) {
    static const int32_t merges[][2] = {{67, 68}, {256, 256}, {220, 67}, {220, 220}};
    static Tokenizer *bpe;
    const char *text = (const char *)file[0].data;
    Tokenizer *tokenizer = tokenizer_characters(text, file[0].size);
    if (tokenizer) round_trip(tokenizer, text, file[0].size);
    tokenizer_free(tokenizer);

    if (!bpe) bpe = tokenizer_bpe(merges, 4, NULL, 0);
    if (!bpe) error_fatal(__FILE__, __LINE__, "%s", error_message());
    round_trip(bpe, text, file[0].size);
}

static void read_tokens(Dataset *dataset) {
    static int32_t tokens[MOST_READ];
    if (dataset) {
        dataset_read(dataset, dataset_tokens(dataset) - 1, MOST_READ, tokens);
        dataset_restrict(dataset, dataset_tokens(dataset) / 2, 1);
        dataset_read(dataset, 0, MOST_READ, tokens);
    }
    dataset_close(dataset);
}

static void fuzz_shards(const File *file) {
    (void)file;
    read_tokens(dataset_from_shards(directory, 50257, true));
    read_tokens(dataset_from_shards(directory, 300, false));
}

static void fuzz_nanogpt(const File *file) {
    (void)file;
    read_tokens(dataset_from_nanogpt(directory, 50257));
}

static const GptConfig tiny = {.L = 1, .NH = 1, .C = 2, .T = 8, .V = 16, .layernorm_eps = 1e-5f};

static Gpt *tiny_model(void) {
    static Device *device;
    static Gpt *model;
    if (model) return model;
    GptOptions options = {.B = 32, .T = tiny.T, .type = TYPE_F32, .attention = ATTENTION_NAIVE};
    device = device_open(DEVICE_CPU, 0);
    model = device ? gpt_create(&tiny, &options, device, NULL) : NULL;
    if (!model) error_fatal(__FILE__, __LINE__, "%s", error_message());
    gpt_init(model, 1);
    return model;
}

static void fuzz_llmc(const File *file) {
    GptConfig config;
    if (llmc_config(file[0].path, &config)) llmc_load(file[0].path, tiny_model());
}

static void fuzz_checkpoint(const File *file) {
    (void)file;
    GptConfig config;
    if (checkpoint_config(directory, &config)) checkpoint_load(directory, tiny_model());
}

static void fuzz_multiple_choice(const File *file) {
    size_t correct, examples;
    gpt_init(tiny_model(), 1); /* another target may have left numbers that are not finite */
    if (multiple_choice_is(file[0].path))
        gpt_multiple_choice(tiny_model(), file[0].path, &correct, &examples);
}

static void fuzz_config(const File *file) {
    GptConfig config;
    config_json_read(file[0].path, &config);
}

static void fuzz_trainer(const File *file) {
    static const char *const needed[] = {"model.safetensors", NULL};
    TrainerState state;
    trainer_json_read(file[0].path, directory, needed, &state);
}

static void read_text(const char *path, TextFormat format, const Tokenizer *tokenizer) {
    TextPiece piece;
    TextPlace place = {0};
    TextSource *source = text_open(path, format, tokenizer);
    if (!source) error_fatal(__FILE__, __LINE__, "%s", error_message());
    text_cut_before(source, 100);
    volatile char last;
    for (int i = 0; i < 1000 && text_next(source, &piece) > 0; i++) {
        if (piece.bytes > 0) last = piece.text[piece.bytes - 1];
        if (i == 0) place = text_place(source);
    }
    (void)last;
    if (text_seek(source, place)) text_next(source, &piece);
    text_close(source);
}

static void fuzz_progress(const File *file) {
    TokenizeState state;
    TokenizeReport report;
    cJSON *plan = json_read(file[0].path, 1 << 20);
    size_t inputs = (size_t)cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(plan, "inputs"));
    if (plan && tokenize_read_progress(directory, plan, &state) && state.input > inputs) abort();
    tokenize_read_manifest(directory, plan, &report);
    cJSON_Delete(plan);
}

static void fuzz_log(const File *file) {
    (void)file;
    Log log;
    if (log_open(&log, directory, 5)) log_close(&log);
}

static void fuzz_text(const File *file) {
    static Tokenizer *bytes, *bpe;
    if (!bytes) bytes = tokenizer_bytes();
    if (!bpe) bpe = tokenizer_bpe(NULL, 0, NULL, 0);
    if (!bytes || !bpe) error_fatal(__FILE__, __LINE__, "%s", error_message());
    read_text(file[0].path, TEXT_PLAIN, bytes);
    read_text(file[0].path, TEXT_PLAIN, bpe);
    read_text(file[0].path, TEXT_LINES, bytes);
    read_text(file[0].path, TEXT_JSONL, bytes);
}

/* One option of each type; `list` keeps its memory from input to input. */
static int64_t whole;
static double number;
static bool truth;
static const char *line, *choice;
static FlagList list;

static void reset_flags(Flag flags[7]) {
    const Flag fresh[7] = {
        {"steps", FLAG_INT, &whole, 0, 1e6, NULL, "updates", false},
        {"lr", FLAG_FLOAT, &number, 0, 1e300, NULL, "learning rate", false},
        {"resume", FLAG_BOOL, &truth, 0, 0, NULL, "go on", false},
        {"data", FLAG_STRING, &line, 0, 0, NULL, "text", false},
        {"device", FLAG_CHOICE, &choice, 0, 0, "auto|cpu|cuda", "where", false},
        {"input", FLAG_LIST, &list, 0, 0, NULL, "files", false},
        {0},
    };
    memcpy(flags, fresh, sizeof fresh);
    whole = 0, number = 0, truth = false, line = NULL, choice = "auto";
    list.count = 0;
}

static void fuzz_recorded_flags(const File *file) {
    (void)file;
    Flag flags[7];
    Run run;
    reset_flags(flags);
    if (run_name(&run, directory) && run_read_flags(&run, flags)) {
        FILE *out = fopen("/dev/null", "w");
        if (!out) error_fatal(__FILE__, __LINE__, "/dev/null cannot be opened");
        flags_print_values(flags, out);
        flags_print_help(flags, out);
        fclose(out);
    }
}

/* The words of a command line, one a line. */
static void fuzz_command_line(const File *file) {
    Flag flags[7];
    char *words[64], *rest;
    int count = 0;
    char *text = file_read(file[0].path, (size_t)1 << 30, NULL);
    if (!text) error_fatal(__FILE__, __LINE__, "%s", error_message());
    for (char *word = strtok_r(text, "\n", &rest); word && count < 64;
         word = strtok_r(NULL, "\n", &rest))
        words[count++] = word;
    reset_flags(flags);
    flags_parse(flags, count, words);
    reset_flags(flags); /* before the words go */
    free(text);
}

static const struct {
    char letter;
    const char *files[MOST_FILES];
    void (*fuzz)(const File *file);
} targets[] = {
    {'s', {"model.safetensors"}, fuzz_safetensors},
    {'i', {"model.safetensors.index.json", "a.safetensors", "b.safetensors"}, fuzz_index},
    {'t', {"tokenizer.json", "text"}, fuzz_tokenizer},
    {'v', {"vocab.json", "merges.txt", "text"}, fuzz_vocabulary},
    {'u', {"text"}, fuzz_characters},
    {'d', {"a.bin", "b.bin"}, fuzz_shards},
    {'n', {"a.bin", "b.bin"}, fuzz_nanogpt},
    {'l', {"model.bin"}, fuzz_llmc},
    {'k', {"config.json", "model.safetensors"}, fuzz_checkpoint},
    {'m', {"choices.bin"}, fuzz_multiple_choice},
    {'c', {"config.json"}, fuzz_config},
    {'r', {"trainer.json", "model.safetensors"}, fuzz_trainer},
    {'x', {"text.gz"}, fuzz_text},
    {'p', {"plan.json", "progress.json", "manifest.json"}, fuzz_progress},
    {'g', {"log.csv"}, fuzz_log},
    {'f', {"flags.txt"}, fuzz_recorded_flags},
    {'a', {"words"}, fuzz_command_line},
};

/* --- Running one ------------------------------------------------------------------------------ */

static void remove_directory(void) { rmdir(directory); }

static void make_directory(void) {
    bool shared = access("/dev/shm", W_OK) == 0; /* memory: no disk is worn out */
    snprintf(directory, sizeof directory, "%s/fuzz.XXXXXX", shared ? "/dev/shm" : "/tmp");
    if (!mkdtemp(directory)) error_fatal(__FILE__, __LINE__, "no temporary directory");
    atexit(remove_directory);
}

static void write_file(const File *file) {
    FILE *out = fopen(file->path, "wb");
    size_t written = out ? fwrite(file->data, 1, file->size, out) : 0;
    if (!out || fclose(out) != 0 || written != file->size)
        error_fatal(__FILE__, __LINE__, "%s cannot be written", file->path);
}

/* Cuts the input at the separators. Where there are fewer than the target's files ask for, the last
 * ones don't exist. */
static void run_target(size_t target, const uint8_t *data, size_t size) {
    static File file[MOST_FILES];
    const char *const *names = targets[target].files;
    const uint8_t *end = data + size, *next = data;
    for (size_t i = 0; i < MOST_FILES && names[i]; i++) {
        if (!file_join(file[i].path, directory, names[i]))
            error_fatal(__FILE__, __LINE__, "%s", error_message());
        file[i].data = next ? next : end;
        next = next ? memmem(next, (size_t)(end - next), SEPARATOR, strlen(SEPARATOR)) : NULL;
        file[i].size = (size_t)((next ? next : end) - file[i].data);
        if (file[i].data < end || i == 0) write_file(&file[i]);
        if (next) next += strlen(SEPARATOR);
    }
    targets[target].fuzz(file);
    for (size_t i = 0; i < MOST_FILES && names[i]; i++) unlink(file[i].path);
}

/* 0, or -1 if this is no input. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!directory[0]) make_directory();
    for (size_t i = 0; size > 0 && i < sizeof targets / sizeof targets[0]; i++)
        if (data[0] == (uint8_t)targets[i].letter) {
            run_target(i, data + 1, size - 1);
            return 0;
        }
    return -1;
}
