/* The tokens of a large text, kept so that the next run need not make them again.
 *
 * They are shards in ~/.cache/tilegpt/KEY, or $XDG_CACHE_HOME/tilegpt/KEY, where KEY is a hash of
 * the text and of the tokenizer: another text or tokenizer has another key, so what is found there
 * is right if it is as it was written, by its hashes. If not, it is made anew, and a line on stderr
 * says so. The folder may be removed at any time. */
#ifndef DATA_TOKEN_CACHE_H
#define DATA_TOKEN_CACHE_H

#include "data/tokenizer.h"
#include "runtime/files.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The pattern of the shards of this plain text, made now if need be; processes that ask at the same
 * time wait for one of them. False with error_message(). */
bool token_cache_find(const char *path, const Tokenizer *tokenizer, char shards[FILE_PATH_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
