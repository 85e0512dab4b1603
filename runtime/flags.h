/* Command-line options from one table: parsing, types, ranges, defaults, --help and the record of
 * a run all come from it. Syntax: --name=value or --name value; a boolean is --name or
 * --name=true|false; a list takes all words up to the next option, and may be given again:
 * --name=value value --name value. */
#ifndef RUNTIME_FLAGS_H
#define RUNTIME_FLAGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A STRING is one line; a TEXT may have line breaks, and is not recorded. */
typedef enum {
    FLAG_INT,
    FLAG_FLOAT,
    FLAG_BOOL,
    FLAG_STRING,
    FLAG_TEXT,
    FLAG_CHOICE,
    FLAG_LIST
} FlagType;

/* A list's value; all zeros is an empty one. Its memory is the program's. */
typedef struct {
    const char **word; /* (count) */
    size_t count;
} FlagList;

/* One option. `value` points to int64_t, double, bool, const char * (STRING, TEXT, CHOICE) or FlagList
 * and holds the default when parsing starts. */
typedef struct {
    const char *name; /* without the dashes; NULL ends the table */
    FlagType type;
    void *value;
    double minimum, maximum; /* INT and FLOAT: inclusive range */
    const char *choices;     /* CHOICE: "auto|cpu|cuda" */
    const char *help;        /* one line, with the unit */
    bool given;              /* out: set on the command line (or by flags_set) */
} Flag;

/* Parses argv[0..argc). False with error_message() on an unknown option (naming the nearest one), a
 * malformed or out-of-range value, or a stray word. Strings are not copied. */
bool flags_parse(Flag *flags, int argc, char **argv);
/* The option of this name; NULL if there is none. */
Flag *flags_find(Flag *flags, const char *name);
/* Sets one option from text with the same checks, as a preset or a recorded run does. The text is
 * copied if it must be kept. */
bool flags_set(Flag *flags, const char *name, const char *text);
/* The table for --help, defaults included. */
void flags_print_help(const Flag *flags, FILE *file);
/* One "name=value" a line, every option but a TEXT, in a form that flags_set reads back exactly. */
void flags_print_values(const Flag *flags, FILE *file);
/* The value of one option as text, in the same form. */
void flags_format(const Flag *flag, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
