/* Parsing, checking and printing of the options in one table. */
#include "runtime/flags.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

#define NAME_BYTES 64
#define SHOWN_BYTES 60 /* of a value that is refused */

/* Levenshtein's distance (1966) between two names, row by row. Longer names are cut. */
static size_t edit_distance(const char *a, const char *b) {
    size_t row[NAME_BYTES + 1];
    size_t length = strnlen(b, NAME_BYTES);
    for (size_t j = 0; j <= length; j++) row[j] = j;
    for (size_t i = 0; a[i] && i < NAME_BYTES; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 1; j <= length; j++) {
            size_t replace = diagonal + (a[i] != b[j - 1]);
            diagonal = row[j];
            size_t best = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            row[j] = replace < best ? replace : best;
        }
    }
    return row[length];
}

Flag *flags_find(Flag *flags, const char *name) {
    for (Flag *flag = flags; flag->name; flag++)
        if (strcmp(flag->name, name) == 0) return flag;
    return NULL;
}

/* `written` is what the user typed, `name` the same without dashes and value. */
static bool unknown(const Flag *flags, const char *written, const char *name) {
    const char *nearest = NULL;
    size_t nearest_distance = 2 + strlen(name) / 4; /* farther ones are no help */
    for (const Flag *flag = flags; flag->name; flag++) {
        size_t distance = edit_distance(name, flag->name);
        if (distance >= nearest_distance) continue;
        nearest = flag->name;
        nearest_distance = distance;
    }
    if (nearest) return error_set("unknown option %s; did you mean --%s?", written, nearest);
    return error_set("unknown option %s; --help lists the options", written);
}

/* "expected a whole number from 1 to 8", with the ends left out that do not limit. */
static bool refuse(const Flag *flag, const char *text) {
    char low[48] = "", high[48] = "";
    const char *kind = "";
    bool number = flag->type == FLAG_INT || flag->type == FLAG_FLOAT;
    double limit = flag->type == FLAG_INT ? 9.2e18 : 1.7e308;
    if (number && flag->minimum > -limit) snprintf(low, sizeof low, " from %.10g", flag->minimum);
    if (number && flag->maximum < limit)
        snprintf(high, sizeof high, " %s %.10g", low[0] ? "to" : "up to", flag->maximum);
    else if (low[0])
        snprintf(high, sizeof high, " upwards");
    switch (flag->type) {
    case FLAG_INT: kind = "a whole number"; break;
    case FLAG_FLOAT: kind = "a number"; break;
    case FLAG_BOOL: kind = "true or false"; break;
    case FLAG_STRING:
    case FLAG_TEXT:
    case FLAG_LIST: kind = "one line of text"; break;
    case FLAG_CHOICE: kind = flag->choices; break;
    }
    size_t shown = strcspn(text, "\r\n"); /* a sentence is one line, and can be read */
    if (shown > SHOWN_BYTES) shown = SHOWN_BYTES;
    return error_set("--%s=%.*s%s: expected %s%s%s", flag->name, (int)shown, text,
                     text[shown] ? "…" : "", kind, low, high);
}

static bool is_choice(const char *choices, const char *text) {
    size_t length = strlen(text);
    for (const char *choice = choices; *choice;) {
        size_t choice_length = strcspn(choice, "|");
        if (choice_length == length && memcmp(choice, text, length) == 0) return true;
        choice += choice_length + (choice[choice_length] == '|');
    }
    return false;
}

static void append(FlagList *list, const char *word) {
    const char **words = realloc(list->word, (list->count + 1) * sizeof *words);
    if (!words) error_fatal(__FILE__, __LINE__, "no memory for %zu words", list->count + 1);
    list->word = words;
    list->word[list->count++] = word;
}

/* strtoll and strtod skip white space and stop at what they cannot read: neither is a number here.
 * A NaN is in no range. */
static bool set(Flag *flag, const char *text) {
    char *end;
    bool blank = *text == '\0' || isspace((unsigned char)*text);
    errno = 0;
    switch (flag->type) {
    case FLAG_INT: {
        long long value = strtoll(text, &end, 10);
        if (blank || *end || errno == ERANGE) return refuse(flag, text);
        if ((double)value < flag->minimum || (double)value > flag->maximum)
            return refuse(flag, text);
        *(int64_t *)flag->value = value;
        break;
    }
    case FLAG_FLOAT: {
        double value = strtod(text, &end);
        if (blank || *end || (errno == ERANGE && isinf(value))) return refuse(flag, text);
        if (!(value >= flag->minimum && value <= flag->maximum)) return refuse(flag, text);
        *(double *)flag->value = value;
        break;
    }
    case FLAG_BOOL: {
        bool value = strcmp(text, "true") == 0;
        if (!value && strcmp(text, "false") != 0) return refuse(flag, text);
        *(bool *)flag->value = value;
        break;
    }
    case FLAG_CHOICE:
        if (!is_choice(flag->choices, text)) return refuse(flag, text);
        *(const char **)flag->value = text;
        break;
    case FLAG_STRING: /* a line break would end the value where it is recorded */
        if (strpbrk(text, "\r\n")) return refuse(flag, text);
        *(const char **)flag->value = text;
        break;
    case FLAG_TEXT: *(const char **)flag->value = text; break;
    case FLAG_LIST:
        if (!*text || strpbrk(text, "\r\n")) return refuse(flag, text);
        append(flag->value, text);
        break;
    }
    flag->given = true;
    return true;
}

bool flags_parse(Flag *flags, int argc, char **argv) {
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i];
        size_t dashes = strspn(word, "-");
        if (dashes == 0)
            return error_set("stray word \"%s\": options are written --name=value", word);
        char name[NAME_BYTES];
        const char *equals = strchr(word, '=');
        int length = equals ? (int)(equals - word) : (int)strlen(word);
        snprintf(name, sizeof name, "%.*s", length - (int)dashes, word + dashes);
        Flag *flag = dashes == 2 ? flags_find(flags, name) : NULL;
        if (!flag) return unknown(flags, word, name);

        const char *value = equals ? equals + 1 : NULL;
        if (!value && flag->type == FLAG_BOOL) value = "true";
        if (!value && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) value = argv[++i];
        if (!value)
            return error_set("--%s needs a value: --%s=%s (%s)", name, name,
                             flag->type == FLAG_CHOICE ? flag->choices : "VALUE", flag->help);
        if (!set(flag, value)) return false;
        while (flag->type == FLAG_LIST && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0)
            if (!set(flag, argv[++i])) return false;
    }
    return true;
}

/* The program's own copy of a text. Equal texts share one, so setting options over and over does
 * not take more and more memory. */
static const char *keep(const char *text) {
    static struct Kept {
        struct Kept *next;
        char text[];
    } * kept;
    for (struct Kept *one = kept; one; one = one->next)
        if (strcmp(one->text, text) == 0) return one->text;
    size_t bytes = strlen(text) + 1;
    struct Kept *one = malloc(sizeof *one + bytes);
    if (!one) error_fatal(__FILE__, __LINE__, "malloc of %zu bytes failed", sizeof *one + bytes);
    one->next = kept;
    memcpy(one->text, text, bytes);
    kept = one;
    return one->text;
}

bool flags_set(Flag *flags, const char *name, const char *text) {
    Flag *flag = flags_find(flags, name);
    if (!flag) return unknown(flags, name, name);
    bool is_text = flag->type != FLAG_INT && flag->type != FLAG_FLOAT && flag->type != FLAG_BOOL;
    return set(flag, is_text ? keep(text) : text);
}

void flags_format(const Flag *flag, char *text, size_t bytes) {
    switch (flag->type) {
    case FLAG_INT: snprintf(text, bytes, "%lld", (long long)*(const int64_t *)flag->value); break;
    case FLAG_FLOAT: { /* the fewest digits that give the value back; 17 always do */
        double value = *(const double *)flag->value;
        char digits[32];
        int precision = 6;
        do snprintf(digits, sizeof digits, "%.*g", precision, value);
        while (strtod(digits, NULL) != value && precision++ < 17);
        snprintf(text, bytes, "%s", digits);
        break;
    }
    case FLAG_BOOL:
        snprintf(text, bytes, "%s", *(const bool *)flag->value ? "true" : "false");
        break;
    case FLAG_STRING:
    case FLAG_TEXT:
    case FLAG_CHOICE: {
        const char *value = *(const char *const *)flag->value;
        snprintf(text, bytes, "%s", value ? value : "");
        break;
    }
    case FLAG_LIST: { /* the words, for reading */
        const FlagList *list = flag->value;
        text[0] = '\0';
        for (size_t i = 0, used = 0; i < list->count && used < bytes; i++)
            used +=
                (size_t)snprintf(text + used, bytes - used, "%s%s", i ? " " : "", list->word[i]);
        break;
    }
    }
}

void flags_print_values(const Flag *flags, FILE *file) {
    for (const Flag *flag = flags; flag->name; flag++) {
        if (flag->type == FLAG_TEXT) continue;
        if (flag->type == FLAG_STRING) { /* of any length */
            const char *text = *(const char *const *)flag->value;
            fprintf(file, "%s=%s\n", flag->name, text ? text : "");
            continue;
        }
        char text[64];
        flags_format(flag, text, sizeof text);
        fprintf(file, "%s=%s\n", flag->name, text);
    }
}

/* "--name=KIND" as --help shows it; returns its length. */
static int format_usage(const Flag *flag, char *text, size_t bytes) {
    static const char *const kinds[] = {[FLAG_INT] = "INT",
                                        [FLAG_FLOAT] = "NUMBER",
                                        [FLAG_STRING] = "TEXT",
                                        [FLAG_TEXT] = "TEXT",
                                        [FLAG_LIST] = "FILES"};
    if (flag->type == FLAG_BOOL) return snprintf(text, bytes, "--%s", flag->name);
    return snprintf(text, bytes, "--%s=%s", flag->name,
                    flag->type == FLAG_CHOICE ? flag->choices : kinds[flag->type]);
}

void flags_print_help(const Flag *flags, FILE *file) {
    const int widest = 32; /* longer options push their own help to the next line */
    int column = 0;
    for (const Flag *flag = flags; flag->name; flag++) {
        int width = format_usage(flag, NULL, 0);
        if (width > column && width <= widest) column = width;
    }
    for (const Flag *flag = flags; flag->name; flag++) {
        char usage[256], value[256];
        int width = format_usage(flag, usage, sizeof usage);
        fprintf(file, "  %-*s  ", column, usage);
        if (width > column) fprintf(file, "\n  %-*s  ", column, "");
        flags_format(flag, value, sizeof value);
        if (value[0])
            fprintf(file, "%s [%s]\n", flag->help, value);
        else
            fprintf(file, "%s\n", flag->help);
    }
}
