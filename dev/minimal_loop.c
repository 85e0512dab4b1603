/* The smallest training loop on libtilegpt: a small GPT learns a text by bytes.
 *
 *   cc minimal_loop.c $(pkg-config --cflags --libs tilegpt) -o minimal_loop && ./minimal_loop TEXT
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tilegpt.h>

static void *check(void *made) {
    if (!made) fprintf(stderr, "%s\n", error_message()), exit(2);
    return made;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: minimal_loop TEXT [cpu|cuda]\n"), 2;
    int cuda = argc > 2 ? strcmp(argv[2], "cuda") == 0 : device_count_gpus() > 0;
    Device *device = check(device_open(cuda ? DEVICE_CUDA : DEVICE_CPU, 0));

    Corpus corpus;
    if (!corpus_open_text(&corpus, argv[1], NULL, "bytes", 0)) check(NULL);
    enum { B = 8, T = 64 };
    Loader loader = {corpus.train, B, T, 0, 1, LOADER_SHUFFLED, 1, 0};
    if (!loader_check(&loader)) check(NULL);

    GptConfig config = {.L = 4, .NH = 4, .C = 128, .T = T, .V = corpus.V, .layernorm_eps = 1e-5f};
    GptOptions options = {.B = B, .T = T, .type = cuda ? TYPE_BF16 : TYPE_F32, .use = GPT_TRAINING};
    Gpt *model = check(gpt_create(&config, &options, device, NULL));
    gpt_init(model, 1);

    int32_t tokens[B * T], targets[B * T];
    for (int step = 1; step <= 100; step++) {
        if (!loader_next(&loader, tokens, targets)) check(NULL);
        gpt_zero_gradients(model);
        gpt_forward(model, tokens, targets, B, T, GPT_TRAIN);
        gpt_backward(model);
        gpt_update(model, (AdamW){1e-3f, 0.9f, 0.99f, 1e-8f, 0.1f, 1.0f, (uint64_t)step});
        printf("step %d: loss %.4f\n", step, gpt_loss(model));
    }
    gpt_free(model);
    corpus_close(&corpus);
    device_close(device);
    return 0;
}
