#include "data/tokenize.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/batch.h"
#include "data/tokenize_record.h"
#include "runtime/error.h"
#include "runtime/log.h"
#include "runtime/progress.h"
#include "runtime/random.h"

enum { BATCH_BYTES = 16 << 20, BATCH_PIECES = 1 << 14, PRINT_BYTES = 1 << 20 };

static const double save_interval = 10; /* seconds */

typedef struct {
    const TokenizeOptions *options;
    TokenizeSplit split;
    int32_t separator; /* -1: none */
    Survey survey;
    cJSON *plan;
    DirectoryReplacement output;
    TokenizeState state;
    ShardWriter writer[PARTS];
    TextSource *source; /* of the file state.input; NULL: to be opened */
    Progress progress;
    bool writing;        /* what fails now fails for the disk */
    double saved;        /* when progress.json was written, */
    size_t saved_shards; /* and the shards then */
} Job;

/* ---- reading ---- */

/* Where a text's validation part begins. */
static uint64_t text_mark(const Job *job, const SurveyFile *file) {
    if (job->split != SPLIT_END) return UINT64_MAX;
    return (uint64_t)((double)file->text_bytes * (1 - job->options->val_fraction));
}

static bool open_source(Job *job) {
    const SurveyFile *file = &job->survey.file[job->state.input];
    const char *path = job->survey.paths->path[job->state.input];
    job->source = text_open(path, file->format, job->options->tokenizer);
    if (job->source == NULL) return false;
    text_cut_before(job->source, text_mark(job, file));
    return job->state.place.bytes == 0 || text_seek(job->source, job->state.place);
}

/* The next piece of all files: 1, 0 or -1. */
static int next_piece(Job *job, TextPiece *piece) {
    TokenizeState *state = &job->state;
    for (;; state->input++, state->place = (TextPlace){0}) {
        if (state->input == job->survey.paths->count) return 0;
        if (job->source == NULL && !open_source(job)) return -1;
        int got = text_next(job->source, piece);
        if (got != 0) return got;
        if (!survey_same(&job->survey, state->input, text_place(job->source).bytes)) return -1;
        text_close(job->source);
        job->source = NULL;
    }
}

/* Whether a document is for validation: drawn anew from its number, in any order. */
static bool is_drawn(const Job *job, uint64_t document) {
    uint64_t bits = random_mix(job->options->seed, document);
    return (double)(bits >> 11) * 0x1p-53 < job->options->val_fraction;
}

enum { TAG_VALIDATION = 1, TAG_BEGINS = 2, TAG_FIRST = 4 }; /* of its document, of it in its part */

/* What a piece that begins and ends at these places of its file is. */
static int piece_tag(Job *job, const SurveyFile *file, uint64_t begin, uint64_t end) {
    bool begins = file->format == TEXT_JSONL || begin == 0;
    job->state.document += begins;
    uint64_t mark = text_mark(job, file);
    bool validation = job->split == SPLIT_END ? end > mark : is_drawn(job, job->state.document - 1);
    bool first = begins || (validation && begin <= mark && job->split == SPLIT_END);
    return (validation ? TAG_VALIDATION : 0) | (begins ? TAG_BEGINS : 0) | (first ? TAG_FIRST : 0);
}

/* Collects pieces; state becomes the place after them. */
static bool read_batch(Job *job, Batch *batch) {
    TokenizeState *state = &job->state;
    TextPiece piece;
    int got = 1;
    while (batch->bytes < BATCH_BYTES && batch->pieces < BATCH_PIECES &&
           (got = next_piece(job, &piece)) > 0) {
        const SurveyFile *file = &job->survey.file[state->input];
        uint64_t begin = state->place.bytes;
        state->place = text_place(job->source);
        int tag = piece_tag(job, file, begin, state->place.bytes);
        if (piece.bytes == 0) continue;
        BatchPiece *added = batch_add(batch, piece.text, piece.bytes);
        if (added == NULL) return false;
        bool lines = file->format == TEXT_JSONL;
        added->tag = tag;
        added->path = job->survey.paths->path[state->input];
        added->unit = lines ? "line" : "byte";
        added->place = lines ? state->place.lines : begin;
    }
    return got >= 0;
}

/* ---- writing ---- */

static bool write_batch(Job *job, const Batch *batch) {
    job->writing = true;
    for (size_t i = 0; i < batch->pieces; i++) {
        const BatchPiece *piece = &batch->piece[i];
        int part = piece->tag & TAG_VALIDATION ? VALIDATION : TRAIN;
        ShardWriter *writer = &job->writer[part];
        bool separated = job->separator >= 0 && piece->tag & TAG_BEGINS;
        if (separated && !shard_writer_add(writer, &job->separator, 1)) return false;
        if (!shard_writer_add(writer, piece->ids, piece->count)) return false;
        job->state.documents[part] += (piece->tag & TAG_FIRST) != 0;
        job->state.tokens[part] = writer->tokens;
    }
    job->writing = false;
    return true;
}

static size_t whole_shards(const Job *job) {
    size_t shards = 0;
    for (int part = 0; part < PARTS; part++)
        shards += (size_t)(job->writer[part].tokens / job->options->shard_tokens);
    return shards;
}

static bool save(Job *job) {
    job->writing = true;
    for (int part = 0; part < PARTS; part++)
        if (!shard_writer_sync(&job->writer[part])) return false;
    job->saved = log_seconds();
    job->saved_shards = whole_shards(job);
    if (!tokenize_write_progress(job->output.staging, job->plan, &job->state)) return false;
    job->writing = false;
    return true;
}

static bool stopping(const Job *job) { return job->options->stop != NULL && *job->options->stop; }

static uint64_t text_done(const Job *job) {
    uint64_t done = job->state.place.bytes;
    for (size_t i = 0; i < job->state.input; i++) done += job->survey.file[i].text_bytes;
    return done;
}

/* Goes on to the end of the files, or until it is to stop before that. */
static bool encode_files(Job *job, bool *ended) {
    Batch batch = {0};
    bool good = true;
    job->progress = progress_begin("tokenizing", "B", text_done(job), job->survey.text_bytes);
    do {
        batch_clear(&batch);
        good = read_batch(job, &batch) &&
               batch_encode(&batch, job->options->tokenizer, job->options->special) &&
               write_batch(job, &batch);
        bool due = whole_shards(job) > job->saved_shards ||
                   log_seconds() - job->saved >= save_interval || stopping(job);
        if (good && due) good = save(job);
        progress_show(&job->progress, text_done(job));
        *ended = batch.pieces == 0;
    } while (good && !*ended && !stopping(job));
    progress_end(&job->progress);
    batch_free(&batch);
    text_close(job->source);
    job->source = NULL;
    return good;
}

/* ---- the directory ---- */

static bool check_free(const char *output) {
    if (!file_exists(output)) return true;
    Paths paths = {0};
    bool good = paths_add(&paths, output, "") &&
                (paths.count == 0 ||
                 error_set("%s exists and is not empty; name another directory", output));
    paths_free(&paths);
    return good;
}

/* Readies OUTPUT.tmp, with what an interrupted run left there if it had the same plan. */
static bool open_staging(Job *job) {
    const char *staging = job->output.staging;
    if (!directory_replace_open(&job->output, job->options->output)) return false;
    if (!tokenize_read_progress(staging, job->plan, &job->state)) {
        job->state = (TokenizeState){0};
        if (!directory_replace_clear(&job->output)) return false;
    }
    ShardWidth width = shard_width(tokenizer_vocabulary(job->options->tokenizer));
    static const char *const names[PARTS] = {"train", "val"};
    bool good = true;
    for (int part = 0; good && part < PARTS; part++)
        good = shard_writer_open(&job->writer[part], staging, names[part], width,
                                 job->options->shard_tokens, job->state.tokens[part]);
    job->saved = log_seconds();
    job->saved_shards = whole_shards(job);
    return good;
}

/* A training set, and a validation that predicts something. */
static bool check_parts(const Job *job) {
    uint64_t train = job->writer[TRAIN].tokens, validation = job->writer[VALIDATION].tokens;
    if (train > 0 && (validation >= 2 || job->options->val_fraction == 0)) return true;
    return error_set(
        "a validation fraction of %g leaves %llu tokens for training and %llu for "
        "validation; give more text, or another --val-fraction (0: no validation)",
        job->options->val_fraction, (unsigned long long)train, (unsigned long long)validation);
}

static bool finish(Job *job) {
    const char *staging = job->output.staging;
    char progress[FILE_PATH_BYTES];
    if (!check_parts(job)) return false;
    job->writing = true;
    for (int part = 0; part < PARTS; part++)
        if (!shard_writer_finish(&job->writer[part])) return false;
    if (!tokenizer_save(job->options->tokenizer, staging) ||
        !tokenize_write_manifest(staging, job->plan, job->survey.paths, job->writer,
                                 job->state.documents) ||
        !file_join(progress, staging, "progress.json"))
        return false;
    unlink(progress);
    return directory_replace_commit(&job->output, NULL);
}

/* What can be taken up again when the disk is well stays, and the sentence says so. */
static void clean_up(Job *job) {
    char progress[FILE_PATH_BYTES];
    if (job->writing && file_join(progress, job->output.staging, "progress.json") &&
        file_exists(progress))
        error_set("%s; the same command goes on from there", error_message());
    else
        directory_replace_abandon(&job->output);
}

static bool encode_into_output(Job *job, TokenizeReport *report) {
    bool ended = false, good = open_staging(job) && encode_files(job, &ended);
    report->interrupted = good && !ended;
    if (good && ended) good = finish(job);
    for (int part = 0; part < PARTS; part++) {
        TokenizePart *counts = part == TRAIN ? &report->train : &report->validation;
        *counts = (TokenizePart){job->state.tokens[part], job->state.documents[part],
                                 good ? shard_writer_shards(&job->writer[part]) : 0};
        shard_writer_abandon(&job->writer[part]);
    }
    if (!good) clean_up(job);
    directory_replace_pause(&job->output);
    return good;
}

/* ---- the whole ---- */

/* Drawn documents are known before they are encoded: this is when to say that there are none. */
static bool check_drawn(const Job *job) {
    uint64_t documents = job->survey.documents, drawn = 0;
    if (job->options->val_fraction == 0 || job->split == SPLIT_END) return true;
    for (uint64_t i = 0; i < documents; i++) drawn += is_drawn(job, i);
    return (drawn > 0 && drawn < documents) ||
           error_set(
               "of %llu documents, %llu fall into validation; give more of them, another "
               "--seed, --split=end, or another --val-fraction (0: no validation)",
               (unsigned long long)documents, (unsigned long long)drawn);
}

static bool choose_split(Job *job) {
    bool lines = false;
    for (size_t i = 0; i < job->survey.paths->count; i++)
        lines = lines || job->survey.file[i].format == TEXT_JSONL;
    job->split = job->options->split;
    if (job->split == SPLIT_AUTO)
        job->split = lines || job->survey.paths->count > 1 ? SPLIT_DOCUMENTS : SPLIT_END;
    return job->split != SPLIT_END || !lines ||
           error_set("--split=end takes the end of plain texts; JSON lines are split by documents");
}

bool tokenize(const TokenizeOptions *options, TokenizeReport *report) {
    Job job = {.options = options,
               .output.lock = -1,
               .writer = {[TRAIN].fd = -1, [VALIDATION].fd = -1},
               .separator = tokenizer_special(options->tokenizer, "<|endoftext|>")};
    *report = (TokenizeReport){0};
    bool good = survey_files(&job.survey, options->inputs, options->format, options->tokenizer) &&
                choose_split(&job) && check_drawn(&job) &&
                (job.plan = tokenize_plan(options, job.split, &job.survey)) != NULL;
    int complete = good ? tokenize_read_manifest(options->output, job.plan, report) : -1;
    report->text_bytes = job.survey.text_bytes;
    report->was_complete = complete > 0;
    good = complete > 0 ||
           (complete == 0 && check_free(options->output) && encode_into_output(&job, report));
    cJSON_Delete(job.plan);
    survey_free(&job.survey);
    return good;
}

/* ---- printing ---- */

/* Up to a batch of lines: 1 if there may be more, 0 or -1. */
static int read_lines(TextSource *source, const char *path, Batch *batch) {
    TextPiece piece;
    int got = 1;
    batch_clear(batch);
    while (batch->bytes < PRINT_BYTES && (got = text_next(source, &piece)) > 0) {
        BatchPiece *line = batch_add(batch, piece.text, piece.bytes);
        if (line == NULL) return -1;
        line->path = path;
        line->unit = "line";
        line->place = text_place(source).lines;
    }
    return got;
}

static void print_ids(const BatchPiece *line, FILE *file) {
    for (size_t i = 0; i < line->count; i++) fprintf(file, i == 0 ? "%d" : " %d", line->ids[i]);
    fputc('\n', file);
}

static bool print_file(const TokenizeOptions *options, const char *path, FILE *file) {
    TextFormat format = text_choose_format(path, options->format);
    if (format == TEXT_PLAIN) format = TEXT_LINES;
    TextSource *source = text_open(path, format, options->tokenizer);
    if (source == NULL) return false;
    Batch batch = {0};
    int got = 1;
    bool good = true;
    while (good && got > 0 && !ferror(file)) {
        got = read_lines(source, path, &batch);
        good = got >= 0 && batch_encode(&batch, options->tokenizer, options->special);
        for (size_t i = 0; good && i < batch.pieces; i++) print_ids(&batch.piece[i], file);
    }
    batch_free(&batch);
    text_close(source);
    return good;
}

bool tokenize_print(const TokenizeOptions *options, FILE *file) {
    bool good = true;
    for (size_t i = 0; good && i < options->inputs->count; i++)
        good = print_file(options, options->inputs->path[i], file);
    return good;
}
