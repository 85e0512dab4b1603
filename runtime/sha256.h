/* SHA-256 (FIPS 180-4): names the content of a file so that sha256sum can check it. */
#ifndef RUNTIME_SHA256_H
#define RUNTIME_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHA256_HEX_BYTES 65 /* 64 digits and a 0 */

typedef struct {
    uint32_t state[8];
    uint64_t bytes; /* added so far */
    unsigned char block[64];
} Sha256;

void sha256_begin(Sha256 *hash);
void sha256_add(Sha256 *hash, const void *data, size_t bytes);
void sha256_end(Sha256 *hash, char hex[SHA256_HEX_BYTES]);

/* Of a whole file, whose size *bytes receives. False with error_message(). */
bool sha256_file(const char *path, char hex[SHA256_HEX_BYTES], uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
