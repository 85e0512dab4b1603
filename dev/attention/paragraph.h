/* Running text in a program's output: wrapped, so that the source may break its lines anywhere. */
#ifndef DEV_ATTENTION_PARAGRAPH_H
#define DEV_ATTENTION_PARAGRAPH_H

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Prints the label and the text after it, in lines of at most 96 columns indented by the label's
 * width. A word is at most 96 columns; the text, in ASCII, at most 2047. */
__attribute__((format(printf, 2, 3))) static inline void paragraph(const char *label,
                                                                   const char *format, ...) {
    const int width = 96, indent = (int)strlen(label);
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("%s", label);
    int column = indent;
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        const int length = (int)strlen(word);
        if (column > indent && column + 1 + length > width) {
            printf("\n%*s", indent, "");
            column = indent;
        }
        column += printf(column > indent ? " %s" : "%s", word);
    }
    printf("\n");
}

#endif
