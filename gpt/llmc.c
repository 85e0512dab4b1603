/* llm.c's model files; see llmc.h. Its matrices are (out,in); ours are (in,out), as Hugging Face's
 * Conv1D has them. */
#include "gpt/llmc.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt/tensors_file.h"
#include "runtime/convert.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/replace.h"

enum { MAGIC = 20240326, VERSION_F32 = 3, VERSION_BF16 = 5, HEADER = 256 };
enum { PADDING = 128 }; /* of the vocabulary, by llm.c's own exporter */
enum { PIECE = 4096 };  /* values converted at a time */

#define LAYERNORM_EPS 1e-5f

/* The file's tensors in their order; those of a block are stacked over the layers. */
static const char *const order[] = {
    "wte.weight",
    "wpe.weight",
    "h.%zu.ln_1.weight",
    "h.%zu.ln_1.bias",
    "h.%zu.attn.c_attn.weight",
    "h.%zu.attn.c_attn.bias",
    "h.%zu.attn.c_proj.weight",
    "h.%zu.attn.c_proj.bias",
    "h.%zu.ln_2.weight",
    "h.%zu.ln_2.bias",
    "h.%zu.mlp.c_fc.weight",
    "h.%zu.mlp.c_fc.bias",
    "h.%zu.mlp.c_proj.weight",
    "h.%zu.mlp.c_proj.bias",
    "ln_f.weight",
    "ln_f.bias",
};
enum { TENSORS = sizeof order / sizeof order[0] };

typedef struct {
    GptConfig config;
    size_t Vp;
    DataType type;
} Header;

bool llmc_is_name(const char *path) {
    size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, ".bin");
}

static bool in_block(const char *format) { return strncmp(format, "h.", 2) == 0; }

/* The blocks' matrices are; the embeddings are not. */
static bool is_transposed(const char *format, const GptTensor *tensor) {
    return in_block(format) && tensor->rank == 2;
}

static const GptTensor *find_tensor(const Gpt *model, const char *format, size_t l) {
    char name[sizeof((GptTensor *)0)->name];
    snprintf(name, sizeof name, format, l);
    for (size_t i = 0; i < gpt_tensors(model); i++)
        if (!strcmp(gpt_tensor(model, i)->name, name)) return gpt_tensor(model, i);
    error_fatal(__FILE__, __LINE__, "the model has no tensor %s", name);
}

static void transpose(float *to, const float *from, size_t rows, size_t columns) {
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
}

/* --- Reading -------------------------------------------------------------------------------- */

static bool parse_header(const char *path, const int32_t *header, size_t file_bytes,
                         Header *parsed) {
    if (header[0] != MAGIC)
        return error_set(
            "%s is not a model of llm.c: its magic number is %d, expected %d; of a "
            "Hugging Face model, give the directory",
            path, header[0], MAGIC);
    if (header[1] != VERSION_F32 && header[1] != VERSION_BF16)
        return error_set(
            "%s has version %d of llm.c's model format; %d (fp32) and %d (bf16) are "
            "read",
            path, header[1], VERSION_F32, VERSION_BF16);
    for (int i = 2; i < 8; i++)
        if (header[i] < 1)
            return error_set("%s: number %d of its header is %d", path, i, header[i]);
    GptConfig *c = &parsed->config;
    *c = (GptConfig){.T = (size_t)header[2],
                     .V = (size_t)header[3],
                     .L = (size_t)header[4],
                     .NH = (size_t)header[5],
                     .C = (size_t)header[6],
                     .layernorm_eps = LAYERNORM_EPS};
    parsed->Vp = (size_t)header[7];
    parsed->type = header[1] == VERSION_F32 ? TYPE_F32 : TYPE_BF16;
    if (!gpt_config_check(c)) return error_set("%s: %s", path, error_message());
    if (parsed->Vp < c->V)
        return error_set("%s: its padded vocabulary is %zu, less than the vocabulary of %zu", path,
                         parsed->Vp, c->V);
    /* Below 2^62 by the limits of gpt_config_check. */
    size_t values = gpt_parameters(c) + (parsed->Vp - c->V) * c->C;
    size_t expected = HEADER * sizeof(int32_t) + values * type_bytes(parsed->type);
    return file_bytes == expected ||
           error_set(
               "%s has %zu bytes, expected %zu of its header's L=%zu, C=%zu, T=%zu, Vp=%zu: "
               "the file %s",
               path, file_bytes, expected, c->L, c->C, c->T, parsed->Vp,
               file_bytes < expected ? "is cut short" : "has something after its end");
}

/* The open file, or -1 with error_message(). */
static int open_model(const char *path, Header *parsed) {
    int32_t header[HEADER];
    struct stat status;
    /* O_NONBLOCK: a pipe by that name must not hang the program. */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool good = (file >= 0 && fstat(file, &status) == 0) || error_set("cannot read %s", path);
    if (good && !S_ISREG(status.st_mode)) good = error_set("%s is not a file", path);
    size_t bytes = good ? (size_t)status.st_size : 0;
    if (good && bytes < sizeof header)
        good =
            error_set("%s has %zu bytes, fewer than the header of a model of llm.c", path, bytes);
    if (good && file_read_at(file, path, header, sizeof header, 0) &&
        parse_header(path, header, bytes, parsed))
        return file;
    if (file >= 0) close(file);
    return -1;
}

bool llmc_config(const char *path, GptConfig *config) {
    Header header;
    int file = open_model(path, &header);
    if (file < 0) return false;
    close(file);
    *config = header.config;
    return true;
}

static bool same_shape(const GptConfig *a, const GptConfig *b) {
    return a->L == b->L && a->NH == b->NH && a->C == b->C && a->T == b->T && a->V == b->V;
}

/* n values of the file as floats. */
static bool read_values(int file, const char *path, size_t offset, DataType type, size_t n,
                        float *values) {
    char piece[PIECE * sizeof(float)];
    size_t size = type_bytes(type);
    for (size_t done = 0; done < n; done += PIECE) {
        size_t m = n - done < PIECE ? n - done : PIECE;
        if (!file_read_at(file, path, piece, m * size, offset + done * size)) return false;
        type_to_float(type, values + done, piece, m);
    }
    return true;
}

static bool read_tensors(int file, const char *path, const Header *header, Gpt *model,
                         float *values, float *stored) {
    const GptConfig *c = &header->config;
    size_t offset = HEADER * sizeof(int32_t), size = type_bytes(header->type);
    for (size_t i = 0; i < TENSORS; i++)
        for (size_t l = 0; l < (in_block(order[i]) ? c->L : 1); l++) {
            const GptTensor *tensor = find_tensor(model, order[i], l);
            bool transposed = is_transposed(order[i], tensor);
            if (!read_values(file, path, offset, header->type, tensor->elements,
                             transposed ? stored : values))
                return error_set("%s; the model is half loaded and must not be used",
                                 error_message());
            if (transposed) transpose(values, stored, tensor->shape[1], tensor->shape[0]);
            gpt_write(model, GPT_PARAMETERS, tensor, values);
            offset += (tensor->elements + (i == 0 ? (header->Vp - c->V) * c->C : 0)) * size;
        }
    return true;
}

bool llmc_load(const char *path, Gpt *model) {
    Header header;
    int file = open_model(path, &header);
    if (file < 0) return false;
    float *values = tensors_buffer(model), *stored = tensors_buffer(model);
    bool good = values && stored;
    if (good && !same_shape(&header.config, gpt_config(model)))
        good = error_set("%s holds a model of another shape than this one", path);
    good = good && read_tensors(file, path, &header, model, values, stored);
    free(values);
    free(stored);
    close(file);
    return good;
}

/* --- Writing -------------------------------------------------------------------------------- */

static void write_values(FILE *file, DataType type, const float *values, size_t n) {
    char piece[PIECE * sizeof(float)];
    for (size_t done = 0; done < n; done += PIECE) {
        size_t m = n - done < PIECE ? n - done : PIECE;
        type_from_float(type, piece, values + done, m);
        fwrite(piece, type_bytes(type), m, file);
    }
}

static void write_tensors(FILE *file, const Header *header, const Gpt *model, float *values,
                          float *stored) {
    const GptConfig *c = &header->config;
    const float zero[1] = {0};
    for (size_t i = 0; i < TENSORS; i++)
        for (size_t l = 0; l < (in_block(order[i]) ? c->L : 1); l++) {
            const GptTensor *tensor = find_tensor(model, order[i], l);
            bool transposed = is_transposed(order[i], tensor);
            gpt_read(model, GPT_PARAMETERS, tensor, values);
            if (transposed) transpose(stored, values, tensor->shape[0], tensor->shape[1]);
            write_values(file, header->type, transposed ? stored : values, tensor->elements);
            size_t padding = i == 0 ? (header->Vp - c->V) * c->C : 0;
            for (size_t p = 0; p < padding; p++) write_values(file, header->type, zero, 1);
        }
}

static bool check_config(const char *path, const GptConfig *c) {
    if (c->untied_head)
        return error_set(
            "%s: a model of llm.c has no head of its own, and this one has; write a "
            "directory instead",
            path);
    return c->layernorm_eps == LAYERNORM_EPS ||
           error_set(
               "%s: llm.c computes layernorms with an epsilon of %g, and this model has %g; "
               "write a directory instead",
               path, LAYERNORM_EPS, c->layernorm_eps);
}

/* A file may be replaced if it is a model too. A link is not: what it leads to is not named. */
static bool check_replaced(const char *path) {
    struct stat status;
    int32_t magic = 0;
    if (lstat(path, &status) != 0) return true;
    int file = S_ISREG(status.st_mode) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    bool good = file >= 0 && status.st_size >= (off_t)sizeof magic &&
                file_read_at(file, path, &magic, sizeof magic, 0) && magic == MAGIC;
    if (file >= 0) close(file);
    return good || error_set("%s is there and is %s; choose another name, or remove it", path,
                             S_ISLNK(status.st_mode) ? "a symbolic link" : "no model of llm.c");
}

bool llmc_save(const char *path, const Gpt *model, const char *precision) {
    const GptConfig *c = gpt_config(model);
    Header header = {*c, (c->V + PADDING - 1) / PADDING * PADDING, TYPE_F32};
    if (strcmp(precision, "bf16") == 0)
        header.type = TYPE_BF16;
    else if (strcmp(precision, "fp32") != 0)
        return error_set("%s: a model of llm.c holds fp32 or bf16 numbers, not %s", path,
                         precision);
    if (!check_config(path, c) || !check_replaced(path)) return false;
    const int32_t words[HEADER] = {
        MAGIC,         header.type == TYPE_F32 ? VERSION_F32 : VERSION_BF16,
        (int32_t)c->T, (int32_t)c->V,
        (int32_t)c->L, (int32_t)c->NH,
        (int32_t)c->C, (int32_t)header.Vp};
    float *values = tensors_buffer(model), *stored = tensors_buffer(model);
    FileReplacement replacement;
    bool good = values && stored && file_replace_begin(&replacement, path);
    if (good) {
        fwrite(words, sizeof words[0], HEADER, replacement.file);
        write_tensors(replacement.file, &header, model, values, stored);
        good = file_replace_commit(&replacement);
    }
    free(values);
    free(stored);
    return good;
}
