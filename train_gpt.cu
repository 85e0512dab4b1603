/* train_gpt: trains a GPT from scratch, samples from it, evaluates it, and plans its memory.
 *
 * Wiring and the training loop; the options are in gpt/options.c, the kernels elsewhere. C, compiled
 * as such with or without CUDA. */
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "data/corpus.h"
#include "data/loader.h"
#include "gpt/checkpoint.h"
#include "gpt/evaluate.h"
#include "gpt/options.h"
#include "gpt/sample.h"
#include "gpt/schedule.h"
#include "runtime/error.h"
#include "runtime/log.h"
#include "runtime/run.h"

/* --- Wiring --------------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted;

/* The first signal asks for an end after saving; a second one ends the process at once. */
static void on_signal(int number) {
    interrupted = 1;
    signal(number, SIG_DFL);
}

static Device *open_device(const Comm *comm) {
    int gpus = device_count_gpus();
    bool cuda =
        strcmp(options.device, "cuda") == 0 || (strcmp(options.device, "auto") == 0 && gpus > 0);
    if (cuda && gpus > 0 && comm_local_ranks(comm) > (size_t)gpus) {
        error_set(
            "%zu ranks were started on a node with %d GPU%s; start at most one a GPU, or use "
            "--device=cpu",
            comm_local_ranks(comm), gpus, gpus == 1 ? "" : "s");
        return NULL;
    }
    return device_open(cuda ? DEVICE_CUDA : DEVICE_CPU, cuda ? (int)comm_local_rank(comm) : 0);
}

static bool open_corpus(Corpus *corpus, Tokenizer *tokenizer, size_t V, double fraction) {
    if (corpus_is_shards(options.data)) {
        tokenizer_free(tokenizer);
        return corpus_open_shards(corpus, options.data,
                                  options.val_data[0] ? options.val_data : NULL, V);
    }
    if (options.val_data[0]) {
        tokenizer_free(tokenizer);
        return error_set("--val-data goes with token shards; a text has --val-fraction");
    }
    return corpus_open_text(corpus, options.data, tokenizer, options.tokenizer, fraction);
}

static bool write_sample(Gpt *model, const Tokenizer *tokenizer, const char *prompt,
                         uint64_t seed) {
    Sampling sampling = {(float)options.temperature, (size_t)options.top_k, seed};
    return gpt_write_text(model, tokenizer, prompt, (size_t)options.sample_tokens, &sampling,
                          stdout, &interrupted);
}

/* A tokenizer's ids must be rows of the embedding. */
static bool check_vocabulary(size_t V, const GptConfig *config) {
    return V <= config->V ||
           error_set("the text has a vocabulary of %zu, but the model's is %zu", V, config->V);
}

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
            write_sample(t->model, t->corpus.tokenizer, "",
                         random_mix((uint64_t)options.seed, step));
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

static bool open_data_and_model(Trainer *t) {
    GptConfig config;
    Tokenizer *tokenizer = NULL;
    char path[FILE_PATH_BYTES];
    const char *base = options.resume ? t->run.last : options.init[0] ? options.init : NULL;
    if (base && !checkpoint_path(base, path, sizeof path)) return false;
    if (base) base = path;
    if (!options_model(options_train, t->device->type, base, &config)) return false;
    if (base && !corpus_is_shards(options.data) && !(tokenizer = tokenizer_load(base)))
        return false;
    if (!open_corpus(&t->corpus, tokenizer, config.V, options.val_fraction)) return false;
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

static bool prepare(Trainer *t) {
    bool good = !options.resume || (options.run[0] || error_set("--resume needs --run=DIRECTORY"));
    good = good && (!options.resume ||
                    (run_name(&t->run, options.run) && run_read_flags(&t->run, options_train)));
    good = good && (t->device = open_device(t->comm)) != NULL;
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
    struct sigaction action = {.sa_handler = on_signal};
    bool good = prepare(&t);
    if (good) {
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        signal(SIGPIPE, SIG_IGN); /* a closed output does not end a training */
        good = train_loop(&t);
        if (!good && !t.diverged && t.state.step > 0) save_after_failure(&t);
    }
    if (good && leader(&t)) {
        if (t.corpus.tokenizer && options.sample_tokens && !interrupted)
            good = write_sample(t.model, t.corpus.tokenizer, "", (uint64_t)options.seed);
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

/* --- The other commands --------------------------------------------------------------------- */

static bool command_plan(Comm *comm) {
    GptConfig config;
    GptPlan plan;
    Device *device = open_device(comm);
    GptOptions sizes;
    bool good = device && options_model(options_plan, device->type, NULL, &config);
    if (good) sizes = options_gpt(device, &config, GPT_TRAINING);
    good = good && gpt_plan(&config, &sizes, device, &plan);
    if (good) {
        size_t available, total;
        device_memory(device, &available, &total);
        printf("%s: %.1f M parameters, %zu sequences of %zu, %s\n", options.preset,
               1e-6 * (double)gpt_parameters(&config), sizes.B, sizes.T, type_name(sizes.type));
        gpt_plan_print(&plan, stdout);
        printf("  free         %12.1f MiB of %.1f on %s\n", (double)available / 1048576,
               (double)total / 1048576, device->name);
    }
    device_close(device);
    return good;
}

/* Opens --checkpoint for inference. */
static Gpt *open_checkpoint(Device *device, GptConfig *config) {
    if (!options.checkpoint[0]) {
        error_set("--checkpoint=DIRECTORY is needed");
        return NULL;
    }
    static char path[FILE_PATH_BYTES];
    if (!device || !checkpoint_path(options.checkpoint, path, sizeof path)) return NULL;
    options.checkpoint = path;
    if (!checkpoint_config(path, config)) return NULL;
    GptOptions sizes = options_gpt(device, config, GPT_INFERENCE);
    Gpt *model = gpt_create(config, &sizes, device, NULL);
    if (model && checkpoint_load(options.checkpoint, model)) return model;
    gpt_free(model);
    return NULL;
}

static bool command_sample(Comm *comm) {
    GptConfig config;
    options.batch = 1;
    Device *device = open_device(comm);
    Gpt *model = open_checkpoint(device, &config);
    Tokenizer *tokenizer = model ? tokenizer_load(options.checkpoint) : NULL;
    bool good = tokenizer && check_vocabulary(tokenizer_vocabulary(tokenizer), &config) &&
                write_sample(model, tokenizer, options.prompt, (uint64_t)options.seed);
    tokenizer_free(tokenizer);
    gpt_free(model);
    device_close(device);
    return good;
}

static bool command_eval(Comm *comm) {
    GptConfig config;
    Corpus corpus = {0};
    double loss;
    size_t predictions;
    Device *device = open_device(comm);
    Gpt *model = open_checkpoint(device, &config);
    bool shards = corpus_is_shards(options.data);
    Tokenizer *tokenizer = model && !shards ? tokenizer_load(options.checkpoint) : NULL;
    bool good = model && (shards || tokenizer) &&
                open_corpus(&corpus, tokenizer, config.V, options.eval_fraction) &&
                check_vocabulary(corpus.V, &config);
    const Dataset *dataset = corpus.validation ? corpus.validation : corpus.train;
    good = good && gpt_evaluate(model, NULL, dataset, gpt_options(model)->T,
                                (size_t)options.eval_tokens, &loss, &predictions);
    if (good)
        printf("loss %.6f | perplexity %.4f | %zu predictions\n", loss, exp(loss), predictions);
    corpus_close(&corpus);
    gpt_free(model);
    device_close(device);
    return good;
}

static const struct {
    const char *name, *help;
    Flag *flags;
    bool (*run)(Comm *comm);
} commands[] = {
    {"train", "train a model; under mpirun, one rank a GPU", options_train, command_train},
    {"sample", "continue a prompt with a checkpoint", options_sample, command_sample},
    {"eval", "loss and perplexity of a text or shards", options_eval, command_eval},
    {"plan", "print the memory that training would take", options_plan, command_plan},
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static void print_usage(FILE *file) {
    fprintf(file,
            "usage: train_gpt COMMAND [--option=value …]      train_gpt COMMAND --help lists the "
            "options\n");
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(file, "  %-8s %s\n", commands[i].name, commands[i].help);
}

int main(int argc, char **argv) {
    /* Without these three, a file of ours could be opened in the place of stdout. */
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) return 2;
    size_t c = 0;
    while (c < COMMANDS && (argc < 2 || strcmp(argv[1], commands[c].name) != 0)) c++;
    bool help =
        argc > 1 && (strcmp(argv[argc - 1], "--help") == 0 || strcmp(argv[argc - 1], "-h") == 0);
    if (c == COMMANDS || help) {
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
