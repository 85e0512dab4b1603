/* Texts for the tests of the data path: made ones and TinyShakespeare, a tokenizer learnt from one,
 * and that tokens spell their text. */
#ifndef TEST_TEXT_H
#define TEST_TEXT_H

#include "data/paths.h"
#include "data/tokenizer.h"
#include "runtime/files.h"

/* Random number i of the one sequence. */
uint32_t noise(uint32_t i);

/* Words of few letters, so that pairs repeat, with spaces, line feeds and some é; to be freed. A 0
 * byte follows. */
char *make_text(size_t bytes);

/* The file that $TINYSHAKESPEARE names, else data/tinyshakespeare.txt. If there is none, false, and
 * a line says so. */
bool find_tinyshakespeare(char path[FILE_PATH_BYTES]);

/* The list of this file alone, and what tokenizer_train learns from it. */
Paths one_path(const char *name);
Tokenizer *learn(const char *name, size_t V);

/* The tokens are these bytes, one after the other; and so are those that encoding gives. */
void assert_decodes(const Tokenizer *tokenizer, const int32_t *ids, size_t count, const char *text,
                    size_t bytes);
void assert_round_trip(const Tokenizer *tokenizer, const char *text, size_t bytes);

#endif
