/* The loader's claim that every token of a lap is served exactly once, whatever the number of
 * ranks; its orders, going on, and what it refuses. Token i of the ring is i, so that a token tells
 * its place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <unistd.h>

#include "data/dataset.h"
#include "data/loader.h"
#include "test/counting.h"
#include "test/said.h"
#include "test/scratch.h"

enum { LAPS = 4, MAX_ROWS = 3 * 5, MAX_T = 64 };

static Loader loader_of(const Dataset *dataset, size_t B, size_t T, LoaderOrder order) {
    Loader loader = {.dataset = dataset, .B = B, .T = T, .ranks = 1, .order = order, .seed = 42};
    return loader;
}

/* Serves LAPS laps to all the ranks and counts how often each token is an input. Lap e of the ring
 * is [eN, (e+1)N) of the endless tiling; the window at place p belongs to lap floor(pT/N). */
static void serve(const Dataset *dataset, size_t T, size_t B, size_t ranks, LoaderOrder order) {
    size_t N = dataset_tokens(dataset), rows = ranks * B;
    uint64_t places = (LAPS * N + T - 1) / T, batches = (places + rows - 1) / rows;
    size_t tiled = (batches * rows + N / T + 2) * T + N;
    unsigned char *served = calloc(tiled, 1);
    int32_t tokens[MAX_ROWS * MAX_T], targets[MAX_ROWS * MAX_T];
    int32_t all_tokens[MAX_ROWS * MAX_T], all_targets[MAX_ROWS * MAX_T];
    Loader all = loader_of(dataset, rows, T, order), loader[5];
    for (size_t r = 0; r < ranks; r++) {
        loader[r] = loader_of(dataset, B, T, order);
        loader[r].rank = r;
        loader[r].ranks = ranks;
        assert_true(loader_check(&loader[r]));
    }
    for (uint64_t i = 0; i < batches; i++) {
        for (size_t r = 0; r < ranks; r++)
            assert_true(loader_next(&loader[r], tokens + r * B * T, targets + r * B * T));
        /* One rank with all the rows is served the same. */
        assert_true(loader_next(&all, all_tokens, all_targets));
        assert_memory_equal(tokens, all_tokens, rows * T * sizeof *tokens);
        assert_memory_equal(targets, all_targets, rows * T * sizeof *targets);
        for (size_t row = 0; row < rows; row++) {
            uint64_t place = i * rows + row, start = place * T / N * N + (size_t)tokens[row * T];
            for (size_t t = 0; t < T; t++) {
                assert_int_equal(tokens[row * T + t], (start + t) % N);
                assert_int_equal(targets[row * T + t], (start + t + 1) % N);
                assert_true(start + t < tiled);
                served[start + t]++;
            }
        }
    }
    for (size_t i = 0; i < LAPS * N; i++)
        if (served[i] != 1)
            fail_msg("N %zu T %zu B %zu ranks %zu: token %zu of lap %zu served %d times", N, T, B,
                     ranks, i % N, i / N, served[i]);
    for (size_t i = LAPS * N; i < tiled; i++) assert_true(served[i] <= 1);
    free(served);
}

static void test_exactly_once(void **state) {
    (void)state;
    static const struct {
        size_t N, T;
    } shape[] = {{2, 1}, {7, 1}, {12, 4}, {13, 4}, {65, 64}, {127, 64}, {1000, 7}, {1024, 64}};
    static const size_t ranks[] = {1, 2, 3, 5};
    for (size_t s = 0; s < sizeof shape / sizeof *shape; s++) {
        size_t N = shape[s].N;
        Dataset *dataset = dataset_from_tokens(counting(N, 0), N, N);
        for (size_t r = 0; r < 4; r++)
            for (size_t B = 1; B <= 3; B++) {
                serve(dataset, shape[s].T, B, ranks[r], LOADER_SEQUENTIAL);
                serve(dataset, shape[s].T, B, ranks[r], LOADER_SHUFFLED);
            }
        dataset_close(dataset);
    }
}

static void test_resume(void **state) {
    (void)state;
    Dataset *dataset = dataset_from_tokens(counting(1000, 0), 1000, 1000);
    Loader going_on = loader_of(dataset, 3, 7, LOADER_SHUFFLED), resumed = going_on;
    int32_t tokens[2][21], targets[2][21];
    resumed.next = 95;
    for (uint64_t i = 0; i < 300; i++) {
        assert_int_equal(going_on.next, i);
        assert_true(loader_next(&going_on, tokens[0], targets[0]));
        if (i < 95) continue;
        assert_true(loader_next(&resumed, tokens[1], targets[1]));
        assert_memory_equal(tokens[0], tokens[1], sizeof tokens[0]);
        assert_memory_equal(targets[0], targets[1], sizeof targets[0]);
    }
    dataset_close(dataset);
}

static size_t differing(const uint64_t *a, const uint64_t *b, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += a[i] != b[i];
    return count;
}

static void test_order(void **state) {
    (void)state;
    enum { N = 1000, T = 5, W = N / T }; /* T divides N: each lap has the same windows */
    Dataset *dataset = dataset_from_tokens(counting(N, 0), N, N);
    Loader sequential = loader_of(dataset, 1, T, LOADER_SEQUENTIAL);
    Loader shuffled = loader_of(dataset, 1, T, LOADER_SHUFFLED), seeded = shuffled;
    seeded.seed++;
    uint64_t in_order[W], lap0[W], lap1[W], other_seed[W];
    for (size_t p = 0; p < W; p++) {
        in_order[p] = loader_window(&sequential, p);
        assert_int_equal(in_order[p], p * T);
        lap0[p] = loader_window(&shuffled, p);
        lap1[p] = loader_window(&shuffled, p + W);
        other_seed[p] = loader_window(&seeded, p);
    }
    /* Two random orders of 200 agree in 1 place on average, in more than 20 never. */
    assert_true(differing(in_order, lap0, W) > W - 20);
    assert_true(differing(lap0, lap1, W) > W - 20);
    assert_true(differing(lap0, other_seed, W) > W - 20);
    dataset_close(dataset);

    /* Where T does not divide N, the next lap cuts the text at other places. */
    dataset = dataset_from_tokens(counting(13, 0), 13, 13);
    Loader uneven = loader_of(dataset, 1, 4, LOADER_SEQUENTIAL);
    static const uint64_t starts[] = {0, 4, 8, 12, 3, 7, 11, 2};
    for (uint64_t p = 0; p < 8; p++) assert_int_equal(loader_window(&uneven, p), starts[p]);
    /* Far along the order, where a place times T does not fit 64 bits. */
    uint64_t far = (uint64_t)1 << 63;
    assert_int_equal(loader_window(&uneven, far), far % 13 * 4 % 13);
    uneven.order = LOADER_SHUFFLED;
    assert_true(loader_window(&uneven, far) < 13);
    dataset_close(dataset);
}

static void test_loader_refuses(void **state) {
    (void)state;
    Dataset *dataset = dataset_from_tokens(counting(10, 0), 10, 10);
    Loader loader = loader_of(dataset, 1, 10, LOADER_SHUFFLED);
    assert_false(loader_check(&loader));
    assert_said("has 10 tokens");
    assert_said("T + 1 = 11");
    assert_said("largest T that fits is 9");
    loader.T = 9;
    assert_true(loader_check(&loader));
    loader.rank = 1;
    assert_false(loader_check(&loader));
    dataset_close(dataset);

    /* A read that fails leaves the batch to be asked for again. */
    make_directory("cut");
    put_shard("cut/a.bin", 10, 0);
    dataset = dataset_from_shards("cut", 10, /*scan=*/true);
    assert_int_equal(truncate("cut/a.bin", 1024 + 8), 0);
    loader = loader_of(dataset, 1, 4, LOADER_SEQUENTIAL);
    int32_t tokens[4], targets[4];
    assert_false(loader_next(&loader, tokens, targets));
    assert_said("cut/a.bin");
    assert_int_equal(loader.next, 0);
    dataset_close(dataset);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exactly_once),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_loader_refuses),
    };
    return cmocka_run_group_tests_name("loader", tests, enter_scratch, leave_scratch);
}
