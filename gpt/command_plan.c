/* train_gpt plan: the memory that training would take, before it is taken. */
#include "gpt/commands.h"
#include "gpt/options.h"

bool command_plan(Comm *comm) {
    GptConfig config;
    GptPlan plan;
    Device *device = open_device(comm);
    GptOptions sizes;
    bool good = device && options_model(options_plan, device->type, NULL, &config);
    if (good) sizes = options_gpt(device, &config, GPT_TRAINING);
    good = good && gpt_plan(&config, &sizes, device, &plan);
    if (good) {
        size_t available, total;
        device_memory(device, &available, &total);
        printf("%s: %.1f M parameters, %zu sequences of %zu, %s\n", options.preset,
               1e-6 * (double)gpt_parameters(&config), sizes.B, sizes.T, type_name(sizes.type));
        gpt_plan_print(&plan, stdout);
        printf("  free         %12.1f MiB of %.1f on %s\n", (double)available / 1048576,
               (double)total / 1048576, device->name);
    }
    device_close(device);
    return good;
}
