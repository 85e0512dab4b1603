/* train_gpt: trains a GPT from scratch, samples from it, evaluates it, and plans its memory.
 *
 * The training loop and the table of commands; the options are in gpt/options.c, the other commands
 * in gpt/command_NAME.c. C, compiled as such with or without CUDA. */
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/loader.h"
#include "gpt/checkpoint.h"
#include "gpt/commands.h"
#include "gpt/evaluate.h"
#include "gpt/options.h"
#include "gpt/schedule.h"
#include "runtime/error.h"
#include "runtime/log.h"
#include "runtime/run.h"

/* --- Training ------------------------------------------------------------------------------- */

typedef struct {
    Comm *comm;
    Device *device;
    Corpus corpus;
    Gpt *model;
    Loader loader;
    Log log;
    Run run;
    TrainerState state;
    bool diverged;
    bool tokenizer_given; /* on the command line, not by the record of a run */
    int32_t *tokens, *targets;
} Trainer;

static bool leader(const Trainer *t) { return comm_rank(t->comm) == 0; }

/* Whether every rank is well; one that is not takes the others along instead of leaving them waiting. */
static bool agree(Comm *comm, bool good) {
    bool all = comm_sum_double(comm, !good) == 0;
    if (good && !all) error_set("another rank failed");
    return all;
}

/* Rank 0 writes, everyone waits; all agree on whether it worked. */
static bool save(Trainer *t, const char *path, const TrainerState *state) {
    const char *extra[] = {t->run.tokenizer, NULL};
    bool failed = leader(t) &&
                  !checkpoint_save(path, t->model, state, NULL, t->corpus.tokenizer ? extra : NULL);
    comm_barrier(t->comm);
    return agree(t->comm, !failed);
}

static bool validate(Trainer *t) {
    double loss;
    if (!t->corpus.validation) return true;
    if (!gpt_evaluate(t->model, t->comm, t->corpus.validation, t->loader.T,
                      (size_t)options.eval_tokens, &loss, NULL))
        return false;
    bool best = loss < t->state.best_loss;
    if (best) t->state.best_loss = loss;
    t->state.stale_validations = best ? 0 : t->state.stale_validations + 1;
    if (leader(t)) log_validation(&t->log, t->state.step, loss, best);
    return !best || !options.keep_best || save(t, t->run.best, NULL);
}

static bool due(int64_t every, uint64_t step) { return every > 0 && step % (uint64_t)every == 0; }

/* Whether some rank was asked to stop; then all know it. */
static bool stopping(Trainer *t) {
    if (comm_sum_double(t->comm, interrupted) > 0) interrupted = 1;
    return interrupted;
}

/* Update number line->step: `accumulate` forwards and backwards, then AdamW. An interruption between
 * them abandons it. */
static bool update(Trainer *t, LogStep *line) {
    size_t ranks = comm_ranks(t->comm), rank = comm_rank(t->comm),
           micro_steps = (size_t)options.accumulate;
    AdamW adamw = {(float)line->lr,    (float)options.beta1,        (float)options.beta2,
                   (float)options.eps, (float)options.weight_decay, (float)options.clip,
                   line->step};
    bool done = false;
    gpt_zero_gradients(t->model);
    for (size_t micro = 0; micro < micro_steps && !(micro && stopping(t)); micro++) {
        if (!agree(t->comm, loader_next(&t->loader, t->tokens, t->targets))) return false;
        uint64_t key =
            random_mix(random_mix((uint64_t)options.seed, t->state.step), micro * ranks + rank);
        gpt_set_training(t->model, 1.0f / (float)(micro_steps * ranks), key,
                         micro + 1 == micro_steps);
        gpt_forward(t->model, t->tokens, t->targets, t->loader.B, t->loader.T, GPT_TRAIN);
        gpt_backward(t->model);
        done = micro + 1 == micro_steps;
    }
    if (!done) return true;
    gpt_update(t->model, adamw);
    comm_heartbeat(t->comm);
    line->loss = gpt_loss(t->model);
    line->norm = gpt_gradient_norm(t->model);
    t->diverged = !isfinite(line->loss) || !isfinite(line->norm);
    if (t->diverged)
        return error_set(
            "step %llu: the loss is %g and the gradient norm %g; stopped without "
            "updating. %s with a lower --lr or another --seed",
            (unsigned long long)line->step, line->loss, line->norm,
            file_exists(t->run.last) ? "Resume from the last good checkpoint"
                                     : "Nothing was saved before it: start again");
    t->state.step = line->step;
    t->state.tokens += (uint64_t)line->tokens;
    return true;
}

/* What else a step may be due for. */
static bool after_step(Trainer *t) {
    uint64_t step = t->state.step;
    bool final = step == (uint64_t)options.steps;
    if ((due(options.eval_every, step) || final) && !validate(t)) return false;
    if (due(options.sample_every, step) && !final) {
        if (leader(t) && t->corpus.tokenizer)
            write_sample(t->model, t->corpus.tokenizer, random_mix((uint64_t)options.seed, step));
        comm_barrier(t->comm);
    }
    return !due(options.save_every, step) || final || save(t, t->run.last, &t->state);
}

static bool patient(const Trainer *t) {
    return options.patience == 0 || t->state.stale_validations < (uint64_t)options.patience;
}

static bool train_loop(Trainer *t) {
    size_t ranks = comm_ranks(t->comm), T = t->loader.T;
    Schedule schedule = {SCHEDULE_COSINE, options.lr, options.min_lr, (uint64_t)options.warmup,
                         (uint64_t)options.steps};
    if (strcmp(options.schedule, "linear") == 0) schedule.kind = SCHEDULE_LINEAR;
    if (strcmp(options.schedule, "constant") == 0) schedule.kind = SCHEDULE_CONSTANT;
    LogStep line = {.steps = (uint64_t)options.steps,
                    .tokens = (double)(t->loader.B * T * ranks) * (double)options.accumulate,
                    .flops_per_token = gpt_flops_per_token(gpt_config(t->model), T),
                    .peak = gpt_options(t->model)->type == TYPE_BF16
                                ? log_peak_flops(t->device) * (double)ranks
                                : 0};
    while (!stopping(t) && patient(t) && t->state.step < (uint64_t)options.steps) {
        double start = log_seconds();
        line.step = t->state.step + 1;
        line.lr = schedule_lr(&schedule, t->state.step);
        if (!update(t, &line)) return false;
        if (t->state.step < line.step) break; /* interrupted: the update is abandoned */
        line.seconds = log_seconds() - start;
        if (leader(t))
            log_step(&t->log, &line, due(options.log_every, line.step) || line.step == 1);
        if (!after_step(t)) return false;
    }
    if (leader(t) && !patient(t))
        printf("no better validation loss in %lld validations: stopping\n",
               (long long)options.patience);
    return save(t, t->run.last, &t->state);
}

/* base: the checkpoint that the parameters come from; NULL for new ones. */
static bool start_model(Trainer *t, const char *base, const GptConfig *config) {
    GptOptions sizes = options_gpt(t->device, config, GPT_TRAINING);
    t->loader = (Loader){t->corpus.train,
                         sizes.B,
                         sizes.T,
                         comm_rank(t->comm),
                         comm_ranks(t->comm),
                         LOADER_SHUFFLED,
                         (uint64_t)options.seed,
                         0};
    if (!loader_check(&t->loader)) return false;
    t->model = gpt_create(config, &sizes, t->device, t->comm);
    if (!t->model) return false;
    t->tokens = malloc(sizes.B * sizes.T * sizeof *t->tokens);
    t->targets = malloc(sizes.B * sizes.T * sizeof *t->targets);
    if (!t->tokens || !t->targets) return error_set("out of host memory");
    t->state = (TrainerState){0, (uint64_t)options.seed, INFINITY, 0, 0};
    if (!base) gpt_init(t->model, (uint64_t)options.seed);
    if (base && !checkpoint_load(base, t->model)) return false;
    if (options.resume && !checkpoint_resume(base, t->model, &t->state)) return false;
    /* The place in the data, also for another number of ranks or sequences than before. */
    t->loader.next = t->state.tokens / (sizes.B * sizes.T * t->loader.ranks);
    return true;
}

/* A run that starts from a model goes on with the model's tokenizer, unless another one is given;
 * "char" is the model's, if that is one of characters. NULL: the one that the options say. */
static bool base_tokenizer(const Trainer *t, const char *base, Tokenizer **tokenizer) {
    *tokenizer = NULL;
    bool given = t->tokenizer_given && !options.resume;
    if (given && strcmp(options.tokenizer, "char") != 0) return true;
    *tokenizer = open_tokenizer(base);
    if (given && *tokenizer && strcmp(tokenizer_kind(*tokenizer), "char") != 0) {
        tokenizer_free(*tokenizer);
        *tokenizer = NULL;
    }
    return *tokenizer || given ||
           error_set("%s; --tokenizer=DIRECTORY, or bytes, says what to use", error_message());
}

static bool open_data_and_model(Trainer *t) {
    GptConfig config;
    Tokenizer *tokenizer = NULL;
    char path[FILE_PATH_BYTES];
    const char *base = options.resume ? t->run.last : options.init[0] ? options.init : NULL;
    if (base && !checkpoint_path(base, path, sizeof path)) return false;
    if (base) base = path;
    if (!options_model(options_train, t->device->type, base, &config)) return false;
    bool shards = corpus_is_shards(options.data);
    if (base && !shards && !base_tokenizer(t, base, &tokenizer)) return false;
    if (!open_corpus(&t->corpus, tokenizer, config.V, options.val_fraction)) return false;
    if (t->tokenizer_given && (shards || options.resume) &&
        !check_tokenizer(t->corpus.tokenizer, options.tokenizer))
        return false;
    if (!base) config.V = t->corpus.V;
    if (!check_vocabulary(t->corpus.V, &config) || !start_model(t, base, &config)) return false;
    options_resolve(&config, t->loader.T);
    return true;
}

/* Ranks that were given other options or other data would train different models. */
static bool same_on_all_ranks(Trainer *t) {
    char value[FILE_PATH_BYTES];
    uint64_t mine = random_mix(dataset_tokens(t->corpus.train), t->state.step), first;
    for (const Flag *flag = options_train; flag->name; flag++) {
        flags_format(flag, value, sizeof value);
        for (const char *c = value; *c; c++) mine = random_mix(mine, (unsigned char)*c);
    }
    first = mine;
    comm_broadcast(t->comm, &first, sizeof first);
    return first == mine ||
           error_set("rank %zu has other options or data than rank 0", comm_rank(t->comm));
}

static bool open_run(Trainer *t) {
    if (!options.resume && !run_create(&t->run, options.run, options.preset)) return false;
    if (!run_write_flags(&t->run, options_train)) return false;
    if (t->corpus.tokenizer && !tokenizer_save(t->corpus.tokenizer, t->run.directory)) return false;
    if (!log_open(&t->log, t->run.directory, t->state.step)) return false;
    const GptOptions *sizes = gpt_options(t->model);
    printf("%s | ranks %zu | %s | attention %s | %.1f M parameters | %zu x %zu tokens x %lld\n",
           t->device->name, comm_ranks(t->comm), type_name(sizes->type),
           attention_name(gpt_attention(t->model)),
           1e-6 * (double)gpt_parameters(gpt_config(t->model)), sizes->B, sizes->T,
           (long long)options.accumulate);
    gpt_plan_print(gpt_planned(t->model), stdout);
    if (t->state.step >= (uint64_t)options.steps)
        printf("all %lld steps are done already; --steps=N goes on\n", (long long)options.steps);
    printf("run directory: %s\n", t->run.directory);
    return true;
}

/* The options of the run to resume; what it began from stays what it was. */
static bool read_run(Trainer *t) {
    Flag *preset = flags_find(options_train, "preset");
    const char *given = preset->given ? options.preset : NULL;
    if (!options.run[0]) return error_set("--resume needs --run=DIRECTORY");
    if (flags_find(options_train, "init")->given)
        return error_set(
            "--resume goes on with the run's last checkpoint, and --init begins another run; give "
            "one of them");
    preset->given = false; /* so that the recorded one is read */
    return run_name(&t->run, options.run) && (!leader(t) || run_lock(&t->run)) &&
           run_read_flags(&t->run, options_train) &&
           (!given || strcmp(given, options.preset) == 0 ||
            error_set("--preset=%s: --resume goes on with the run's, %s; leave the option out",
                      given, options.preset));
}

static bool prepare(Trainer *t) {
    t->tokenizer_given = flags_find(options_train, "tokenizer")->given;
    bool good = (!options.resume || read_run(t)) && (t->device = open_device(t->comm)) != NULL;
    if (!agree(t->comm, good) || !comm_attach(t->comm, t->device)) return false;
    comm_set_timeout(t->comm, options.rank_timeout);
    if (!agree(t->comm, open_data_and_model(t))) return false;
    if (!agree(t->comm, same_on_all_ranks(t))) return false;
    return agree(t->comm, !leader(t) || open_run(t));
}

/* What was learnt is not lost with what failed, whose message stays. */
static void save_after_failure(Trainer *t) {
    char reason[512];
    snprintf(reason, sizeof reason, "%s", error_message());
    bool saved = save(t, t->run.last, &t->state);
    error_set("%s%s", reason, saved ? "; saved before stopping" : "");
}

static bool command_train(Comm *comm) {
    Trainer t = {.comm = comm};
    bool good = prepare(&t);
    if (good) {
        catch_interrupts();
        signal(SIGPIPE, SIG_IGN); /* a closed output does not end a training */
        good = train_loop(&t);
        if (!good && !t.diverged && t.state.step > 0) save_after_failure(&t);
    }
    if (good && leader(&t)) {
        if (t.corpus.tokenizer && options.sample_tokens && !interrupted)
            write_sample(t.model, t.corpus.tokenizer, (uint64_t)options.seed);
        if (isfinite(t.state.best_loss)) printf("best validation loss %.4f\n", t.state.best_loss);
        printf("%s after %llu steps; checkpoints in %s\n", interrupted ? "interrupted" : "done",
               (unsigned long long)t.state.step, t.run.directory);
    }
    log_close(&t.log);
    gpt_free(t.model);
    corpus_close(&t.corpus);
    device_close(t.device);
    free(t.tokens);
    free(t.targets);
    return good;
}

/* --- The program ---------------------------------------------------------------------------- */

static const struct {
    const char *name, *help;
    Flag *flags;
    bool (*run)(Comm *comm);
} commands[] = {
    {"train", "train a model; under mpirun, one rank a GPU", options_train, command_train},
    {"sample", "continue a prompt with a checkpoint", options_sample, command_sample},
    {"eval", "loss of a text or shards, or accuracy of multiple choices", options_eval, command_eval},
    {"export", "write a checkpoint for Hugging Face or llm.c", options_export, command_export},
    {"plan", "print the memory that training would take", options_plan, command_plan},
    {"tokenizer", "learn a BPE tokenizer from texts", options_tokenizer, command_tokenizer},
    {"tokenize", "turn texts into token shards", options_tokenize, command_tokenize},
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static void print_usage(FILE *file) {
    fprintf(file,
            "usage: train_gpt COMMAND [--option=value …]      train_gpt COMMAND --help lists the "
            "options\n");
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(file, "  %-9s %s\n", commands[i].name, commands[i].help);
}

int main(int argc, char **argv) {
    /* Without these three, a file of ours could be opened in the place of stdout. Of what was closed
     * only stderr is written to without an error. */
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 2 ? O_RDWR : O_RDONLY) < 0) return 2;
    signal(SIGXFSZ, SIG_IGN); /* a file beyond the limit on its size is a write that fails, EFBIG */
    size_t c = 0;
    while (c < COMMANDS && (argc < 2 || strcmp(argv[1], commands[c].name) != 0)) c++;
    bool help =
        argc > 1 && (strcmp(argv[argc - 1], "--help") == 0 || strcmp(argv[argc - 1], "-h") == 0);
    if (c == COMMANDS || help) {
        if (!help && argc > 1) fprintf(stderr, "train_gpt: there is no command \"%s\"\n", argv[1]);
        print_usage(help ? stdout : stderr);
        if (help && c < COMMANDS) flags_print_help(commands[c].flags, stdout);
        return help ? 0 : 2;
    }
    Comm *comm = NULL;
    bool good = flags_parse(commands[c].flags, argc - 2, argv + 2);
    if (good) good = (comm = comm_open(&argc, &argv)) && commands[c].run(comm);
    if (good && (fflush(stdout) != 0 || ferror(stdout)))
        good = error_set("the output could not be written");
    int status = good ? (interrupted ? 130 : 0) : 2;
    if (!good) fprintf(stderr, "train_gpt: %s\n", error_message());
    comm_close(comm);
    return status;
}
