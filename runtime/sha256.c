#include "runtime/sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/error.h"

/* The first 32 bits of the fractions of the cube roots of the first 64 primes (section 4.2.2). */
static const uint32_t constant[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void compress(uint32_t state[8], const unsigned char *block) {
    uint32_t w[64];
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16 |
               (uint32_t)block[4 * t + 2] << 8 | block[4 * t + 3];
    for (int t = 16; t < 64; t++) {
        uint32_t s0 = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t s1 = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; t++) {
        uint32_t t1 = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) +
                      constant[t] + w[t];
        uint32_t t2 =
            (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1;
        d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

void sha256_begin(Sha256 *hash) {
    /* Of the square roots of the first 8 primes (section 5.3.3). */
    *hash = (Sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                               0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void sha256_add(Sha256 *hash, const void *data, size_t bytes) {
    const unsigned char *next = data;
    while (bytes > 0) {
        size_t held = hash->bytes % 64, piece = bytes < 64 - held ? bytes : 64 - held;
        if (piece < 64) memcpy(hash->block + held, next, piece);
        hash->bytes += piece;
        if (held + piece == 64) compress(hash->state, piece < 64 ? hash->block : next);
        next += piece;
        bytes -= piece;
    }
}

void sha256_end(Sha256 *hash, char hex[SHA256_HEX_BYTES]) {
    uint64_t bits = 8 * hash->bytes;
    /* A one, zeros, and the length in the last 8 bytes of a block. */
    unsigned char padding[72] = {0x80};
    size_t zeros = (119 - hash->bytes % 64) % 64;
    for (int i = 0; i < 8; i++) padding[1 + zeros + i] = (unsigned char)(bits >> (56 - 8 * i));
    sha256_add(hash, padding, 1 + zeros + 8);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", (unsigned)hash->state[i]);
}

bool sha256_file(const char *path, char hex[SHA256_HEX_BYTES], uint64_t *bytes) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return error_set("%s: cannot be opened: %s", path, strerror(errno));
    Sha256 hash;
    sha256_begin(&hash);
    unsigned char piece[1 << 16];
    ssize_t n;
    while ((n = read(file, piece, sizeof piece)) > 0 || (n < 0 && errno == EINTR))
        if (n > 0) sha256_add(&hash, piece, (size_t)n);
    bool good = n == 0 || error_set("%s: cannot be read: %s", path, strerror(errno));
    close(file);
    *bytes = hash.bytes;
    sha256_end(&hash, hex);
    return good;
}
