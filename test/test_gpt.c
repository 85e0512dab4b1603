/* The whole model: gradients by central differences in double, what recomputation, accumulation and
 * resuming must leave unchanged, and the plan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpt/checkpoint.h"
#include "gpt/evaluate.h"
#include "gpt/schedule.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "test/compare.h"
#include "test/model.h"
#include "test/said.h"
#include "test/scratch.h"

/* Sizes that share no factor, a head size that is no power of two. */
static const GptConfig small = {2, 3, 21, 9, 11, 1e-5f, 0, 0, 0, false};
enum { B = 2, T = 7, N = B * T };

static const int32_t tokens[N] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7};
static const int32_t targets[N] = {1, 4, 1, 5, 9, 2, -1, 5, 3, 5, 8, 9, 7, 10};
static const AdamW adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 1};

static Device *device;

static Gpt *make(GptConfig config, DataType type, AttentionFamily attention,
                 GptRecompute recompute) {
    GptOptions options = {B, T, type, GPT_TRAINING, attention, recompute, true};
    Gpt *model = create_model(&config, &options, device);
    gpt_init(model, 7);
    return model;
}

static void step(Gpt *model, uint64_t number) {
    AdamW a = adamw;
    a.step = number;
    gpt_zero_gradients(model);
    gpt_set_training(model, 1, random_mix(5, number), true);
    gpt_forward(model, tokens, targets, B, T, GPT_TRAIN);
    gpt_backward(model);
    gpt_update(model, a);
}

static double loss_of(Gpt *model) {
    gpt_zero_gradients(model);
    gpt_forward(model, tokens, targets, B, T, GPT_TRAIN);
    return gpt_loss(model);
}

/* Some parameters of every tensor. */
static void check_gradients(GptConfig config, AttentionFamily attention, GptRecompute recompute) {
    Gpt *model = make(config, TYPE_F64, attention, recompute);
    double sum = 0, reference = 0;
    randomize(model);
    gpt_set_training(model, 1, 99, true);
    for (size_t i = 0; i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        double *values = malloc(tensor->elements * sizeof *values);
        double *gradient = malloc(tensor->elements * sizeof *gradient);
        gpt_read_double(model, GPT_PARAMETERS, tensor, values);
        loss_of(model);
        gpt_backward(model);
        gpt_read_double(model, GPT_GRADIENTS, tensor, gradient);
        for (size_t j = 0; j < tensor->elements; j += 1 + tensor->elements / 40) {
            /* A difference errs by h² of curvature and 1e-16/h of rounding: both near 1e-10. */
            double h = 1e-5, kept = values[j];
            values[j] = kept + h;
            gpt_write_double(model, GPT_PARAMETERS, tensor, values);
            double up = loss_of(model);
            values[j] = kept - h;
            gpt_write_double(model, GPT_PARAMETERS, tensor, values);
            double numeric = (up - loss_of(model)) / (2 * h);
            values[j] = kept;
            gpt_write_double(model, GPT_PARAMETERS, tensor, values);
            sum += (numeric - gradient[j]) * (numeric - gradient[j]);
            reference += numeric * numeric;
        }
        free(values);
        free(gradient);
    }
    gpt_free(model);
    assert_true(compare("whole model, gradient against differences", sqrt(sum / reference), 1e-6));
}

static void gradients_are_those_of_the_loss(void **state) {
    (void)state;
    check_gradients(small, ATTENTION_NAIVE, RECOMPUTE_NONE);
    check_gradients(small, ATTENTION_FLASH_V1, RECOMPUTE_NONE);
}

static void gradients_with_dropout(void **state) {
    (void)state;
    GptConfig config = small;
    config.embedding_dropout = 0.1f, config.residual_dropout = 0.2f,
    config.attention_dropout = 0.3f;
    check_gradients(config, ATTENTION_FLASH_V1, RECOMPUTE_NONE);
    check_gradients(config, ATTENTION_NAIVE, RECOMPUTE_BLOCK);
}

/* The token embedding's gradient is then the lookup's alone, and the head's its own. */
static void gradients_of_an_untied_head(void **state) {
    (void)state;
    GptConfig config = small;
    config.untied_head = true;
    assert_int_equal(gpt_parameters(&config), gpt_parameters(&small) + small.V * small.C);
    check_gradients(config, ATTENTION_FLASH_V1, RECOMPUTE_NONE);

    /* Training moves it, and resuming is left to the table that it is part of. */
    Gpt *model = make(config, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    Gpt *untouched = make(config, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    const GptTensor *head = gpt_tensor(model, gpt_tensors(model) - 1);
    float before[11 * 21], after[11 * 21];
    assert_string_equal(head->name, "lm_head.weight");
    step(model, 1);
    gpt_read(untouched, GPT_PARAMETERS, head, before);
    gpt_read(model, GPT_PARAMETERS, head, after);
    assert_memory_not_equal(before, after, sizeof before);
    gpt_free(model);
    gpt_free(untouched);
}

static void recomputation_changes_no_bit(void **state) {
    (void)state;
    GptConfig config = small;
    config.L = 3;
    config.residual_dropout = config.attention_dropout = 0.25f;
    Gpt *kept = make(config, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    for (uint64_t i = 1; i <= 3; i++) step(kept, i);
    for (GptRecompute recompute = RECOMPUTE_GELU; recompute < RECOMPUTE_KINDS; recompute++) {
        Gpt *other = make(config, TYPE_F32, ATTENTION_AUTO, recompute);
        for (uint64_t i = 1; i <= 3; i++) step(other, i);
        assert_true(same_arena(kept, other, GPT_PARAMETERS));
        assert_true(gpt_planned(other)->activations < gpt_planned(kept)->activations);
        step(other, 4);
        assert_false(same_arena(kept, other, GPT_PARAMETERS));
        gpt_free(other);
    }
    gpt_free(kept);
}

/* Two halves of a batch, accumulated, give the gradient of the whole. */
static void accumulation_equals_a_larger_batch(void **state) {
    (void)state;
    int32_t dense[N];
    for (int i = 0; i < N; i++) dense[i] = targets[i] < 0 ? 0 : targets[i];
    Gpt *whole = make(small, TYPE_F64, ATTENTION_AUTO, RECOMPUTE_NONE);
    Gpt *halves = make(small, TYPE_F64, ATTENTION_AUTO, RECOMPUTE_NONE);
    gpt_zero_gradients(whole);
    gpt_forward(whole, tokens, dense, 2, T, GPT_TRAIN);
    gpt_backward(whole);
    gpt_zero_gradients(halves);
    for (int half = 0; half < 2; half++) {
        gpt_set_training(halves, 0.5f, 0, half == 1);
        gpt_forward(halves, tokens + half * T, dense + half * T, 1, T, GPT_TRAIN);
        gpt_backward(halves);
    }
    /* Sums in another order, in double. */
    assert_true(compare("loss of two halves", fabs(gpt_loss(whole) / gpt_loss(halves) - 1), 1e-12));
    for (size_t i = 0; i < gpt_tensors(whole); i++) {
        const GptTensor *tensor = gpt_tensor(whole, i);
        double *x = malloc(tensor->elements * sizeof *x), *y = malloc(tensor->elements * sizeof *y);
        gpt_read_double(whole, GPT_GRADIENTS, tensor, x);
        gpt_read_double(halves, GPT_GRADIENTS, tensor, y);
        assert_true(relative_error(y, x, tensor->elements) <= 1e-10);
        free(x);
        free(y);
    }
    gpt_free(whole);
    gpt_free(halves);
}

/* Four steps equal two, a checkpoint, another model, two more: bit for bit. */
static void resuming_changes_no_bit(void **state) {
    (void)state;
    Gpt *straight = make(small, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    Gpt *first = make(small, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    Gpt *second = make(small, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    for (uint64_t i = 1; i <= 4; i++) step(straight, i);
    for (uint64_t i = 1; i <= 2; i++) step(first, i);
    TrainerState saved = {2, 7, INFINITY, 28, 3}, loaded;
    assert_true(checkpoint_save("last", first, &saved, NULL, NULL));
    step(second, 1); /* so that what is not restored shows */
    assert_true(checkpoint_load("last", second));
    assert_true(checkpoint_resume("last", second, &loaded));
    assert_memory_equal(&saved, &loaded, sizeof saved);
    for (uint64_t i = loaded.step + 1; i <= 4; i++) step(second, i);
    assert_true(same_arena(straight, second, GPT_PARAMETERS));
    assert_false(same_arena(straight, first, GPT_PARAMETERS));
    gpt_free(straight);
    gpt_free(first);
    gpt_free(second);
}

static void a_bad_step_leaves_the_parameters(void **state) {
    (void)state;
    Gpt *model = make(small, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    Gpt *untouched = make(small, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    gpt_zero_gradients(model);
    gpt_set_training(model, NAN, 0, true);
    gpt_forward(model, tokens, targets, B, T, GPT_TRAIN);
    gpt_backward(model);
    gpt_update(model, adamw);
    assert_true(isnan(gpt_gradient_norm(model)));
    assert_true(same_arena(model, untouched, GPT_PARAMETERS));
    gpt_free(model);
    gpt_free(untouched);
}

/* Every token but the first is predicted once, whatever the batch and the window. */
static void evaluation_covers_the_data(void **state) {
    (void)state;
    Gpt *model = make(small, TYPE_F32, ATTENTION_AUTO, RECOMPUTE_NONE);
    int32_t *copy = malloc(sizeof tokens);
    memcpy(copy, tokens, sizeof tokens);
    Dataset *dataset = dataset_from_tokens(copy, N, small.V);
    double loss, expected = 0;
    size_t predictions;
    assert_true(gpt_evaluate(model, NULL, dataset, 5, 0, &loss, &predictions));
    assert_int_equal(predictions, N - 1);
    for (size_t start = 0; start < N - 1; start += 5) {
        size_t n = N - 1 - start < 5 ? N - 1 - start : 5;
        gpt_forward(model, tokens + start, tokens + start + 1, 1, n, GPT_EVALUATE);
        expected += gpt_loss(model) * (double)n;
    }
    /* float losses, averaged in another order. */
    assert_true(compare("evaluation", fabs(loss / (expected / (N - 1)) - 1), 1e-6));
    assert_true(gpt_evaluate(model, NULL, dataset, 5, 6, &loss, &predictions));
    assert_int_equal(predictions, 6);
    dataset_close(dataset);
    gpt_free(model);
}

static void schedules_begin_and_end_right(void **state) {
    (void)state;
    Schedule s = {SCHEDULE_COSINE, 1.0, 0.1, 10, 110};
    assert_true(schedule_lr(&s, 0) > 0 && schedule_lr(&s, 0) < 0.1);
    assert_true(fabs(schedule_lr(&s, 10) - 1.0) < 1e-12);
    assert_true(fabs(schedule_lr(&s, 60) - 0.55) < 1e-12);
    assert_true(fabs(schedule_lr(&s, 110) - 0.1) < 1e-12);
    s.kind = SCHEDULE_LINEAR;
    assert_true(fabs(schedule_lr(&s, 35) - 0.775) < 1e-12);
    s.kind = SCHEDULE_CONSTANT;
    assert_true(schedule_lr(&s, 109) == 1.0);
    s = (Schedule){SCHEDULE_COSINE, 1.0, 0.1, 0, 1};
    assert_true(isfinite(schedule_lr(&s, 0)));
}

static void bad_models_are_refused(void **state) {
    (void)state;
    GptConfig bad[] = {small, small, small, small, small, small};
    bad[0].C = 20, bad[1].NH = 0, bad[2].V = 0, bad[3].L = 0, bad[4].C = 257 * 3,
    bad[5].residual_dropout = NAN;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        error_set("none");
        assert_false(gpt_config_check(&bad[i]));
        assert_string_not_equal(error_message(), "none");
    }
    GptOptions options = {B,   small.T + 1, TYPE_F32, GPT_TRAINING, ATTENTION_AUTO, RECOMPUTE_NONE,
                          true};
    assert_null(gpt_create(&small, &options, device, NULL));
    options.T = T, options.B = (size_t)1 << 28;
    assert_null(gpt_create(&small, &options, device, NULL));
    assert_said("would fit");
    /* Sizes whose bytes would wrap. */
    GptConfig huge = {4096, 8, 2048, (size_t)1 << 24, 256, 1e-5f, 0, 0, 0, false};
    options.T = huge.T, options.B = (size_t)1 << 14;
    GptPlan plan;
    assert_false(gpt_plan(&huge, &options, device, &plan));
    assert_said("PiB");
    huge.C = 1000000000, huge.NH = 2;
    assert_false(gpt_config_check(&huge));
    assert_said("must be 1 to 1048576");
    GptConfig preset;
    assert_false(gpt_preset("gpt5", &preset));
    assert_true(gpt_preset("gpt2-124M", &preset));
    assert_int_equal(gpt_parameters(&preset), 124439808); /* Hugging Face's count */
}

/* What is allocated is what was planned. */
static void the_plan_is_kept(void **state) {
    (void)state;
    Device *fresh = device_open(DEVICE_CPU, 0);
    GptConfig config = {2, 2, 64, 128, 300, 1e-5f, 0.1f, 0.1f, 0.1f, false};
    GptOptions options = {4, 128, TYPE_F32, GPT_TRAINING, ATTENTION_AUTO, RECOMPUTE_NONE, false};
    Gpt *model = create_model(&config, &options, fresh);
    double planned = (double)gpt_planned(model)->total;
    /* Nothing but rounding each arena up to the allocator's alignment. */
    assert_true(compare("planned against allocated",
                        (double)device_peak_allocated(fresh) / planned - 1, 1e-3));
    assert_true((double)device_peak_allocated(fresh) >= planned);
    gpt_free(model);
    device_close(fresh);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_plan_is_kept),
        cmocka_unit_test(gradients_are_those_of_the_loss),
        cmocka_unit_test(gradients_with_dropout),
        cmocka_unit_test(gradients_of_an_untied_head),
        cmocka_unit_test(recomputation_changes_no_bit),
        cmocka_unit_test(accumulation_equals_a_larger_batch),
        cmocka_unit_test(resuming_changes_no_bit),
        cmocka_unit_test(a_bad_step_leaves_the_parameters),
        cmocka_unit_test(evaluation_covers_the_data),
        cmocka_unit_test(schedules_begin_and_end_right),
        cmocka_unit_test(bad_models_are_refused),
    };
    device = device_open(DEVICE_CPU, 0);
    int failed = cmocka_run_group_tests(tests, enter_scratch, leave_scratch);
    device_close(device);
    return failed;
}
