/* Conversion of host arrays between float and the types that tensors are stored in. */
#ifndef RUNTIME_CONVERT_H
#define RUNTIME_CONVERT_H

#include "runtime/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to[i] = from[i], i < n. The stored type is F32, F64 or BF16 (rounded to nearest even). */
void type_to_float(DataType type, float *to, const void *from, size_t n);
void type_from_float(DataType type, void *to, const float *from, size_t n);

/* IEEE half precision, which files may hold and no device here computes in. Rounds to nearest even;
 * from 65520 on that is infinity. */
void half_to_float(float *to, const uint16_t *from, size_t n);
void half_from_float(uint16_t *to, const float *from, size_t n);

#ifdef __cplusplus
}
#endif
#endif
