#include "test/bpe_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/random.h"
#include "test/scratch.h"

Tokenizer *load_oracle(void) {
    char directory[FILE_PATH_BYTES];
    in_repository(directory, "test/oracle/bpe");
    Tokenizer *tokenizer = tokenizer_load(directory);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    return tokenizer;
}

static uint64_t draws; /* made so far */

uint32_t draw(uint32_t below) { return (uint32_t)(random_mix(7, draws++) >> 33) % below; }

static size_t random_character(char text[4], bool broken) {
    static const char *const odd[] = {"a ",
                                      "'",
                                      "'",
                                      "s",
                                      "t",
                                      "l",
                                      "r",
                                      "e",
                                      "v",
                                      "m",
                                      "d",
                                      "D",
                                      " ",
                                      " ",
                                      " ",
                                      "\t",
                                      "\n",
                                      "\r",
                                      "\v",
                                      "0",
                                      "9",
                                      "\x7f",
                                      "!",
                                      "\xC2\x85",
                                      "\xC2\xA0",
                                      "\xC2\xAD",
                                      "\xC2\xBD",
                                      "\xCC\x81",
                                      "\xD9\xA3",
                                      "\xE1\x9A\x80",
                                      "\xE1\xA0\x8E",
                                      "\xE2\x80\x82",
                                      "\xE2\x80\x8B",
                                      "\xE2\x80\x8D",
                                      "\xE2\x80\xA8",
                                      "\xE2\x80\xAF",
                                      "\xE2\x85\xA7",
                                      "\xE3\x80\x80",
                                      "\xEF\xBB\xBF",
                                      "\xEF\xBF\xBD",
                                      "\xEF\xBF\xBF"};
    static const uint32_t blocks[][2] = {
        {0, 0x7F},        {0xA0, 0x24F},      {0x300, 0x36F},     {0x400, 0x45F},
        {0x620, 0x64A},   {0x905, 0x939},     {0x4E00, 0x9FA5},   {0xAC00, 0xD7A3},
        {0x2000, 0x2064}, {0x1F300, 0x1F5FF}, {0x1D400, 0x1D454}, {0x1FFFE, 0x1FFFF}};
    if (broken && draw(4) == 0) {
        text[0] = (char)(0x80 + draw(0x80));
        return 1;
    }
    if (draw(2) == 0) {
        const char *character = odd[draw(sizeof odd / sizeof *odd)];
        size_t bytes = strlen(character);
        memcpy(text, character, bytes);
        return bytes;
    }
    const uint32_t *block = blocks[draw(sizeof blocks / sizeof *blocks)];
    return utf8_encode(block[0] + draw(block[1] - block[0] + 1), text);
}

size_t random_text(char *text, size_t characters, bool broken) {
    size_t bytes = 0;
    for (size_t i = 0; i < characters; i++) bytes += random_character(text + bytes, broken);
    return bytes;
}

char *long_text(size_t bytes) {
    char *text = malloc(bytes + 8);
    for (size_t at = 0; at < bytes;) {
        if (draw(20000) == 0)
            for (size_t end = at + draw(100000); at < end && at < bytes; at++) text[at] = 'x';
        else if (draw(3) == 0)
            text[at++] = " \n'"[draw(3)];
        else
            at += random_character(text + at, true);
    }
    return text;
}

int32_t letter_id(char letter) { return letter > ' ' ? letter - '!' : 188 + letter; }

static int32_t find_text(const Merges *merges, const char *text) {
    for (size_t id = 0; id < merges->V; id++)
        if (strcmp(merges->text[id], text) == 0) return (int32_t)id;
    return -1;
}

void make_merges(Merges *merges, const char letters[LETTERS]) {
    memset(merges, 0, sizeof *merges);
    for (int i = 0; i < LETTERS; i++) merges->text[letter_id(letters[i])][0] = letters[i];
    merges->V = 256;
    for (size_t i = 0; i < MERGES;) {
        char both[2 * sizeof merges->text[0]];
        int32_t *pair = merges->pair[i];
        for (int side = 0; side < 2; side++)
            pair[side] = draw(3) ? letter_id(letters[draw(LETTERS)])
                                 : (int32_t)(256 + draw(1 + (uint32_t)merges->V - 256));
        if ((size_t)pair[0] >= merges->V || (size_t)pair[1] >= merges->V) continue;
        snprintf(both, sizeof both, "%s%s", merges->text[pair[0]], merges->text[pair[1]]);
        if (strlen(both) >= sizeof merges->text[0]) continue;
        merges->result[i] = find_text(merges, both);
        if (merges->result[i] < 0) {
            merges->result[i] = (int32_t)merges->V;
            memcpy(merges->text[merges->V++], both, sizeof merges->text[0]);
        }
        i++;
    }
}

Tokenizer *make_tokenizer(const Merges *merges) {
    static const char *const special[] = {"<|endoftext|>"};
    Tokenizer *tokenizer = tokenizer_bpe(merges->pair, MERGES, special, 1);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    assert_string_equal(tokenizer_kind(tokenizer), "bpe");
    assert_int_equal(tokenizer_vocabulary(tokenizer), merges->V + 1);
    return tokenizer;
}
