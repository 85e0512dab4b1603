#include "runtime/convert.h"

#include <math.h>
#include <string.h>

#include "runtime/error.h"

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float bf16_to_float(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

static uint16_t bf16_from_float(float value) {
    uint32_t bits = bits_of_float(value);
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

void half_to_float(float *to, const uint16_t *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16, exponent = from[i] >> 10 & 31,
                 mantissa = from[i] & 1023;
        if (exponent == 31)
            to[i] = float_of_bits(sign | 0x7F800000u | mantissa << 13);
        else if (exponent > 0)
            to[i] = float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
        else
            to[i] = copysignf((float)mantissa * 0x1p-24f, float_of_bits(sign));
    }
}

void half_from_float(uint16_t *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of_float(from[i]), magnitude = bits & 0x7FFFFFFF, half;
        if (magnitude > 0x7F800000)
            half = 0x7E00; /* NaN */
        else if (magnitude >= 0x477FF000)
            half = 0x7C00; /* 65520, halfway between the largest half and 2^16 */
        else if (magnitude < 0x38800000)
            /* Below 2^-14 halves are multiples of 2^-24, as floats from 0.5 on are. */
            half = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
        else
            half = ((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
        to[i] = (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)half;
    }
}
