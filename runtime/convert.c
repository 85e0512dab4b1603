#include "runtime/convert.h"

#include <string.h>

#include "runtime/error.h"

static float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40); /* keep a NaN a NaN */
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void type_to_float(DataType type, float *to, const void *from, size_t n) {
    switch (type) {
    case TYPE_F32: memcpy(to, from, n * sizeof *to); return;
    case TYPE_F64:
        for (size_t i = 0; i < n; i++) to[i] = (float)((const double *)from)[i];
        return;
    case TYPE_BF16:
        for (size_t i = 0; i < n; i++) to[i] = bf16_to_float(((const uint16_t *)from)[i]);
        return;
    default: error_fatal(__FILE__, __LINE__, "no conversion from %s to float", type_name(type));
    }
}

void type_from_float(DataType type, void *to, const float *from, size_t n) {
    switch (type) {
    case TYPE_F32: memcpy(to, from, n * sizeof *from); return;
    case TYPE_F64:
        for (size_t i = 0; i < n; i++) ((double *)to)[i] = from[i];
        return;
    case TYPE_BF16:
        for (size_t i = 0; i < n; i++) ((uint16_t *)to)[i] = bf16_from_float(from[i]);
        return;
    default: error_fatal(__FILE__, __LINE__, "no conversion from float to %s", type_name(type));
    }
}
