/* The tensors of a model in safetensors files: private to gpt/. */
#ifndef GPT_TENSORS_FILE_H
#define GPT_TENSORS_FILE_H

#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A buffer for any one tensor of the model, to be freed; NULL with error_message(). */
float *tensors_buffer(const Gpt *model);

/* Writes the parameters, as "F32", "F16" or "BF16", under Hugging Face's names. False with
 * error_message(), and no file, if the disk is full or a value is beyond F16. */
bool tensors_save_model(const char *path, const Gpt *model, const char *dtype);
/* Writes the optimizer: m.NAME and v.NAME, F32. */
bool tensors_save_optimizer(const char *path, const Gpt *model);

/* Reads the parameters from a file, or from the files of an index: see checkpoint_load. */
bool tensors_load_model(const char *path, Gpt *model);
bool tensors_load_optimizer(const char *path, Gpt *model);

#ifdef __cplusplus
}
#endif
#endif
