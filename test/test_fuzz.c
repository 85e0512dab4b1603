/* The fuzzer's corpus (test/fuzz.c), each input whole and cut short: every parser accepts or
 * refuses it, in bounds as far as this build checks them (all, under config=sanitize). */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/files.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char corpus[] = "test/corpus";
enum { CUTS = 8 };

/* From an array of its own, so that a read beyond the cut is one beyond the array. */
static void run_prefix(const char *data, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    assert_non_null(copy);
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void run_file(const char *name) {
    char path[FILE_PATH_BYTES];
    size_t size;
    assert_true(file_join(path, corpus, name));
    char *data = file_read(path, (size_t)1 << 20, &size);
    if (!data) fail_msg("%s", error_message());
    if (LLVMFuzzerTestOneInput((const uint8_t *)data, size) != 0)
        fail_msg("%s begins with the letter of no target", path);
    for (size_t i = 1; i < CUTS; i++) run_prefix(data, size * i / CUTS);
    if (size > 1) run_prefix(data, size - 1);
    free(data);
}

static void test_corpus_is_parsed_or_refused(void **state) {
    (void)state;
    DIR *directory = opendir(corpus);
    assert_non_null(directory);
    size_t count = 0;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        if (entry->d_name[0] != '.') run_file(entry->d_name), count++;
    closedir(directory);
    print_message("%zu inputs\n", count);
    assert_true(count >= 40);
}

static void test_other_inputs_are_none(void **state) {
    (void)state;
    assert_int_equal(LLVMFuzzerTestOneInput((const uint8_t *)"?", 1), -1);
    assert_int_equal(LLVMFuzzerTestOneInput((const uint8_t *)"", 0), -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_corpus_is_parsed_or_refused),
        cmocka_unit_test(test_other_inputs_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
