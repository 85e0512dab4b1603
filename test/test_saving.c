/* Saving over the last checkpoint: it is there whole, or the new one is, wherever the save is
 * killed, runs out of disk or is refused; and what others put beside it stays. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/random.h"
#include "runtime/replace.h"
#include "test/said.h"
#include "test/saved_model.h"

static void assert_file(const char *path, const char *expected) {
    char *text = file_read(path, 100, NULL);
    assert_string_equal(text, expected);
    free(text);
}

/* What the directory holds besides a checkpoint's files outlives the saves. */
static void others_files_stay(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    char note[FILE_PATH_BYTES], folder[FILE_PATH_BYTES], old[FILE_PATH_BYTES];
    snprintf(old, sizeof old, "%s.old", directory);
    save(model, &example);
    write_text("note.txt", "mine");
    join(note, "note.txt");
    join(folder, "folder");
    mkdir(folder, 0777);
    for (int i = 0; i < 2; i++) {
        save(model, &example);
        assert_file(note, "mine");
        assert_exists(folder, true);
        assert_exists(old, false);
    }
    gpt_free(model);
}

/* The instants of the two renames, which a kill seldom hits. */
static void interrupted_renames(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    char old[FILE_PATH_BYTES], staging[FILE_PATH_BYTES], path[FILE_PATH_BYTES], slash[96];
    snprintf(old, sizeof old, "%s.old", directory);
    snprintf(staging, sizeof staging, "%s.tmp", directory);
    snprintf(slash, sizeof slash, "%s/", directory);
    TrainerState resumed;

    /* Between them: the old one is away, the new one not in its place. */
    save(model, &example);
    write_text(".tilegpt", "");
    assert_int_equal(rename(directory, old), 0);
    mkdir(staging, 0777);
    assert_true(checkpoint_path(slash, path, sizeof path));
    assert_string_equal(path, old);
    assert_true(checkpoint_load(directory, loaded) &&
                checkpoint_resume(directory, loaded, &resumed));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    fill(model, GPT_PARAMETERS, 5);
    assert_true(checkpoint_save(slash, model, &example, NULL, NULL));
    assert_exists(old, false);
    assert_exists(staging, false);
    assert_true(checkpoint_load(directory, loaded));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));

    /* After them: the old one is half removed. */
    mkdir(old, 0777);
    assert_true(file_join(path, old, "model.safetensors"));
    assert_true(file_write(path, "x", 1));
    assert_true(file_join(path, old, ".tilegpt"));
    assert_true(file_write(path, "", 0));
    assert_true(checkpoint_load(directory, loaded));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    save(model, &example);
    assert_exists(old, false);
    gpt_free(loaded);
    gpt_free(model);
}

/* Directories of the user's that have the names of a replacement's. */
static void others_directories_stay(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    char path[FILE_PATH_BYTES], thesis[FILE_PATH_BYTES];
    save(model, &example);
    join(path, ".tilegpt");
    assert_exists(path, false);
    fill(model, GPT_PARAMETERS, 7);
    static const char *const names[] = {".tmp", ".old"};
    for (int i = 0; i < 4; i++) {
        bool linked = i >= 2;
        snprintf(path, sizeof path, "%s%s", directory, names[i % 2]);
        snprintf(thesis, sizeof thesis, "%s/kept", scratch);
        const char *place = linked ? thesis : path;
        char file[FILE_PATH_BYTES];
        assert_int_equal(mkdir(place, 0777), 0);
        assert_true(file_join(file, place, "model.safetensors") && file_write(file, "x", 1));
        if (linked) assert_int_equal(symlink(place, path), 0);
        assert_false(checkpoint_save(directory, model, &example, NULL, NULL));
        assert_said("was not made by this program");
        assert_exists(file, true);
        if (linked) unlink(path);
        unlink(file);
        rmdir(place);
    }
    save(model, &example);
    gpt_free(model);
}

/* A second writer of a directory is refused, and the first goes on. */
static void one_writer_at_a_time(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    DirectoryReplacement first;
    char path[FILE_PATH_BYTES];
    assert_true(directory_replace_begin(&first, directory));
    assert_true(file_join(path, first.staging, "note") && file_write(path, "x", 1));
    assert_false(checkpoint_save(directory, model, &example, NULL, NULL));
    assert_said("another process writes");
    assert_exists(path, true);
    assert_true(directory_replace_commit(&first, NULL));
    join(path, "note");
    assert_exists(path, true);
    save(model, &example);
    assert_exists(path, true);
    gpt_free(model);
}

/* A file is the old or the new one, too; what a kill leaves beside it goes with the next one. */
static void replaced_files(void **state) {
    (void)state;
    char path[96], left[112];
    snprintf(path, sizeof path, "%s/file", scratch);
    snprintf(left, sizeof left, "%s.tilegpt", path);
    assert_true(file_write(path, "old", 3));
    FileReplacement first, second;
    pid_t child = fork();
    if (child == 0) {
        if (file_replace_begin(&first, path)) fputs("longer than what comes next", first.file);
        fflush(first.file);
        raise(SIGKILL);
    }
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_exists(left, true);
    for (int i = 0; i < 2; i++) {
        assert_true(file_replace_begin(&first, path));
        assert_false(file_replace_begin(&second, path));
        assert_said("another process writes");
        fputs(i ? "third" : "new", first.file);
        assert_file(path, i ? "new" : "old");
        assert_true(file_replace_commit(&first));
        assert_file(path, i ? "third" : "new");
        assert_exists(left, false);
    }
    assert_int_equal(symlink(path, left), 0);
    assert_false(file_replace_begin(&first, path));
    assert_file(path, "third");
    unlink(left);
    unlink(path);
}

static void refused_places(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    char path[FILE_PATH_BYTES];
    assert_true(file_write(directory, "x", 1));
    assert_false(checkpoint_save(directory, model, NULL, NULL, NULL));
    assert_said("is a file");
    snprintf(path, sizeof path, "%s/no/where", scratch);
    assert_false(checkpoint_save(path, model, NULL, NULL, NULL));
    assert_said("No such file");
    snprintf(path, sizeof path, "%s/link", scratch);
    assert_int_equal(symlink(".", path), 0);
    assert_false(checkpoint_save(path, model, NULL, NULL, NULL));
    assert_said("symbolic link");
    unlink(directory);
    assert_false(checkpoint_save(".", model, NULL, NULL, NULL));
    assert_said("no name of its own");
    assert_false(checkpoint_save("/", model, NULL, NULL, NULL));
    assert_said("no name of its own");
    const char *const missing[] = {"/nonexistent/tokenizer", NULL}, *const clash[] = {
                                                                        "x/config.json", NULL};
    assert_false(checkpoint_save(directory, model, NULL, NULL, missing));
    assert_said("No such file");
    assert_false(checkpoint_save(directory, model, NULL, NULL, clash));
    assert_said("its own config.json");
    assert_exists(directory, false);
    gpt_free(model);
}

/* A limit on the size of files stands for a full disk; at every limit the old checkpoint stays. */
static void full_disk(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    char staging[FILE_PATH_BYTES];
    snprintf(staging, sizeof staging, "%s.tmp", directory);
    save(model, &example);
    fill(model, GPT_PARAMETERS, 4);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    static const size_t limits[] = {0, 100, 1000, 3000, 10000, 20000, 30000};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        limit = before;
        limit.rlim_cur = limits[i];
        setrlimit(RLIMIT_FSIZE, &limit);
        bool saved = checkpoint_save(directory, model, &example, NULL, NULL);
        setrlimit(RLIMIT_FSIZE, &before);
        assert_false(saved);
        assert_said("File too large");
        assert_exists(staging, false);
        TrainerState resumed;
        assert_true(checkpoint_load(directory, loaded) &&
                    checkpoint_resume(directory, loaded, &resumed));
    }
    signal(SIGXFSZ, SIG_DFL);
    fill(model, GPT_PARAMETERS, 1);
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    gpt_free(loaded);
    gpt_free(model);
}

static void fill_version(Gpt *model, uint64_t version) {
    static const GptArena arenas[] = {GPT_PARAMETERS, GPT_ADAM_M, GPT_ADAM_V};
    for (int i = 0; i < 3; i++) fill(model, arenas[i], random_mix(version, (uint64_t)i));
}

/* Saves version after version until it is killed. */
static void save_forever(Gpt *model, uint64_t version) {
    for (;; version++) {
        fill_version(model, version);
        TrainerState state = {.step = version};
        if (!checkpoint_save(directory, model, &state, NULL, NULL)) _exit(1);
    }
}

static void killed_while_saving(void **state) {
    (void)state;
    enum { KILLS = 60 };
    Gpt *model = create(&config, GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    char staging[FILE_PATH_BYTES];
    snprintf(staging, sizeof staging, "%s.tmp", directory);
    uint64_t version = 1;
    fill_version(model, version);
    save(model, &(TrainerState){.step = version});

    /* The time of one save, so that the kills spread over its whole course. */
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    save(model, &(TrainerState){.step = version});
    clock_gettime(CLOCK_MONOTONIC, &end);
    uint64_t save_ns =
        (uint64_t)((end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec);
    if (save_ns > 100000000) save_ns = 100000000;

    int interrupted = 0;
    for (int kill_number = 0; kill_number < KILLS; kill_number++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) save_forever(model, version + 1);
        uint64_t wait = random_mix(17, (uint64_t)kill_number) % (2 * save_ns);
        nanosleep(&(struct timespec){.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000},
                  NULL);
        kill(child, SIGKILL);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status)); /* and not a save that failed */
        interrupted += file_exists(staging);

        TrainerState resumed;
        if (!checkpoint_load(directory, loaded) || !checkpoint_resume(directory, loaded, &resumed))
            fail_msg("after kill %d: %s", kill_number, error_message());
        assert_true(resumed.step >= version);
        version = resumed.step;
        fill_version(model, version);
        assert_true(same_arena(model, loaded, GPT_PARAMETERS));
        assert_true(same_arena(model, loaded, GPT_ADAM_M));
        assert_true(same_arena(model, loaded, GPT_ADAM_V));
    }
    print_message("%d kills, %d of them in the middle of a save; %llu versions\n", KILLS,
                  interrupted, (unsigned long long)version);
    assert_true(interrupted > KILLS / 4);
    gpt_free(loaded);
    gpt_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(others_files_stay, clean),
        cmocka_unit_test_teardown(interrupted_renames, clean),
        cmocka_unit_test_teardown(others_directories_stay, clean),
        cmocka_unit_test_teardown(one_writer_at_a_time, clean),
        cmocka_unit_test(replaced_files),
        cmocka_unit_test_teardown(refused_places, clean),
        cmocka_unit_test_teardown(full_disk, clean),
        cmocka_unit_test_teardown(killed_while_saving, clean),
    };
    return cmocka_run_group_tests_name("saving", tests, open_group, close_group);
}
