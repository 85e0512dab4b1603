/* Characters and bytes as tokens, and their tokenizer.json; BPE is passed on to data/bpe.h.
 *
 * For the tokenizers library, characters are a WordLevel model behind a pre-tokenizer that isolates
 * every character, and bytes are a ByteLevel BPE of the 256 bytes without merges. Apart from the
 * vocabulary each kind's file is one constant text: it is written as it is, and a file that is read
 * must say the same, so what this program encodes is what that library encodes. */
#include "data/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "data/bpe.h"
#include "data/bpe_files.h"
#include "data/json.h"
#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/replace.h"

typedef struct {
    const char *name;        /* of the kind */
    const char *model;       /* its type in tokenizer.json */
    const char *head, *tail; /* tokenizer.json before and after what is inside "vocab": {} */
} Kind;

#define HEAD                                                                      \
    "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n" \
    "  \"added_tokens\": [],\n  \"normalizer\": null,\n"

static const Kind characters_kind = {
    "char", "WordLevel",
    HEAD
    /* Not ".", which matches no newline. */
    "  \"pre_tokenizer\": {\"type\": \"Split\", \"pattern\": {\"Regex\": \"[\\\\s\\\\S]\"}, "
    "\"behavior\": \"Isolated\", \"invert\": false},\n"
    "  \"post_processor\": null,\n"
    "  \"decoder\": {\"type\": \"Fuse\"},\n"
    "  \"model\": {\n    \"type\": \"WordLevel\",\n    \"vocab\": {",
    /* No character is "[UNK]": an unknown character is an error there, as it is here. */
    "\n    },\n    \"unk_token\": \"[UNK]\"\n  }\n}\n"};

static const Kind bytes_kind = {
    "bytes", "BPE",
    HEAD
    "  \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
    "\"trim_offsets\": true, \"use_regex\": false},\n"
    "  \"post_processor\": null,\n"
    "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
    "\"trim_offsets\": true, \"use_regex\": true},\n"
    "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
    "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n"
    "    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n"
    "    \"vocab\": {",
    "\n    },\n    \"merges\": []\n  }\n}\n"};

static const Kind bpe_kind = {.name = "bpe"};

/* A vocabulary of every character there is takes less; what is larger is another kind of file. */
static const size_t file_limit = (size_t)64 << 20;

typedef struct {
    unsigned char bytes; /* 0: not defined yet */
    char text[4];
} Token;

struct Tokenizer {
    const Kind *kind;
    size_t V;
    Token *token;    /* (V) */
    uint32_t *place; /* characters: by code point, the id + 1, or 0 if not in the vocabulary */
    Bpe *bpe;        /* BPE: everything; the members above are not used */
};

/* A tokenizer with V tokens to be defined. */
static Tokenizer *allocate(const Kind *kind, size_t V) {
    Tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (tokenizer != NULL) {
        *tokenizer = (Tokenizer){.kind = kind, .V = V, .token = calloc(V, sizeof(Token))};
        /* By far most pages of this table are never touched and so take no memory. */
        if (kind == &characters_kind)
            tokenizer->place = calloc(UTF8_CODES, sizeof *tokenizer->place);
        if (tokenizer->token != NULL && (kind != &characters_kind || tokenizer->place != NULL))
            return tokenizer;
        tokenizer_free(tokenizer);
    }
    error_set("no memory for a tokenizer of %zu tokens", V);
    return NULL;
}

void tokenizer_free(Tokenizer *tokenizer) {
    if (tokenizer == NULL) return;
    free(tokenizer->token);
    free(tokenizer->place);
    bpe_free(tokenizer->bpe);
    free(tokenizer);
}

/* Takes over the BPE, which may be NULL after an error. */
static Tokenizer *wrap_bpe(Bpe *bpe) {
    Tokenizer *tokenizer = bpe == NULL ? NULL : calloc(1, sizeof *tokenizer);
    if (tokenizer != NULL) {
        *tokenizer = (Tokenizer){.kind = &bpe_kind, .V = bpe->names.count, .bpe = bpe};
    } else if (bpe != NULL) {
        error_set("no memory for a tokenizer of %u tokens", bpe->names.count);
        bpe_free(bpe);
    }
    return tokenizer;
}

static void define_character(Tokenizer *tokenizer, size_t id, uint32_t code) {
    Token *token = &tokenizer->token[id];
    token->bytes = (unsigned char)utf8_encode(code, token->text);
    tokenizer->place[code] = (uint32_t)id + 1;
}

static void define_byte(Tokenizer *tokenizer, size_t id) {
    tokenizer->token[id] = (Token){.bytes = 1, .text = {(char)id}};
}

Tokenizer *tokenizer_bytes(void) {
    Tokenizer *tokenizer = allocate(&bytes_kind, 256);
    for (size_t id = 0; tokenizer != NULL && id < 256; id++) define_byte(tokenizer, id);
    return tokenizer;
}

static void not_utf8(const char *text, size_t offset) {
    error_set(
        "the text is not UTF-8: byte 0x%02x at offset %zu begins no character; convert it, "
        "or take bytes as tokens",
        (unsigned char)text[offset], offset);
}

Tokenizer *tokenizer_characters(const char *text, size_t bytes) {
    if (bytes == 0) {
        error_set("the text is empty: there are no characters to make a vocabulary of");
        return NULL;
    }
    bool *seen = calloc(UTF8_CODES, sizeof *seen);
    if (seen == NULL) {
        error_set("no memory for the characters of the text");
        return NULL;
    }
    size_t V = 0;
    uint32_t code, largest = 0;
    for (size_t offset = 0, length; offset < bytes; offset += length) {
        length = utf8_decode(text + offset, bytes - offset, &code);
        if (length == 0) {
            not_utf8(text, offset);
            free(seen);
            return NULL;
        }
        V += !seen[code];
        seen[code] = true;
        if (code > largest) largest = code;
    }
    Tokenizer *tokenizer = allocate(&characters_kind, V);
    size_t id = 0;
    for (code = 0; tokenizer != NULL && code <= largest; code++)
        if (seen[code]) define_character(tokenizer, id++, code);
    free(seen);
    return tokenizer;
}

static bool add_bytes_and_merges(Bpe *bpe, const int32_t (*merges)[2], size_t count) {
    for (uint32_t code = 0; code < 0x144; code++) /* GPT-2's order is that of the characters */
        for (unsigned byte = 0; byte < 256; byte++) {
            char name[4];
            if (byte_character(byte) == code && !bpe_add_token(bpe, name, utf8_encode(code, name)))
                return false;
        }
    for (size_t i = 0; i < count; i++)
        if (!bpe_learn_merge(bpe, (uint32_t)merges[i][0], (uint32_t)merges[i][1])) return false;
    return true;
}

static bool add_special(Bpe *bpe, const char *const *special, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!bpe_add_token(bpe, special[i], strlen(special[i])) ||
            !bpe_add_added(bpe, special[i], strlen(special[i]), /*special=*/true,
                           /*normalized=*/false))
            return false;
    return true;
}

Tokenizer *tokenizer_bpe(const int32_t (*merges)[2], size_t merge_count, const char *const *special,
                         size_t special_count) {
    static const BpeOptions options = {.unknown = NULL};
    Bpe *bpe = bpe_new();
    if (bpe != NULL && add_bytes_and_merges(bpe, merges, merge_count) &&
        add_special(bpe, special, special_count) && bpe_finish(bpe, &options))
        return wrap_bpe(bpe);
    bpe_free(bpe);
    return NULL;
}

const char *tokenizer_kind(const Tokenizer *tokenizer) { return tokenizer->kind->name; }

size_t tokenizer_vocabulary(const Tokenizer *tokenizer) { return tokenizer->V; }

static bool encode_characters(const Tokenizer *tokenizer, const char *text, size_t bytes,
                              int32_t *ids, size_t *count) {
    size_t n = 0;
    for (size_t offset = 0; offset < bytes;) {
        uint32_t code;
        size_t length = utf8_decode(text + offset, bytes - offset, &code);
        if (length == 0) {
            not_utf8(text, offset);
            return false;
        }
        uint32_t place = tokenizer->place[code];
        if (place == 0)
            return error_set(
                "the character '%.*s' (U+%04X) at byte %zu is not among the %zu of "
                "the vocabulary; leave it out, or train on a text that has it",
                code < ' ' || code == 0x7F ? 0 : (int)length, text + offset, (unsigned)code, offset,
                tokenizer->V);
        ids[n++] = (int32_t)(place - 1);
        offset += length;
    }
    *count = n;
    return true;
}

int32_t tokenizer_special(const Tokenizer *tokenizer, const char *name) {
    return tokenizer->bpe == NULL ? -1 : bpe_special(tokenizer->bpe, name);
}

int32_t *tokenizer_encode_special(const Tokenizer *tokenizer, const char *text, size_t bytes,
                                  size_t *count) {
    return tokenizer->bpe == NULL
               ? tokenizer_encode(tokenizer, text, bytes, count)
               : bpe_encode(tokenizer->bpe, text, bytes, /*special=*/true, count);
}

int32_t *tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes,
                          size_t *count) {
    if (tokenizer->bpe != NULL)
        return bpe_encode(tokenizer->bpe, text, bytes, /*special=*/false, count);
    int32_t *ids = bytes < SIZE_MAX / sizeof *ids ? malloc((bytes + 1) * sizeof *ids) : NULL;
    if (ids == NULL) {
        error_set("no memory for the tokens of a text of %zu bytes", bytes);
        return NULL;
    }
    if (tokenizer->kind == &bytes_kind) {
        for (size_t i = 0; i < bytes; i++) ids[i] = (unsigned char)text[i];
        *count = bytes;
    } else if (!encode_characters(tokenizer, text, bytes, ids, count)) {
        free(ids);
        return NULL;
    }
    return ids;
}

size_t tokenizer_cut(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    if (tokenizer->bpe != NULL) return bpe_cut(tokenizer->bpe, text, bytes);
    if (tokenizer->kind == &bytes_kind) return bytes;
    size_t start = bytes; /* of the last character, which may go on */
    while (start > 0 && bytes - start < 4)
        if (((unsigned char)text[--start] & 0xC0) != 0x80) break;
    uint32_t code;
    return utf8_decode(text + start, bytes - start, &code) == bytes - start ? bytes : start;
}

const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t id, size_t *bytes) {
    if (tokenizer->bpe != NULL) return bpe_text(tokenizer->bpe, id, bytes);
    bool known = id >= 0 && (size_t)id < tokenizer->V;
    *bytes = known ? tokenizer->token[id].bytes : 0;
    return known ? tokenizer->token[id].text : "";
}

static void write_vocabulary(const Tokenizer *tokenizer, FILE *file) {
    for (size_t id = 0; id < tokenizer->V; id++) {
        Token token = tokenizer->token[id];
        if (tokenizer->kind == &bytes_kind)
            token.bytes = (unsigned char)utf8_encode(byte_character((unsigned)id), token.text);
        fputs(id == 0 ? "\n      " : ",\n      ", file);
        json_write_string(file, token.text, token.bytes);
        fprintf(file, ": %zu", id);
    }
}

static const char file_name[] = "tokenizer.json";

static void write_json(const Tokenizer *tokenizer, FILE *file) {
    if (tokenizer->bpe != NULL) {
        bpe_write_json(tokenizer->bpe, file);
    } else {
        fputs(tokenizer->kind->head, file);
        write_vocabulary(tokenizer, file);
        fputs(tokenizer->kind->tail, file);
    }
}

bool tokenizer_save(const Tokenizer *tokenizer, const char *directory) {
    char path[FILE_PATH_BYTES];
    FileReplacement replacement;
    if (!file_join(path, directory, file_name) || !file_replace_begin(&replacement, path))
        return false;
    write_json(tokenizer, replacement.file);
    return file_replace_commit(&replacement);
}

bool tokenizer_hash(const Tokenizer *tokenizer, char sha256[SHA256_HEX_BYTES]) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    bool good = file != NULL;
    if (good) {
        write_json(tokenizer, file);
        good = !ferror(file);
        good = fclose(file) == 0 && good;
    }
    Sha256 hash;
    sha256_begin(&hash);
    if (good) sha256_add(&hash, text, bytes);
    sha256_end(&hash, sha256);
    free(text);
    return good || error_set("no memory for a tokenizer's file");
}

#define SUPPORTED "this program reads the tokenizers that it writes, and GPT-2's"

/* Whether `found` has every member of `expected` with the same value, the vocabulary excepted. One
 * that is null or false may be absent: so it is in files of older versions of the library. */
static bool same_members(const char *path, const cJSON *expected, const cJSON *found) {
    for (const cJSON *want = expected->child; want != NULL; want = want->next) {
        const cJSON *have = cJSON_GetObjectItemCaseSensitive(found, want->string);
        if (strcmp(want->string, "vocab") == 0) continue;
        if (strcmp(want->string, "model") == 0) {
            if (!same_members(path, want, have)) return false;
            continue;
        }
        if (have == NULL && (cJSON_IsNull(want) || cJSON_IsFalse(want))) continue;
        if (have != NULL && cJSON_Compare(have, want, /*case_sensitive=*/true)) continue;
        char *has = have == NULL ? NULL : cJSON_PrintUnformatted(have);
        char *wants = cJSON_PrintUnformatted(want);
        error_set("%s: \"%s\" is %.160s where %s is expected; " SUPPORTED, path, want->string,
                  has == NULL ? "missing" : has, wants == NULL ? "another value" : wants);
        cJSON_free(has);
        cJSON_free(wants);
        return false;
    }
    return true;
}

/* Bytes have no merges and no pattern; other BPE models are GPT-2's kind. Old files don't say that
 * they are BPE. */
static const Kind *find_kind(const char *path, const cJSON *root) {
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    const cJSON *merges = cJSON_GetObjectItemCaseSensitive(model, "merges");
    const cJSON *before = cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer");
    const cJSON *type_member = cJSON_GetObjectItemCaseSensitive(model, "type");
    const char *type = cJSON_GetStringValue(type_member);
    if (!cJSON_IsObject(root) || !cJSON_IsObject(model)) {
        error_set("%s: there is no \"model\" in it, so it is no tokenizer", path);
    } else if (type == NULL && (type_member != NULL || !cJSON_IsArray(merges))) {
        error_set("%s: its model has no \"type\"; expected WordLevel or BPE", path);
    } else if (type != NULL && strcmp(type, characters_kind.model) == 0) {
        return &characters_kind;
    } else if (type != NULL && strcmp(type, bytes_kind.model) != 0) {
        error_set("%s: a %.40s tokenizer, which is not supported; " SUPPORTED, path, type);
    } else if (merges != NULL && merges->child == NULL &&
               cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(before, "use_regex"))) {
        return &bytes_kind;
    } else {
        return &bpe_kind;
    }
    return NULL;
}

/* Defines one token from a member "character": id of the vocabulary. */
static bool read_token(const char *path, Tokenizer *tokenizer, const cJSON *entry) {
    const char *key = entry->string;
    double value = cJSON_IsNumber(entry) ? entry->valuedouble : -1;
    if (!(value >= 0 && value < (double)tokenizer->V) || value != (double)(size_t)value)
        return error_set(
            "%s: the id of \"%.40s\" is not a whole number from 0 to %zu, as the %zu "
            "entries of \"vocab\" need",
            path, key, tokenizer->V - 1, tokenizer->V);
    size_t id = (size_t)value;
    if (tokenizer->token[id].bytes != 0)
        return error_set("%s: the id %zu is given twice, again for \"%.40s\"", path, id, key);
    /* cJSON ends its strings at the first zero byte: to it U+0000, and only it, is "". */
    uint32_t code = 0;
    size_t length = strlen(key);
    if (length > 0 && utf8_decode(key, length, &code) != length)
        return error_set("%s: \"%.40s\", the token of id %zu, is not one character; " SUPPORTED,
                         path, key, id);
    if (tokenizer->kind == &bytes_kind) {
        if (code != byte_character((unsigned)id))
            return error_set(
                "%s: id %zu is \"%s\", which does not stand for byte %zu; byte "
                "tokenizers in another order are not supported yet",
                path, id, key, id);
        define_byte(tokenizer, id);
    } else {
        if (tokenizer->place[code] != 0)
            return error_set("%s: the character \"%s\" is given twice", path, key);
        define_character(tokenizer, id, code);
    }
    return true;
}

static Tokenizer *read_vocabulary(const char *path, const Kind *kind, const cJSON *vocabulary) {
    int entries = cJSON_GetArraySize(vocabulary);
    if (!cJSON_IsObject(vocabulary) || entries == 0) {
        error_set("%s: its model has no \"vocab\" with entries \"character\": id", path);
        return NULL;
    }
    if (kind == &bytes_kind && entries != 256) {
        error_set("%s: a BPE vocabulary of %d entries; expected the 256 bytes", path, entries);
        return NULL;
    }
    Tokenizer *tokenizer = allocate(kind, (size_t)entries);
    if (tokenizer == NULL) return NULL;
    /* As many entries as ids, each id in range and none twice: so every id is defined. */
    for (const cJSON *entry = vocabulary->child; entry != NULL; entry = entry->next)
        if (!read_token(path, tokenizer, entry)) {
            tokenizer_free(tokenizer);
            return NULL;
        }
    return tokenizer;
}

/* Characters or bytes. */
static Tokenizer *read_fixed_kind(const char *path, const Kind *kind, const cJSON *root) {
    char *empty = malloc(strlen(kind->head) + strlen(kind->tail) + 1);
    cJSON *expected = NULL;
    if (empty != NULL) expected = cJSON_Parse(strcat(strcpy(empty, kind->head), kind->tail));
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    Tokenizer *tokenizer = NULL;
    if (expected == NULL)
        error_set("no memory to read %s", path);
    else if (same_members(path, expected, root))
        tokenizer = read_vocabulary(path, kind, cJSON_GetObjectItemCaseSensitive(model, "vocab"));
    cJSON_Delete(expected);
    free(empty);
    return tokenizer;
}

Tokenizer *tokenizer_load(const char *directory) {
    char path[FILE_PATH_BYTES], vocabulary[FILE_PATH_BYTES], merges[FILE_PATH_BYTES];
    if (!file_join(path, directory, file_name) || !file_join(vocabulary, directory, "vocab.json") ||
        !file_join(merges, directory, "merges.txt"))
        return NULL;
    if (!file_exists(path) && file_exists(vocabulary))
        return wrap_bpe(bpe_from_vocab(vocabulary, merges));
    cJSON *root = json_read(path, file_limit);
    if (root == NULL) return NULL;
    Tokenizer *tokenizer = NULL;
    const Kind *kind = find_kind(path, root);
    if (kind == &bpe_kind)
        tokenizer = wrap_bpe(bpe_from_json(path, root));
    else if (kind != NULL)
        tokenizer = read_fixed_kind(path, kind, root);
    cJSON_Delete(root);
    return tokenizer;
}
