/* What the tests of BPE run on: the tokenizer of the tokenizers library's ids, random texts, random
 * merges. */
#ifndef TEST_BPE_CASE_H
#define TEST_BPE_CASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "data/tokenizer.h"

/* The tokenizer that the library's ids were made with, test/oracle/bpe. */
Tokenizer *load_oracle(void);

/* The next number of the one random sequence, less than `below`. */
uint32_t draw(uint32_t below);

/* That many characters that PCRE2's Unicode classes as this program's does: assigned for long, or
 * known to be never assigned. If `broken`, also bytes that are no UTF-8. The number of bytes. */
size_t random_text(char *text, size_t characters, bool broken);
/* Words with spaces, and sometimes long stretches without. Freed by the caller. */
char *long_text(size_t bytes);

/* GPT-2's order of the bytes: 188 visible ones from '!' on, then the others from 0 on. */
int32_t letter_id(char letter);

enum { LETTERS = 4, MERGES = 300, ID_COUNT = 256 + MERGES };

/* Random merges of some letters and what they make; several may make the same token. */
typedef struct {
    int32_t pair[MERGES][2], result[MERGES];
    char text[ID_COUNT][64];
    size_t V;
} Merges;

void make_merges(Merges *merges, const char letters[LETTERS]);
/* The tokenizer of these merges and <|endoftext|>. */
Tokenizer *make_tokenizer(const Merges *merges);

#endif
