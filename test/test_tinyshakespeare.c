/* data/tinyshakespeare.sh, in a copy of the tree with a network of its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/files.h"
#include "test/scratch.h"

/* Runs the script under these settings; its exit status, and its stdout in `out`. */
static int run_script(const char *settings, char *out, size_t size) {
    char command[256];
    snprintf(command, sizeof command,
             "cd tree && env -u TINYSHAKESPEARE %s "
             "PATH=\"$PWD/bin:$PATH\" sh data/tinyshakespeare.sh 2>stderr",
             settings);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    out[fread(out, 1, size - 1, pipe)] = '\0';
    return WEXITSTATUS(pclose(pipe));
}

static void test_script(void **state) {
    (void)state;
    run_shell("mkdir -p tree/data tree/bin tree/build");
    char script[FILE_PATH_BYTES], out[256];
    in_repository(script, "data/tinyshakespeare.sh");
    assert_true(file_copy(script, "tree/data/tinyshakespeare.sh"));
    put_file("tree/b.c", "b\n", 2);
    put_file("tree/README.md", "é\n", 3);
    put_file("tree/build/x.c", "x\n", 2);
    put_file("tree/own.txt", "own\n", 4);
    const char *stand_in = "tree/data/source_text.txt";

    assert_int_equal(run_script("TINYSHAKESPEARE=missing.txt", out, sizeof out), 2);
    assert_string_equal(out, "");

    /* No network, and one that serves something else: the source text, under its own name. */
    static const char *const curl[] = {
        "#!/bin/sh\nexit 6\n",
        "#!/bin/sh\nwhile [ \"$1\" != --output ]; do shift; done; echo '<html>' >\"$2\"\n"};
    for (int i = 0; i < 2; i++) {
        put_file("tree/bin/curl", curl[i], strlen(curl[i]));
        assert_int_equal(chmod("tree/bin/curl", 0755), 0);
        unlink(stand_in);
        assert_int_equal(run_script("", out, sizeof out), 0);
        assert_string_equal(out, "data/source_text.txt\n");
        size_t bytes;
        char *text = file_read(stand_in, 100, &bytes);
        assert_non_null(text);
        assert_string_equal(text, "é\nb\n");
        free(text);
        assert_false(file_exists("tree/data/tinyshakespeare.txt"));
    }

    /* A text of the user's is copied, kept, and used with a warning. */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(run_script(i == 0 ? "TINYSHAKESPEARE=own.txt" : "", out, sizeof out), 0);
        assert_string_equal(out, "data/tinyshakespeare.txt\n");
        size_t bytes;
        char *text = file_read("tree/data/tinyshakespeare.txt", 100, &bytes);
        assert_string_equal(text, "own\n");
        free(text);
        text = file_read("tree/stderr", 10000, &bytes);
        assert_non_null(strstr(text, "it is used all the same"));
        free(text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_script),
    };
    return cmocka_run_group_tests_name("tinyshakespeare.sh", tests, enter_scratch, leave_scratch);
}
