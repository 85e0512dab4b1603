#include "test/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/tokenizer_train.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "test/scratch.h"

uint32_t noise(uint32_t i) { return philox(/*key=*/11, i, 0, 0, 0).word[0]; }

char *make_text(size_t bytes) {
    static const char letters[] = "aaaabbbccdeetto   \n1.\xC3\xA9";
    char *text = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) {
        size_t at = noise((uint32_t)i) % (sizeof letters - 1);
        if (at < sizeof letters - 3) {
            text[i] = letters[at];
        } else if (i + 1 < bytes) {
            memcpy(text + i++, "\xC3\xA9", 2);
        } else {
            text[i] = '.';
        }
    }
    text[bytes] = '\0';
    return text;
}

bool find_tinyshakespeare(char path[FILE_PATH_BYTES]) {
    const char *given = getenv("TINYSHAKESPEARE");
    in_repository(path, given != NULL ? given : "data/tinyshakespeare.txt");
    if (file_exists(path)) return true;
    print_message("not compared: there is no %s (TINYSHAKESPEARE names it)\n", path);
    return false;
}

Paths one_path(const char *name) {
    Paths paths = {0};
    assert_true(paths_add(&paths, name, NULL));
    return paths;
}

Tokenizer *learn(const char *name, size_t V) {
    Paths paths = one_path(name);
    TokenizerTraining training;
    Tokenizer *tokenizer = tokenizer_train(&paths, TEXT_AUTO, V, &training);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    paths_free(&paths);
    return tokenizer;
}

void assert_decodes(const Tokenizer *tokenizer, const int32_t *ids, size_t count, const char *text,
                    size_t bytes) {
    size_t at = 0, length;
    for (size_t i = 0; i < count; i++, at += length) {
        assert_in_range(ids[i], 0, tokenizer_vocabulary(tokenizer) - 1);
        const char *token = tokenizer_decode(tokenizer, ids[i], &length);
        assert_true(length > 0 && length <= bytes - at);
        assert_memory_equal(token, text + at, length);
    }
    assert_int_equal(at, bytes);
}

void assert_round_trip(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    size_t count;
    int32_t *ids = tokenizer_encode(tokenizer, text, bytes, &count);
    if (ids == NULL) fail_msg("%s", error_message());
    assert_decodes(tokenizer, ids, count, text, bytes);
    free(ids);
}
