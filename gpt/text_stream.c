#include "gpt/text_stream.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

/* Bytes at the end of the text that begin a UTF-8 character and want more to complete it. */
static size_t cut_character(const char *text, size_t bytes) {
    for (size_t back = 1; back <= 3 && back <= bytes; back++) {
        unsigned char c = (unsigned char)text[bytes - back];
        if ((c & 0xc0) == 0x80) continue;
        size_t wanted = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return wanted > back ? back : 0;
    }
    return 0;
}

/* Bytes at the end of the text that `until` may begin with. */
static size_t cut_stop(const char *text, size_t bytes, const char *until) {
    size_t n = strlen(until), most = n == 0 ? 0 : n - 1;
    for (size_t back = most < bytes ? most : bytes; back > 0; back--)
        if (memcmp(text + (bytes - back), until, back) == 0) return back;
    return 0;
}

static void release(TextStream *stream, size_t bytes) {
    fwrite(stream->held, 1, bytes, stream->file);
    stream->bytes -= bytes;
    memmove(stream->held, stream->held + bytes, stream->bytes);
}

bool text_stream_add(TextStream *stream, const char *text, size_t bytes) {
    if (bytes == 0) return true;
    if (stream->capacity - stream->bytes < bytes) {
        stream->capacity = 2 * (stream->bytes + bytes);
        stream->held = realloc(stream->held, stream->capacity);
        if (!stream->held) error_fatal(__FILE__, __LINE__, "out of host memory");
    }
    memcpy(stream->held + stream->bytes, text, bytes);
    stream->bytes += bytes;
    size_t stop = strlen(stream->until);
    const char *found = stop ? memmem(stream->held, stream->bytes, stream->until, stop) : NULL;
    if (found) {
        release(stream, (size_t)(found - stream->held));
        stream->bytes = 0;
        return false;
    }
    size_t character = cut_character(stream->held, stream->bytes);
    size_t until = cut_stop(stream->held, stream->bytes, stream->until);
    release(stream, stream->bytes - (character > until ? character : until));
    return true;
}

void text_stream_end(TextStream *stream) {
    if (stream->held) release(stream, stream->bytes);
    free(stream->held);
    stream->held = NULL;
    stream->capacity = 0;
}
