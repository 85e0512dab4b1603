/* Characters and bytes as tokens, and their tokenizer.json.
 *
 * For the tokenizers library, characters are a WordLevel model behind a pre-tokenizer that isolates
 * every character, and bytes are a ByteLevel BPE of the 256 bytes without merges. Apart from the
 * vocabulary each kind's file is one constant text: it is written as it is, and a file that is read
 * must say the same, so what this program encodes is what that library encodes. */
#include "data/tokenizer.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

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
    free(tokenizer);
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

int32_t *tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes,
                          size_t *count) {
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

const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t id, size_t *bytes) {
    bool known = id >= 0 && (size_t)id < tokenizer->V;
    *bytes = known ? tokenizer->token[id].bytes : 0;
    return known ? tokenizer->token[id].text : "";
}

/* The character that stands for a byte in ByteLevel vocabularies: itself (in Latin-1) where that is
 * visible, else the next unused one from U+0100 on (Radford et al. 2019, bytes_to_unicode). */
static uint32_t byte_character(unsigned byte) {
    if (byte < 0x21) return 0x100 + byte;
    if (byte < 0x7F) return byte;
    if (byte < 0xA1) return 0x121 + byte - 0x7F;
    return byte == 0xAD ? 0x143 : byte;
}

static void write_vocabulary(const Tokenizer *tokenizer, FILE *file) {
    for (size_t id = 0; id < tokenizer->V; id++) {
        Token token = tokenizer->token[id];
        if (tokenizer->kind == &bytes_kind)
            token.bytes = (unsigned char)utf8_encode(byte_character((unsigned)id), token.text);
        fputs(id == 0 ? "\n      \"" : ",\n      \"", file);
        unsigned char first = (unsigned char)token.text[0];
        if (first < ' ') {
            fprintf(file, "\\u%04x", first);
        } else {
            if (first == '"' || first == '\\') fputc('\\', file);
            fwrite(token.text, 1, token.bytes, file);
        }
        fprintf(file, "\": %zu", id);
    }
}

static const char file_name[] = "tokenizer.json";

bool tokenizer_save(const Tokenizer *tokenizer, const char *directory) {
    char path[FILE_PATH_BYTES];
    FileReplacement replacement;
    if (!file_join(path, directory, file_name) || !file_replace_begin(&replacement, path))
        return false;
    fputs(tokenizer->kind->head, replacement.file);
    write_vocabulary(tokenizer, replacement.file);
    fputs(tokenizer->kind->tail, replacement.file);
    return file_replace_commit(&replacement);
}

#define SUPPORTED "this program reads the character and byte tokenizers that it writes"

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

static const Kind *find_kind(const char *path, const cJSON *root) {
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(model, "type"));
    int merges = cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(model, "merges"));
    if (!cJSON_IsObject(root) || !cJSON_IsObject(model)) {
        error_set("%s: there is no \"model\" in it, so it is no tokenizer", path);
    } else if (type == NULL) {
        error_set("%s: its model has no \"type\"; expected WordLevel or BPE", path);
    } else if (strcmp(type, characters_kind.model) == 0) {
        return &characters_kind;
    } else if (strcmp(type, bytes_kind.model) != 0) {
        error_set("%s: a %.40s tokenizer, which is not supported yet; " SUPPORTED, path, type);
    } else if (merges > 0) {
        error_set("%s: a BPE tokenizer with %d merges, which is not supported yet; " SUPPORTED,
                  path, merges);
    } else {
        return &bytes_kind;
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

static Tokenizer *read_json(const char *path, const char *text, size_t bytes) {
    const char *end = text;
    cJSON *root = cJSON_ParseWithLengthOpts(text, bytes, &end, /*require_null_terminated=*/false);
    if (root != NULL) end += strspn(end, " \t\r\n");
    if (root == NULL || end != text + bytes) {
        error_set("%s: is not JSON: it goes wrong at byte %zu of %zu", path, (size_t)(end - text),
                  bytes);
        cJSON_Delete(root);
        return NULL;
    }
    Tokenizer *tokenizer = NULL;
    const Kind *kind = find_kind(path, root);
    if (kind != NULL) {
        char *empty = malloc(strlen(kind->head) + strlen(kind->tail) + 1);
        cJSON *expected = NULL;
        if (empty != NULL) expected = cJSON_Parse(strcat(strcpy(empty, kind->head), kind->tail));
        const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
        if (expected == NULL)
            error_set("no memory to read %s", path);
        else if (same_members(path, expected, root))
            tokenizer =
                read_vocabulary(path, kind, cJSON_GetObjectItemCaseSensitive(model, "vocab"));
        cJSON_Delete(expected);
        free(empty);
    }
    cJSON_Delete(root);
    return tokenizer;
}

Tokenizer *tokenizer_load(const char *directory) {
    char path[FILE_PATH_BYTES];
    size_t bytes;
    char *text = NULL;
    if (file_join(path, directory, file_name)) text = file_read(path, file_limit, &bytes);
    Tokenizer *tokenizer = text == NULL ? NULL : read_json(path, text, bytes);
    free(text);
    return tokenizer;
}
