/* From texts to tokens on disk: sources of text, counting words, learning BPE, shards, the whole
 * tokenization with interruptions, and a corpus from its results. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/bpe_train.h"
#include "data/corpus.h"
#include "data/dataset.h"
#include "data/shard_writer.h"
#include "data/text_source.h"
#include "data/tokenize.h"
#include "data/tokenizer_train.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/flags.h"
#include "runtime/random.h"
#include "runtime/sha256.h"

static char started_in[FILE_PATH_BYTES], scratch[] = "/tmp/tilegpt_tokenize_XXXXXX";

static int enter_scratch(void **state) {
    (void)state;
    return getcwd(started_in, sizeof started_in) == NULL || mkdtemp(scratch) == NULL ||
           chdir(scratch) != 0 || setenv("XDG_CACHE_HOME", "cache", 1) != 0;
}

static int leave_scratch(void **state) {
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", scratch);
    return chdir(started_in) != 0 || system(command) != 0;
}

static void run_shell(const char *command) {
    if (system(command) != 0) fail_msg("failed: %s", command);
}

static void put(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void put_gzip(const char *path, const void *data, size_t bytes) {
    gzFile file = gzopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(gzwrite(file, data, (unsigned)bytes), bytes);
    assert_int_equal(gzclose(file), Z_OK);
}

static void assert_said(const char *part) {
    if (strstr(error_message(), part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error_message(), part);
}

static uint32_t noise(uint32_t i) { return philox(/*key=*/11, i, 0, 0, 0).word[0]; }

/* Words of few letters, so that pairs repeat, with spaces, line feeds and some é. */
static char *make_text(size_t bytes) {
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

/* ---- SHA-256 ---- */

static void test_sha256(void **state) {
    (void)state;
    static const struct {
        size_t count; /* of letters 'a' */
        const char *hex;
    } known[] = {
        /* by sha256sum; both sides of the block and of the padding's place for the length */
        {0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
        {56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
        {64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
        {1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
    char *text = malloc(1000000), hex[SHA256_HEX_BYTES];
    memset(text, 'a', 1000000);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        Sha256 hash;
        sha256_begin(&hash);
        sha256_add(&hash, text, known[i].count / 3); /* also in two parts of unlike sizes */
        sha256_add(&hash, text, known[i].count - known[i].count / 3);
        sha256_end(&hash, hex);
        assert_string_equal(hex, known[i].hex);
    }
    uint64_t bytes;
    put("a.txt", text, 1000000);
    assert_true(sha256_file("a.txt", hex, &bytes));
    assert_int_equal(bytes, 1000000);
    assert_string_equal(hex, known[4].hex);
    assert_false(sha256_file("no.txt", hex, &bytes));
    assert_said("no.txt");
    free(text);
}

/* ---- lists on the command line ---- */

static void test_list_of_words(void **state) {
    (void)state;
    FlagList list = {0};
    const char *text = "";
    Flag flags[] = {{"input", FLAG_LIST, &list, 0, 0, NULL, "files", false},
                    {"output", FLAG_STRING, &text, 0, 0, NULL, "directory", false},
                    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};
    char *words[] = {"--input=a", "b", "-", "--output=o", "--input", "c"};
    assert_true(flags_parse(flags, 6, words));
    assert_int_equal(list.count, 4);
    static const char *const expected[] = {"a", "b", "-", "c"};
    for (int i = 0; i < 4; i++) assert_string_equal(list.word[i], expected[i]);
    char shown[16];
    flags_format(&flags[0], shown, sizeof shown);
    assert_string_equal(shown, "a b - c");
    assert_false(flags_parse(flags, 1, (char *[]){"--input="}));
    assert_false(flags_parse(flags, 2, (char *[]){"--input", "--output=x"}));
    assert_said("--input needs a value");
    assert_false(flags_parse(flags, 2, (char *[]){"--output=x", "stray"}));
    free(list.word);
}

/* ---- sources of text ---- */

/* Reads a whole source. The pieces of a plain one must be those of `text`, and end in between only
 * where the tokenizer may be cut. */
static void assert_reads(const char *path, const Tokenizer *tokenizer, const char *text,
                         size_t bytes) {
    TextSource *source = text_open(path, TEXT_AUTO, tokenizer);
    assert_non_null(source);
    TextPiece piece;
    size_t at = 0;
    int got;
    bool ended = false;
    while ((got = text_next(source, &piece)) > 0) {
        assert_false(ended);
        assert_true(piece.bytes > 0 && piece.bytes <= bytes - at);
        assert_memory_equal(piece.text, text + at, piece.bytes);
        at += piece.bytes;
        assert_int_equal(text_place(source).bytes, at);
        ended = piece.ends;
        if (!ended) assert_true(tokenizer_cut(tokenizer, text, at + 1) == at);
    }
    assert_int_equal(got, 0);
    assert_int_equal(at, bytes);
    assert_true(ended || bytes == 0);
    text_close(source);
}

static void test_plain_source(void **state) {
    (void)state;
    static const size_t sizes[] = {0, 1, 10, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3500000};
    Tokenizer *bpe = tokenizer_bpe(NULL, 0, NULL, 0);
    char *text = make_text(3500000);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        put("plain.txt", text, sizes[i]);
        put_gzip("plain.gz", text, sizes[i]);
        assert_reads("plain.txt", bpe, text, sizes[i]);
        assert_reads("plain.gz", bpe, text, sizes[i]);
    }
    /* What goes on at a place gives the rest; a place to cut before is kept to. */
    for (int zipped = 0; zipped < 2; zipped++) {
        const char *path = zipped ? "plain.gz" : "plain.txt";
        TextPiece piece;
        TextSource *source = text_open(path, TEXT_AUTO, bpe);
        text_cut_before(source, 1500000);
        for (size_t end = 0; end + 100 < 1500000;) {
            assert_int_equal(text_next(source, &piece), 1);
            end = (size_t)text_place(source).bytes;
            assert_true(end <= 1500000);
        }
        TextPlace place = text_place(source);
        text_close(source);
        source = text_open(path, TEXT_AUTO, bpe);
        assert_true(text_seek(source, place));
        assert_int_equal(text_next(source, &piece), 1);
        assert_memory_equal(piece.text, text + place.bytes, piece.bytes);
        text_close(source);
    }
    /* Without a place to cut for too long it is no text to BPE; bytes do not mind. */
    memset(text, 'x', 3500000);
    FILE *file = fopen("long.txt", "wb");
    for (int i = 0; i < 20; i++) fwrite(text, 1, 3500000, file);
    fclose(file);
    Tokenizer *any = tokenizer_bytes();
    TextPiece piece;
    TextSource *source = text_open("long.txt", TEXT_AUTO, bpe);
    assert_int_equal(text_next(source, &piece), -1);
    assert_said("long.txt: no word ends in the 64 MiB from byte 0 on");
    text_close(source);
    source = text_open("long.txt", TEXT_AUTO, any);
    assert_int_equal(text_next(source, &piece), 1);
    text_close(source);
    unlink("long.txt");
    free(text);
    tokenizer_free(any);
    tokenizer_free(bpe);
}

static void assert_source_fails(const char *path, const char *said) {
    Tokenizer *tokenizer = tokenizer_bytes();
    TextSource *source = text_open(path, TEXT_AUTO, tokenizer);
    TextPiece piece;
    int got = source == NULL ? -1 : 1;
    while (got > 0) got = text_next(source, &piece);
    assert_int_equal(got, -1);
    assert_said(path);
    assert_said(said);
    text_close(source);
    tokenizer_free(tokenizer);
}

static void test_damaged_sources(void **state) {
    (void)state;
    char *text = make_text(200000);
    put_gzip("whole.gz", text, 200000);
    struct stat status;
    assert_int_equal(stat("whole.gz", &status), 0);
    char *zipped = malloc((size_t)status.st_size);
    FILE *file = fopen("whole.gz", "rb");
    assert_int_equal(fread(zipped, 1, (size_t)status.st_size, file), status.st_size);
    fclose(file);
    static const int left[] = {1, 8, 9, 1000, 50000}; /* bytes that are cut off */
    for (int i = 0; i < 5; i++) {
        put("cut.gz", zipped, (size_t)status.st_size - (size_t)left[i]);
        assert_source_fails("cut.gz", "cut short");
    }
    put("cut.gz", zipped, 4); /* in its header */
    assert_source_fails("cut.gz", "cut short");
    zipped[status.st_size / 2] ^= 0x55;
    put("bad.gz", zipped, (size_t)status.st_size);
    assert_source_fails("bad.gz", "damaged");
    assert_source_fails("none.txt", "No such file");
    assert_int_equal(mkdir("folder", 0777), 0);
    assert_source_fails("folder", "is a directory");
    free(zipped);
    free(text);
}

static void test_json_lines(void **state) {
    (void)state;
    static const char good[] =
        "{\"text\": \"one\"}\r\n\n  \n{\"id\": 2, \"text\": \"a\\n\\\"b\\u00e9\\\\u0000\"}\n"
        "{\"text\": \"\"}\n{\"text\": \"no line feed\"}";
    static const char *const expected[] = {"one", "a\n\"b\xC3\xA9\\u0000", "", "no line feed"};
    static const uint64_t line[] = {1, 4, 5, 6};
    put("good.jsonl", good, strlen(good));
    put_gzip("good.ndjson.gz", good, strlen(good));
    Tokenizer *tokenizer = tokenizer_bytes();
    for (int zipped = 0; zipped < 2; zipped++) {
        TextSource *source =
            text_open(zipped ? "good.ndjson.gz" : "good.jsonl", TEXT_AUTO, tokenizer);
        TextPiece piece;
        for (int i = 0; i < 4; i++) {
            assert_int_equal(text_next(source, &piece), 1);
            assert_true(piece.ends);
            assert_int_equal(piece.bytes, strlen(expected[i]));
            assert_memory_equal(piece.text, expected[i], piece.bytes);
            assert_int_equal(text_place(source).lines, line[i]);
        }
        assert_int_equal(text_next(source, &piece), 0);
        text_close(source);
    }
    tokenizer_free(tokenizer);
    static const struct {
        const char *line, *said;
    } bad[] = {{"{\"text\": \"x", "line 2 is not JSON"},
               {"{\"text\": \"x\"} y", "line 2 is not JSON: it goes wrong at byte 13 of 15"},
               {"{\"tex\": \"x\"}", "line 2 has no \"text\""},
               {"{\"text\": 5}", "line 2 has a \"text\" that is no string"},
               {"[\"text\"]", "line 2 is not an object"},
               {"\xFF\xFE", "line 2 is not JSON"},
               {"{\"text\": \"x\\u0000y\"}", "line 2 has a zero character"},
               {"{\"text\": \"x\\\\\\u0000y\"}", "line 2 has a zero character"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[128];
        int n = snprintf(text, sizeof text, "{\"text\": \"fine\"}\n%s\n{}\n", bad[i].line);
        put("bad.jsonl", text, (size_t)n);
        assert_source_fails("bad.jsonl", bad[i].said);
    }
    put("bad.jsonl", "{\"text\": \"x\0y\"}\n", 16);
    assert_source_fails("bad.jsonl", "line 1 has a zero character");
}

/* ---- counting words, and learning merges from them ---- */

static uint64_t count_of(const WordCounts *counts, const char *word) {
    for (uint32_t i = 0; i < counts->words.count; i++) {
        size_t bytes;
        const char *text = string_table_get(&counts->words, i, &bytes);
        if (bytes == strlen(word) && memcmp(text, word, bytes) == 0) return counts->count[i];
    }
    return 0;
}

static void test_word_counts(void **state) {
    (void)state;
    WordCounts counts;
    word_counts_begin(&counts, 1000, 1 << 20);
    assert_true(word_counts_add(&counts, "a a b a", 7));
    assert_int_equal(count_of(&counts, " a"), 2);
    assert_int_equal(count_of(&counts, "a"), 1);
    assert_int_equal(counts.total, 4);
    word_counts_free(&counts);

    /* One word in four is " often", the others never come again. */
    enum { ROUNDS = 20000 };
    word_counts_begin(&counts, 500, 1 << 20);
    for (int i = 0; i < ROUNDS; i++) {
        char text[64];
        int n = snprintf(text, sizeof text, " often x%dy", i);
        assert_true(word_counts_add(&counts, text, (size_t)n));
        assert_true(counts.words.count <= 500);
    }
    uint64_t often = count_of(&counts, " often");
    assert_true(often <= ROUNDS && often + counts.threshold >= ROUNDS);
    assert_true(counts.threshold > 0 && counts.threshold < ROUNDS / 10);
    uint64_t kept = 0;
    for (uint32_t i = 0; i < counts.words.count; i++) kept += counts.count[i];
    assert_int_equal(kept + counts.dropped, counts.total);
    word_counts_free(&counts);

    word_counts_begin(&counts, 1000000, 1000); /* the letters count too */
    for (int i = 0; i < 1000; i++) {
        char text[64];
        int n = snprintf(text, sizeof text, " word%cx", 'a' + i % 26);
        assert_true(word_counts_add(&counts, text, (size_t)n));
        n = snprintf(text, sizeof text, " %d", 100000 + i);
        assert_true(word_counts_add(&counts, text, (size_t)n));
        assert_true(counts.words.text_bytes <= 1000);
    }
    word_counts_free(&counts);
}

/* The plainest way to learn: count all pairs anew for each merge. */
enum { MOST_WORDS = 4096, LONGEST = 64 };

typedef struct {
    int32_t token[LONGEST];
    size_t length;
    int64_t count;
} PlainWord;

static bool best_pair(const PlainWord *word, size_t words, int32_t best[2]) {
    int64_t most = 1; /* a pair must occur twice */
    for (size_t w = 0; w < words; w++)
        for (size_t i = 1; i < word[w].length; i++) {
            int32_t left = word[w].token[i - 1], right = word[w].token[i];
            int64_t count = 0;
            for (size_t v = 0; v < words; v++)
                for (size_t j = 1; j < word[v].length; j++)
                    if (word[v].token[j - 1] == left && word[v].token[j] == right)
                        count += word[v].count;
            bool first = left < best[0] || (left == best[0] && right < best[1]);
            if (count > most || (count == most && most > 1 && first)) {
                most = count;
                best[0] = left;
                best[1] = right;
            }
        }
    return most > 1;
}

static void merge_plainly(PlainWord *word, const int32_t pair[2], int32_t token) {
    size_t n = 0;
    for (size_t i = 0; i < word->length; n++) {
        bool here =
            i + 1 < word->length && word->token[i] == pair[0] && word->token[i + 1] == pair[1];
        word->token[n] = here ? token : word->token[i];
        i += here ? 2 : 1;
    }
    word->length = n;
}

static void assert_learns_plainly(const char *text, size_t bytes, size_t V) {
    WordCounts counts;
    BpeVocabulary learnt;
    word_counts_begin(&counts, 1 << 20, 1 << 20);
    assert_true(word_counts_add(&counts, text, bytes));
    assert_true(bpe_train(&counts, V, 2, &learnt));
    static PlainWord word[MOST_WORDS];
    size_t words = counts.words.count, merges = 0;
    assert_true(words <= MOST_WORDS);
    int32_t id[256];
    for (uint32_t k = 0; k < 256; k++) {
        size_t n;
        id[(unsigned char)*string_table_get(&learnt.tokens, k, &n)] = (int32_t)k;
        assert_int_equal(n, 1);
    }
    for (uint32_t w = 0; w < words; w++) {
        const char *letters = string_table_get(&counts.words, w, &word[w].length);
        assert_true(word[w].length <= LONGEST);
        word[w].count = (int64_t)counts.count[w];
        for (size_t i = 0; i < word[w].length; i++)
            word[w].token[i] = id[(unsigned char)letters[i]];
    }
    for (int32_t pair[2]; 256 + merges < V && best_pair(word, words, pair); merges++) {
        if (256 + merges >= learnt.tokens.count)
            fail_msg("%zu merges were learnt, and there is one more", merges);
        assert_int_equal(learnt.merge[merges][0], pair[0]);
        assert_int_equal(learnt.merge[merges][1], pair[1]);
        for (size_t w = 0; w < words; w++) merge_plainly(&word[w], pair, (int32_t)(256 + merges));
    }
    assert_int_equal(learnt.tokens.count, 256 + merges);
    bpe_vocabulary_free(&learnt);
    word_counts_free(&counts);
}

static void test_learns_as_counting_anew(void **state) {
    (void)state;
    static const char runs[] = "aaaa aaa aaaaaaa baaa aab aaaa aaab abaa aaaaa";
    assert_learns_plainly(runs, strlen(runs), 300);
    assert_learns_plainly("aa", 2, 300);
    char *text = make_text(6000);
    assert_learns_plainly(text, 6000, 256);
    assert_learns_plainly(text, 6000, 257);
    assert_learns_plainly(text, 6000, 330);
    free(text);
}

static Paths one_path(const char *name) {
    Paths paths = {0};
    assert_true(paths_add(&paths, name, NULL));
    return paths;
}

static Tokenizer *learn(const char *name, size_t V) {
    Paths paths = one_path(name);
    TokenizerTraining training;
    Tokenizer *tokenizer = tokenizer_train(&paths, TEXT_AUTO, V, &training);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    paths_free(&paths);
    return tokenizer;
}

static void test_learnt_tokenizer(void **state) {
    (void)state;
    char *text = make_text(100000);
    put("learn.txt", text, 100000);
    Tokenizer *tokenizer = learn("learn.txt", 400);
    assert_int_equal(tokenizer_vocabulary(tokenizer), 400);
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), 399);
    size_t bytes, count, at = 0;
    assert_memory_equal(tokenizer_decode(tokenizer, 0, &bytes), "!", 1);
    assert_memory_equal(tokenizer_decode(tokenizer, 220, &bytes), " ", 1);
    int32_t *ids = tokenizer_encode(tokenizer, text, 100000, &count);
    assert_true(count < 60000);
    for (size_t i = 0; i < count; i++, at += bytes) {
        const char *token = tokenizer_decode(tokenizer, ids[i], &bytes);
        assert_memory_equal(token, text + at, bytes);
    }
    assert_int_equal(at, 100000);
    free(ids);
    tokenizer_free(tokenizer);
    free(text);
    /* Nothing is left to merge: a smaller vocabulary, and its last token still ends texts. */
    put("tiny.txt", "hello worl", 10);
    tokenizer = learn("tiny.txt", 400);
    assert_int_equal(tokenizer_vocabulary(tokenizer), 257);
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), 256);
    tokenizer_free(tokenizer);
    put("empty.txt", "", 0);
    Paths paths = one_path("empty.txt");
    TokenizerTraining training;
    assert_null(tokenizer_train(&paths, TEXT_AUTO, 400, &training));
    assert_said("empty.txt");
    paths_free(&paths);
}

/* What the tokenizers library (0.23.3) learns from TinyShakespeare and encodes it to: BpeTrainer
 * with vocab_size=1023, min_frequency=2 and ByteLevel's alphabet; the ids as uint16. */
static void test_learns_as_hugging_face(void **state) {
    (void)state;
    const char *name = getenv("TINYSHAKESPEARE");
    char path[FILE_PATH_BYTES];
    if (name == NULL) name = "data/tinyshakespeare.txt";
    if (name[0] == '/')
        snprintf(path, sizeof path, "%s", name);
    else
        assert_true(file_join(path, started_in, name));
    if (!file_exists(path)) {
        printf("there is no %s (TINYSHAKESPEARE names it)\n", path);
        skip();
    }
    Tokenizer *tokenizer = learn(path, 1024);
    size_t bytes, count;
    char *text = file_read(path, 1 << 24, &bytes), hex[SHA256_HEX_BYTES];
    int32_t *ids = tokenizer_encode(tokenizer, text, bytes, &count);
    assert_int_equal(count, 459913);
    unsigned char *packed = malloc(2 * count);
    shard_pack(SHARD_NARROW, ids, count, packed);
    Sha256 hash;
    sha256_begin(&hash);
    sha256_add(&hash, packed, 2 * count);
    sha256_end(&hash, hex);
    assert_string_equal(hex, "f7695e0061623b873020a907e092639c27f1b67273fc545e38c993e49f5f22e5");
    free(packed);
    free(ids);
    free(text);
    tokenizer_free(tokenizer);
}

/* ---- shards ---- */

static void assert_tokens(const char *pattern, size_t V, const int32_t *tokens, size_t count) {
    Dataset *dataset = dataset_from_shards(pattern, V, /*scan=*/true);
    if (dataset == NULL) fail_msg("%s", error_message());
    assert_int_equal(dataset_tokens(dataset), count);
    int32_t *read = malloc(count * sizeof *read);
    assert_true(dataset_read(dataset, 0, count, read));
    assert_memory_equal(read, tokens, count * sizeof *read);
    free(read);
    dataset_close(dataset);
}

static void test_shard_writer(void **state) {
    (void)state;
    enum { COUNT = 70000 };
    static int32_t tokens[COUNT];
    static const struct {
        ShardWidth width;
        size_t V, shard_tokens;
    } cases[] = {
        {SHARD_NARROW, 65536, 100}, {SHARD_NARROW, 65536, COUNT}, {SHARD_WIDE, 200000, 17777}};
    for (int c = 0; c < 3; c++) {
        for (uint32_t i = 0; i < COUNT; i++) tokens[i] = (int32_t)(noise(i) % cases[c].V);
        assert_int_equal(mkdir("writer", 0777), 0);
        ShardWriter writer;
        assert_true(
            shard_writer_open(&writer, "writer", "x", cases[c].width, cases[c].shard_tokens, 0));
        for (size_t at = 0, n; at < COUNT; at += n) {
            n = noise((uint32_t)at) % 5000;
            if (n > COUNT - at) n = COUNT - at;
            assert_true(shard_writer_add(&writer, tokens + at, n));
            /* Stops in the middle, having written more than it will be told to go on from. */
            if (at > COUNT / 2 && writer.fd >= 0 && at - n < COUNT / 2) {
                uint64_t kept = writer.tokens - writer.tokens % 7;
                assert_true(shard_writer_sync(&writer));
                shard_writer_abandon(&writer);
                assert_true(shard_writer_open(&writer, "writer", "x", cases[c].width,
                                              cases[c].shard_tokens, kept));
                assert_true(shard_writer_add(&writer, tokens + kept, at + n - kept));
            }
        }
        assert_true(shard_writer_finish(&writer));
        assert_int_equal(shard_writer_shards(&writer),
                         (COUNT + cases[c].shard_tokens - 1) / cases[c].shard_tokens);
        run_shell("test -z \"$(ls writer | grep part)\"");
        assert_tokens("writer", cases[c].V, tokens, COUNT);
        run_shell("rm -r writer");
    }
    assert_int_equal(shard_width(65536), SHARD_NARROW);
    assert_int_equal(shard_width(65537), SHARD_WIDE);
}

static void put_words(const char *path, const uint32_t *words, size_t count, size_t bytes) {
    char data[2048] = {0};
    memcpy(data, words, count * sizeof *words);
    put(path, data, bytes);
}

static void test_wide_and_bare_files(void **state) {
    (void)state;
    /* Llama 3's: a wrong version, a wrong size, a token that is none. */
    put_words("wide.bin", (uint32_t[]){20240801, 7, 2}, 3, 1032);
    assert_tokens("wide.bin", 10, (int32_t[]){0, 0}, 2);
    put_words("wide.bin", (uint32_t[]){20240801, 1, 2}, 3, 1032);
    assert_null(dataset_from_shards("wide.bin", 10, true));
    assert_said("version 1, expected 7");
    put_words("wide.bin", (uint32_t[]){20240801, 7, 2}, 3, 1028);
    assert_null(dataset_from_shards("wide.bin", 10, true));
    assert_said("1028 bytes, expected 1032 for the 2 tokens");
    uint32_t words[258] = {20240801, 7, 2, [257] = 0xFFFFFFFF};
    put_words("wide.bin", words, 258, 1032);
    assert_null(dataset_from_shards("wide.bin", 100000, true));
    assert_said("token 4294967295 at position 1 (byte 1028)");

    /* nanoGPT's. */
    put("bare.bin", "\1\0\2\1\0\0", 6);
    Dataset *dataset = dataset_from_nanogpt("bare.bin", 259);
    assert_int_equal(dataset_tokens(dataset), 3);
    int32_t read[6];
    assert_true(dataset_read(dataset, 0, 3, read));
    assert_memory_equal(read, ((int32_t[]){1, 258, 0}), 12);
    /* A part of it is a ring of its own. */
    dataset_restrict(dataset, 1, 2);
    assert_true(dataset_read(dataset, 1, 4, read));
    assert_memory_equal(read, ((int32_t[]){0, 258, 0, 258}), 16);
    dataset_close(dataset);
    assert_null(dataset_from_nanogpt("bare.bin", 258));
    assert_said("token 258 at position 1 (byte 2)");
    put("bare.bin", "\1\0\2", 3);
    assert_null(dataset_from_nanogpt("bare.bin", 258));
    assert_said("bare.bin: has 3 bytes");
    put("bare.bin", "", 0);
    assert_null(dataset_from_nanogpt("bare.bin", 258));
}

/* ---- the whole ---- */

static TokenizeOptions job_of(const Paths *paths, const Tokenizer *tokenizer, const char *output) {
    return (TokenizeOptions){.inputs = paths,
                             .tokenizer = tokenizer,
                             .output = output,
                             .val_fraction = 0.1,
                             .seed = 1,
                             .shard_tokens = 100000000};
}

static TokenizeReport tokenize_well(TokenizeOptions job) {
    TokenizeReport report;
    if (!tokenize(&job, &report)) fail_msg("%s", error_message());
    return report;
}

/* Training and validation together are the text, encoded in one go. */
static void test_text_to_shards(void **state) {
    (void)state;
    enum { BYTES = 2500000 };
    char *text = make_text(BYTES);
    put("whole.txt", text, BYTES);
    Tokenizer *bpe = learn("whole.txt", 300), *bytes = tokenizer_bytes();
    Paths paths = one_path("whole.txt");
    for (int k = 0; k < 2; k++) {
        const Tokenizer *tokenizer = k == 0 ? bpe : bytes;
        size_t V = tokenizer_vocabulary(tokenizer), count;
        TokenizeOptions job = job_of(&paths, tokenizer, "whole");
        job.shard_tokens = 300007;
        TokenizeReport report = tokenize_well(job);
        int32_t *ids = tokenizer_encode(tokenizer, text, BYTES, &count);
        size_t separators = tokenizer == bpe;
        assert_int_equal(report.train.tokens + report.validation.tokens, count + separators);
        assert_int_equal(report.train.documents, 1);
        assert_int_equal(report.validation.documents, 1);
        Dataset *train = dataset_from_shards("whole/train_*.bin", V, true);
        Dataset *validation = dataset_from_shards("whole/val_*.bin", V, true);
        size_t held_out = dataset_tokens(validation), first = dataset_tokens(train);
        int32_t *read = malloc((count + 1) * sizeof *read);
        assert_true(dataset_read(train, 0, first, read));
        assert_true(dataset_read(validation, 0, held_out, read + first));
        if (separators) assert_int_equal(read[0], V - 1);
        assert_memory_equal(read + separators, ids, count * sizeof *ids);
        /* A tenth of the text, to a word. */
        size_t held_bytes = 0, n;
        for (size_t i = first; i < first + held_out; i++) {
            tokenizer_decode(tokenizer, read[i], &n);
            held_bytes += n;
        }
        assert_in_range(held_bytes, BYTES / 10, BYTES / 10 + (separators ? 100 : 0));
        /* Once more: complete. Otherwise: refused, and nothing is touched. */
        assert_true(tokenize_well(job).was_complete);
        job.seed++;
        TokenizeReport again;
        assert_false(tokenize(&job, &again));
        assert_said("whole holds shards of other texts, or made with other options");
        run_shell("test ! -e whole.tmp && rm -r whole");
        dataset_close(train);
        dataset_close(validation);
        free(read);
        free(ids);
    }
    assert_int_equal(mkdir("taken", 0777), 0);
    put("taken/mine", "mine", 4);
    TokenizeOptions job = job_of(&paths, bytes, "taken");
    TokenizeReport report;
    assert_false(tokenize(&job, &report));
    assert_said("taken exists and is not empty");
    run_shell("test \"$(cat taken/mine)\" = mine && test ! -e taken.tmp");
    paths_free(&paths);
    tokenizer_free(bpe);
    tokenizer_free(bytes);
    free(text);
}

enum { DOCUMENTS = 40000 }; /* several batches */

static void put_documents(void) {
    FILE *file = fopen("many.jsonl", "wb");
    for (uint32_t i = 0; i < DOCUMENTS; i++)
        fprintf(file, "{\"text\": \"document %u: %.*s\"}\n", i, (int)(noise(i) % 20),
                "abracadabra abracadabra");
    fclose(file);
}

/* Interrupted after each batch, and in the worst moments, it ends in the same bytes. */
static void test_interruptions(void **state) {
    (void)state;
    put_documents();
    char *text = make_text(1000000);
    put("after.txt", text, 1000000);
    free(text);
    Tokenizer *bpe = learn("after.txt", 300);
    Paths paths = one_path("many.jsonl");
    assert_true(paths_add(&paths, "after.txt", NULL));
    TokenizeOptions job = job_of(&paths, bpe, "at_once");
    job.shard_tokens = 250000;
    TokenizeReport at_once = tokenize_well(job);
    assert_false(at_once.interrupted);

    volatile sig_atomic_t stop = 1;
    job.output = "in_parts";
    job.stop = &stop;
    int parts = 0;
    for (TokenizeReport report = {.interrupted = true}; report.interrupted; parts++) {
        report = tokenize_well(job);
        /* As if it had been killed when it had written more than its progress tells, and as if
         * right after the last shards got their names. */
        if (report.interrupted && parts == 0)
            run_shell("for f in in_parts.tmp/*.part; do head -c 1000000 /dev/zero >>$f; done");
        if (report.interrupted && parts == 1)
            run_shell("for f in in_parts.tmp/*.part; do mv $f ${f%.part}; done");
        if (!report.interrupted) {
            assert_int_equal(report.train.tokens, at_once.train.tokens);
            assert_int_equal(report.validation.documents, at_once.validation.documents);
        }
    }
    assert_true(parts >= 3);
    run_shell("diff -r at_once in_parts && test ! -e in_parts.tmp");

    /* What was begun with other options is begun anew. */
    job.output = "changed";
    assert_true(tokenize_well(job).interrupted);
    job.shard_tokens = 100000;
    job.stop = NULL;
    assert_true(tokenize_well(job).train.shards > 2);
    paths_free(&paths);
    tokenizer_free(bpe);
}

/* Every document is in one part, in the order of the text, after a separator. */
static void test_documents(void **state) {
    (void)state;
    put_documents();
    put("none.jsonl", "{\"text\": \"\"}\n", 13); /* a document without tokens takes no separator */
    Tokenizer *bpe = tokenizer_bpe(NULL, 0, (const char *const[]){"<|endoftext|>"}, 1);
    Paths paths = one_path("many.jsonl");
    assert_true(paths_add(&paths, "none.jsonl", NULL));
    TokenizeReport report = tokenize_well(job_of(&paths, bpe, "documents"));
    /* Four standard deviations of a binomial with DOCUMENTS and 0.1 are 240. */
    assert_in_range(report.validation.documents, DOCUMENTS / 10 - 240, DOCUMENTS / 10 + 240);
    bool *seen = calloc(DOCUMENTS, sizeof *seen);
    for (int part = 0; part < 2; part++) {
        Dataset *dataset =
            dataset_from_shards(part ? "documents/val_*.bin" : "documents/train_*.bin", 257, true);
        size_t count = dataset_tokens(dataset), documents = 0;
        int32_t *ids = malloc(count * sizeof *ids);
        char *text = calloc(count + 1, 1);
        assert_true(dataset_read(dataset, 0, count, ids));
        size_t bytes;
        for (size_t i = 0; i < count; i++)
            text[i] = ids[i] == 256 ? '\x01' : *tokenizer_decode(bpe, ids[i], &bytes);
        int last = -1;
        for (char *at = text; *at; at = at + 1 + strcspn(at + 1, "\x01"), documents++) {
            int number;
            assert_int_equal(sscanf(at,
                                    "\x01"
                                    "document %d:",
                                    &number),
                             1);
            assert_true(number > last && !seen[number]);
            seen[last = number] = true;
        }
        assert_int_equal(documents, part ? report.validation.documents : report.train.documents);
        free(text);
        free(ids);
        dataset_close(dataset);
    }
    for (int i = 0; i < DOCUMENTS; i++) assert_true(seen[i]);
    free(seen);

    TokenizeOptions job = job_of(&paths, bpe, "unsplit");
    job.split = SPLIT_END;
    assert_false(tokenize(&job, &report));
    assert_said("JSON lines are split by documents");
    paths_free(&paths);
    paths = one_path("none.jsonl");
    job = job_of(&paths, bpe, "unsplit");
    assert_false(tokenize(&job, &report));
    assert_said("of 1 documents, ");
    run_shell("test ! -e unsplit && test ! -e unsplit.tmp");
    paths_free(&paths);
    tokenizer_free(bpe);
}

/* A text that spells the separator does not make one, unless it is to. */
static void test_special_tokens_in_text(void **state) {
    (void)state;
    put("spelt.txt", "one<|endoftext|>two", 19);
    Tokenizer *bpe = tokenizer_bpe(NULL, 0, (const char *const[]){"<|endoftext|>"}, 1);
    Paths paths = one_path("spelt.txt");
    TokenizeOptions job = job_of(&paths, bpe, "spelt");
    job.val_fraction = 0;
    assert_int_equal(tokenize_well(job).train.tokens, 1 + 19);
    job.output = "meant";
    job.special = true;
    assert_int_equal(tokenize_well(job).train.tokens, 1 + 3 + 1 + 3);
    paths_free(&paths);
    tokenizer_free(bpe);
}

/* ---- corpora ---- */

static void assert_same_tokens(const Dataset *a, const Dataset *b) {
    size_t count = dataset_tokens(a);
    assert_int_equal(count, dataset_tokens(b));
    int32_t *one = malloc(count * sizeof *one), *other = malloc(count * sizeof *other);
    assert_true(dataset_read(a, 0, count, one) && dataset_read(b, 0, count, other));
    assert_memory_equal(one, other, count * sizeof *one);
    free(one);
    free(other);
}

static void test_directory_as_corpus(void **state) {
    (void)state;
    char *text = make_text(50000);
    put("corpus.txt", text, 50000);
    free(text);
    Tokenizer *bpe = learn("corpus.txt", 300);
    assert_int_equal(mkdir("learnt", 0777), 0);
    assert_true(tokenizer_save(bpe, "learnt"));
    Paths paths = one_path("corpus.txt");
    tokenize_well(job_of(&paths, bpe, "corpus"));
    Corpus corpus, direct;
    assert_true(corpus_open_shards(&corpus, CORPUS_SHARDS, "corpus", NULL, /*V=*/7));
    assert_int_equal(corpus.V, 300);
    assert_string_equal(tokenizer_kind(corpus.tokenizer), "bpe");
    /* All of the text in memory, tokenized by itself, is the same. */
    assert_true(corpus_open_text(&direct, "corpus.txt", NULL, "learnt", 0));
    assert_int_equal(dataset_tokens(direct.train),
                     dataset_tokens(corpus.train) + dataset_tokens(corpus.validation));
    corpus_close(&direct);
    corpus_close(&corpus);
    assert_false(corpus_open_text(&direct, "corpus.txt", NULL, "nowhere", 0.1));
    assert_said("nowhere");
    paths_free(&paths);
    tokenizer_free(bpe);
}

/* A large text is tokenized once; another text or tokenizer never meets its tokens. */
static void test_cache(void **state) {
    (void)state;
    enum { PART = 1 << 16, BYTES = 17 << 20 };
    char *text = make_text(BYTES);
    for (size_t at = PART; at < BYTES; at += PART) memcpy(text + at, text, PART);
    text[BYTES - 1] = 'z';
    put("large.txt", text, BYTES);
    put("small.txt", text, PART);
    Tokenizer *bpe = learn("small.txt", 300), *other = learn("small.txt", 290);
    assert_int_equal(mkdir("small", 0777), 0);
    assert_true(tokenizer_save(bpe, "small"));
    size_t count;
    int32_t *ids = tokenizer_encode(bpe, text, BYTES, &count);
    for (int time = 0; time < 2; time++) {
        Corpus corpus;
        if (!corpus_open_text(&corpus, "large.txt", NULL, "small", 0.25))
            fail_msg("%s", error_message());
        size_t train = dataset_tokens(corpus.train), validation = dataset_tokens(corpus.validation);
        assert_int_equal(train + validation, count + 1);
        assert_int_equal(validation, (size_t)((double)(count + 1) * 0.25));
        int32_t *read = malloc((count + 1) * sizeof *read);
        assert_true(dataset_read(corpus.train, 0, train, read));
        assert_true(dataset_read(corpus.validation, 0, validation, read + train));
        assert_int_equal(read[0], 299);
        assert_memory_equal(read + 1, ids, count * sizeof *ids);
        free(read);
        corpus_close(&corpus);
        run_shell("test \"$(ls cache/tilegpt | grep -c ...........)\" = 1");
    }
    free(ids);
    text[BYTES - 1] = 'y'; /* as long as before */
    put("large.txt", text, BYTES);
    Corpus first, second;
    assert_true(corpus_open_text(&first, "large.txt", bpe, "", 0.1));
    int32_t last;
    assert_true(dataset_read(first.validation, dataset_tokens(first.validation) - 1, 1, &last));
    assert_memory_equal(tokenizer_decode(first.tokenizer, last, &count), "y", 1);
    assert_true(corpus_open_text(&second, "large.txt", other, "", 0.1));
    assert_true(dataset_tokens(second.train) > dataset_tokens(first.train));
    run_shell("test \"$(ls cache/tilegpt | grep -c ...........)\" = 3");
    Corpus again;
    assert_true(corpus_open_text(&again, "large.txt", NULL, "small", 0.1));
    assert_same_tokens(first.validation, again.validation);
    corpus_close(&again);
    corpus_close(&first);
    corpus_close(&second);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sha256),
        cmocka_unit_test(test_list_of_words),
        cmocka_unit_test(test_plain_source),
        cmocka_unit_test(test_damaged_sources),
        cmocka_unit_test(test_json_lines),
        cmocka_unit_test(test_word_counts),
        cmocka_unit_test(test_learns_as_counting_anew),
        cmocka_unit_test(test_learnt_tokenizer),
        cmocka_unit_test(test_learns_as_hugging_face),
        cmocka_unit_test(test_shard_writer),
        cmocka_unit_test(test_wide_and_bare_files),
        cmocka_unit_test(test_text_to_shards),
        cmocka_unit_test(test_interruptions),
        cmocka_unit_test(test_documents),
        cmocka_unit_test(test_special_tokens_in_text),
        cmocka_unit_test(test_directory_as_corpus),
        cmocka_unit_test(test_cache),
    };
    return cmocka_run_group_tests(tests, enter_scratch, leave_scratch);
}
