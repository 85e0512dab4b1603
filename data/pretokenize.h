/* GPT-2's pre-tokenizer: text to words, the pieces that BPE never joins. The pattern (Radford et
 * al. 2019, encoder.py) is
 *
 *   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * whose matches follow each other without gaps.
 *
 * Bytes that are not UTF-8 are each taken as a character that is neither space, letter nor number,
 * so a text with such bytes is split as the text in which U+FFFD stands for each. */
#ifndef DATA_PRETOKENIZE_H
#define DATA_PRETOKENIZE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The length of the first word of text[0..bytes), bytes > 0: from 1 to bytes. */
size_t pretokenize_word(const char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
