#include "data/bpe_files.h"

#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/files.h"

static const size_t file_limit = (size_t)64 << 20;

static const cJSON *member(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

/* ---- reading ---- */

/* The refusal of a member with a value that changes what is encoded. */
static bool refuse(const char *path, const char *name, const cJSON *value, const char *expected) {
    char *has = value == NULL ? NULL : cJSON_PrintUnformatted(value);
    error_set(
        "%s: \"%s\" is %.160s where %s is expected; this program reads byte-level BPE as "
        "GPT-2 has it",
        path, name, has == NULL ? "missing" : has, expected);
    cJSON_free(has);
    return false;
}

/* Reads a flag that is `absent` if it isn't there. */
static bool read_flag(const char *path, const cJSON *object, const char *name, bool absent,
                      bool *flag) {
    const cJSON *value = member(object, name);
    *flag = value == NULL ? absent : cJSON_IsTrue(value);
    return value == NULL || cJSON_IsBool(value) || refuse(path, name, value, "true or false");
}

static bool is_absent(const cJSON *value) { return value == NULL || cJSON_IsNull(value); }

static bool require_absent(const char *path, const cJSON *object, const char *name) {
    return is_absent(member(object, name)) || refuse(path, name, member(object, name), "null");
}

static bool require_false(const char *path, const cJSON *object, const char *name) {
    bool flag;
    return read_flag(path, object, name, false, &flag) &&
           (!flag || refuse(path, name, member(object, name), "false"));
}

/* "" is as good as null. */
static bool require_empty(const char *path, const cJSON *object, const char *name) {
    const char *text = cJSON_GetStringValue(member(object, name));
    return (text != NULL && text[0] == '\0') || require_absent(path, object, name);
}

static bool is_byte_level(const cJSON *part) {
    const char *type = cJSON_GetStringValue(member(part, "type"));
    return type != NULL && strcmp(type, "ByteLevel") == 0;
}

static bool require_byte_level(const char *path, const cJSON *root, const char *name) {
    return is_byte_level(member(root, name)) ||
           refuse(path, name, member(root, name), "{\"type\": \"ByteLevel\", ...}");
}

static bool read_options(const char *path, const cJSON *root, BpeOptions *options) {
    const cJSON *model = member(root, "model"), *before = member(root, "pre_tokenizer");
    const cJSON *dropout = member(model, "dropout"), *unknown = member(model, "unk_token");
    *options = (BpeOptions){.unknown = cJSON_GetStringValue(unknown)};
    if (!is_absent(unknown) && options->unknown == NULL)
        return refuse(path, "unk_token", unknown, "a token or null");
    if (!is_absent(dropout) && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0))
        return refuse(path, "dropout", dropout, "null");
    bool use_regex = true;
    if (!require_absent(path, root, "truncation") || !require_absent(path, root, "padding") ||
        !require_absent(path, root, "normalizer") ||
        !require_byte_level(path, root, "pre_tokenizer") ||
        !require_byte_level(path, root, "decoder") ||
        !(is_absent(member(root, "post_processor")) ||
          require_byte_level(path, root, "post_processor")) ||
        !read_flag(path, before, "add_prefix_space", true, &options->add_prefix_space) ||
        !read_flag(path, before, "use_regex", true, &use_regex) ||
        !read_flag(path, model, "ignore_merges", false, &options->ignore_merges) ||
        !require_empty(path, model, "continuing_subword_prefix") ||
        !require_empty(path, model, "end_of_word_suffix") ||
        !require_false(path, model, "byte_fallback"))
        return false;
    options->whole_text = !use_regex;
    return options->unknown == NULL || require_false(path, model, "fuse_unk");
}

/* "token": id for every id from 0 on, in any order. */
static bool read_vocabulary(const char *path, const cJSON *vocabulary, Bpe *bpe) {
    size_t V = (size_t)cJSON_GetArraySize(vocabulary);
    if (!cJSON_IsObject(vocabulary) || V == 0)
        return error_set("%s: has no vocabulary with entries \"token\": id", path);
    const char **names = calloc(V, sizeof *names);
    if (names == NULL) return error_set("no memory for a vocabulary of %zu tokens", V);
    bool good = true;
    for (const cJSON *entry = vocabulary->child; entry != NULL && good; entry = entry->next) {
        double value = cJSON_IsNumber(entry) ? entry->valuedouble : -1;
        if (!(value >= 0 && value < (double)V) || value != (double)(size_t)value)
            good = error_set(
                "%s: the id of \"%.80s\" is not a whole number from 0 to %zu, as the "
                "%zu entries of the vocabulary need",
                path, entry->string, V - 1, V);
        else if (names[(size_t)value] != NULL)
            good = error_set("%s: the id %zu is given twice, to \"%.80s\" and to \"%.80s\"", path,
                             (size_t)value, names[(size_t)value], entry->string);
        else
            names[(size_t)value] = entry->string;
    }
    /* As many entries as ids, each id in range and none twice: so every id has a name. */
    for (size_t id = 0; id < V && good; id++)
        good = bpe_add_token(bpe, names[id], strlen(names[id])) ||
               error_set("%s: %s", path, error_message());
    free(names);
    return good;
}

/* "left right", with exactly one space. */
static bool add_merge_line(const char *path, Bpe *bpe, const char *line, size_t bytes) {
    const char *space = memchr(line, ' ', bytes);
    size_t left = space == NULL ? 0 : (size_t)(space - line), right = bytes - left - 1;
    if (space == NULL || memchr(space + 1, ' ', right) != NULL)
        return error_set(
            "%s: merge %zu is \"%.*s\" where two tokens with a space between them are "
            "expected; is the file cut short?",
            path, bpe->merge_count, (int)(bytes < 80 ? bytes : 80), line);
    return bpe_add_merge(bpe, line, left, space + 1, right) ||
           error_set("%s: %s", path, error_message());
}

static bool read_merges(const char *path, const cJSON *merges, Bpe *bpe) {
    if (!cJSON_IsArray(merges)) return error_set("%s: its model has no list \"merges\"", path);
    for (const cJSON *merge = merges->child; merge != NULL; merge = merge->next) {
        const char *line = cJSON_GetStringValue(merge);
        const char *left = cJSON_GetStringValue(cJSON_GetArrayItem(merge, 0));
        const char *right = cJSON_GetStringValue(cJSON_GetArrayItem(merge, 1));
        if (line != NULL) {
            if (!add_merge_line(path, bpe, line, strlen(line))) return false;
        } else if (!cJSON_IsArray(merge) || cJSON_GetArraySize(merge) != 2 || left == NULL ||
                   right == NULL) {
            return error_set("%s: merge %zu is neither \"left right\" nor [\"left\", \"right\"]",
                             path, bpe->merge_count);
        } else if (!bpe_add_merge(bpe, left, strlen(left), right, strlen(right))) {
            return error_set("%s: %s", path, error_message());
        }
    }
    return true;
}

static bool read_added_token(const char *path, const cJSON *token, Bpe *bpe) {
    const char *name = cJSON_GetStringValue(member(token, "content"));
    const cJSON *id = member(token, "id");
    bool special, normalized;
    if (name == NULL || !cJSON_IsNumber(id))
        return error_set("%s: an added token without a \"content\" or an \"id\"", path);
    if (!require_false(path, token, "single_word") || !require_false(path, token, "lstrip") ||
        !require_false(path, token, "rstrip") ||
        !read_flag(path, token, "special", false, &special) ||
        !read_flag(path, token, "normalized", true, &normalized))
        return false;
    if (!bpe_add_added(bpe, name, strlen(name), special, normalized))
        return error_set("%s: %s", path, error_message());
    uint32_t expected = bpe->added[bpe->added_count - 1].id;
    return id->valuedouble == (double)expected ||
           error_set(
               "%s: the added token \"%.80s\" has the id %.17g where %u is expected: ids "
               "follow each other without holes, and a token of the vocabulary keeps its own",
               path, name, id->valuedouble, expected);
}

static bool read_added(const char *path, const cJSON *added, Bpe *bpe) {
    if (is_absent(added)) return true;
    if (!cJSON_IsArray(added)) return refuse(path, "added_tokens", added, "a list");
    for (const cJSON *token = added->child; token != NULL; token = token->next)
        if (!read_added_token(path, token, bpe)) return false;
    return true;
}

Bpe *bpe_from_json(const char *path, const cJSON *root) {
    const cJSON *model = member(root, "model");
    BpeOptions options;
    Bpe *bpe = bpe_new();
    if (bpe == NULL) return NULL;
    if (read_options(path, root, &options) && read_vocabulary(path, member(model, "vocab"), bpe) &&
        read_merges(path, member(model, "merges"), bpe) &&
        read_added(path, member(root, "added_tokens"), bpe)) {
        if (bpe_finish(bpe, &options)) return bpe;
        error_set("%s: %s", path, error_message());
    }
    bpe_free(bpe);
    return NULL;
}

/* merges.txt: a merge a line. The first line may be "#version: ...". */
static bool read_merge_lines(const char *path, const char *text, size_t bytes, Bpe *bpe) {
    for (size_t offset = 0, length; offset < bytes; offset += length + 1) {
        const char *line = text + offset, *newline = memchr(line, '\n', bytes - offset);
        length = newline == NULL ? bytes - offset : (size_t)(newline - line);
        size_t end = length > 0 && line[length - 1] == '\r' ? length - 1 : length;
        bool version = end >= 8 && memcmp(line, "#version", 8) == 0;
        if (!version && !add_merge_line(path, bpe, line, end)) return false;
    }
    return true;
}

static bool is_made_without_merge(const char *name, size_t bytes) {
    uint32_t code;
    return utf8_decode(name, bytes, &code) == bytes || (name[0] == '<' && name[bytes - 1] == '>');
}

/* Whether a merge makes each token; if not, the file with the merges lacks some. */
static bool check_every_token_is_made(const char *path, const Bpe *bpe) {
    bool *made = calloc(bpe->names.count, sizeof *made), good = made != NULL;
    if (!good) return error_set("no memory to check %s", path);
    for (size_t rank = 0; rank < bpe->merge_count; rank++) made[bpe->merge[rank].result] = true;
    for (uint32_t id = 0; id < bpe->names.count && good; id++) {
        size_t bytes;
        const char *name = string_table_get(&bpe->names, id, &bytes);
        if (!made[id] && !is_made_without_merge(name, bytes))
            good = error_set(
                "%s: none of its %zu merges makes the token \"%.*s\", id %u of the "
                "vocabulary; the file is cut short or belongs to another one",
                path, bpe->merge_count, (int)(bytes < 80 ? bytes : 80), name, id);
    }
    free(made);
    return good;
}

Bpe *bpe_from_vocab(const char *vocab_path, const char *merges_path) {
    static const char end[] = "<|endoftext|>";
    static const BpeOptions options = {.unknown = NULL};
    uint32_t id;
    size_t bytes;
    char *text = file_read(merges_path, file_limit, &bytes);
    cJSON *vocabulary = text == NULL ? NULL : json_read(vocab_path, file_limit);
    Bpe *bpe = vocabulary == NULL ? NULL : bpe_new();
    bool good = bpe != NULL && read_vocabulary(vocab_path, vocabulary, bpe) &&
                read_merge_lines(merges_path, text, bytes, bpe) &&
                check_every_token_is_made(merges_path, bpe) &&
                (!string_table_find(&bpe->names, end, sizeof end - 1, &id) ||
                 bpe_add_added(bpe, end, sizeof end - 1, /*special=*/true, /*normalized=*/false)) &&
                bpe_finish(bpe, &options);
    free(text);
    cJSON_Delete(vocabulary);
    if (good) return bpe;
    bpe_free(bpe);
    return NULL;
}

/* ---- writing ---- */

static void write_name(const Bpe *bpe, uint32_t id, FILE *file) {
    size_t bytes;
    const char *name = string_table_get(&bpe->names, id, &bytes);
    json_write_string(file, name, bytes);
}

static const char *boolean(bool value) { return value ? "true" : "false"; }

static void write_added(const Bpe *bpe, FILE *file) {
    fputs("  \"added_tokens\": [", file);
    for (size_t i = 0; i < bpe->added_count; i++) {
        const BpeAdded *added = &bpe->added[i];
        fprintf(file, "%s\n    {\"id\": %u, \"content\": ", i == 0 ? "" : ",", added->id);
        write_name(bpe, added->id, file);
        fprintf(file,
                ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                "\"normalized\": %s, \"special\": %s}",
                boolean(added->normalized), boolean(added->special));
    }
    fputs(bpe->added_count > 0 ? "\n  ],\n" : "],\n", file);
}

static void write_model(const Bpe *bpe, FILE *file) {
    fputs("  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": ",
          file);
    if (bpe->unknown >= 0)
        write_name(bpe, (uint32_t)bpe->unknown, file);
    else
        fputs("null", file);
    fprintf(file,
            ",\n    \"continuing_subword_prefix\": \"\",\n    \"end_of_word_suffix\": \"\",\n"
            "    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n    \"ignore_merges\": %s,\n"
            "    \"vocab\": {",
            boolean(bpe->ignore_merges));
    for (uint32_t id = 0; id < bpe->V_model; id++) {
        fputs(id == 0 ? "\n      " : ",\n      ", file);
        write_name(bpe, id, file);
        fprintf(file, ": %u", id);
    }
    fputs("\n    },\n    \"merges\": [", file);
    for (size_t rank = 0; rank < bpe->merge_count; rank++) {
        fputs(rank == 0 ? "\n      [" : ",\n      [", file);
        write_name(bpe, bpe->merge[rank].left, file);
        fputs(", ", file);
        write_name(bpe, bpe->merge[rank].right, file);
        fputc(']', file);
    }
    fputs(bpe->merge_count > 0 ? "\n    ]\n  }\n" : "]\n  }\n", file);
}

void bpe_write_json(const Bpe *bpe, FILE *file) {
    fputs("{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n", file);
    write_added(bpe, file);
    fprintf(file,
            "  \"normalizer\": null,\n"
            "  \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": %s, "
            "\"trim_offsets\": true, \"use_regex\": %s},\n",
            boolean(bpe->add_prefix_space), boolean(!bpe->whole_text));
    fputs(
        "  \"post_processor\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
        "\"trim_offsets\": false, \"use_regex\": true},\n"
        "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
        "\"trim_offsets\": true, \"use_regex\": true},\n",
        file);
    write_model(bpe, file);
    fputs("}\n", file);
}
