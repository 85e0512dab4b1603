/* llm.c's model files: private to gpt/. Little-endian:
 *
 *   256 int32   [0] 20240326, [1] 3 for float32 or 5 for bf16, [2] T, [3] V, [4] L, [5] NH, [6] C,
 *               [7] Vp
 *   tensors     each stacked over the layers, (out,in): wte (Vp,C), wpe (T,C), ln_1.weight (L,C),
 *               ln_1.bias, attn.c_attn.weight (L,3C,C), …, mlp.c_proj.bias, ln_f.weight, ln_f.bias
 *
 * The head is tied, the layernorms' epsilon is 1e-5, and rows V … Vp-1 of wte are padding. */
#ifndef GPT_LLMC_H
#define GPT_LLMC_H

#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether a file of this name would be one of llm.c's: it ends in .bin. */
bool llmc_is_name(const char *path);

/* Reads the header and checks the file's size against it; dropout is 0. */
bool llmc_config(const char *path, GptConfig *config);
bool llmc_load(const char *path, Gpt *model);

/* Writes the file, atomically, in "fp32" or "bf16". */
bool llmc_save(const char *path, const Gpt *model, const char *precision);

#ifdef __cplusplus
}
#endif
#endif
