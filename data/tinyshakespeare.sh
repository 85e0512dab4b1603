#!/bin/sh
# Finds the text that `make train` trains on and prints its path, alone, on stdout:
#
#   data/tinyshakespeare.txt   if it is there; else copied from TINYSHAKESPEARE=path, if that is given;
#                              else downloaded (1.1 MB, checked against its SHA-256)
#   data/source_text.txt       without a network: this project's own source, as one text
set -u
data=$(dirname "$0")
text=$data/tinyshakespeare.txt
stand_in=$data/source_text.txt
url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
part=$data/tinyshakespeare.$$.txt
trap 'rm -f "$part"' EXIT
trap 'exit 130' INT TERM

say() { echo "tinyshakespeare: $*" >&2; }
# The SHA-256 of a file; "unknown" where no program can tell.
sum_of() {
    if command -v sha256sum >/dev/null; then sha256sum <"$1"
    elif command -v shasum >/dev/null; then shasum -a 256 <"$1"
    else echo unknown; fi | cut -d ' ' -f 1
}
# A text of the user's own is used whatever it is, but not silently.
use() {
    found=$(sum_of "$text")
    [ "$found" = $sha256 ] ||
        say "$text has SHA-256 $found, TinyShakespeare $sha256; it is used all the same"
    echo "$text"
    exit 0
}
# Another server's error page, or half a file, must not come to be trained on.
download() {
    say "downloading $url"
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --connect-timeout 10 --max-time 120 \
            --output "$part" "$url" >&2
    elif command -v wget >/dev/null; then
        wget --quiet --tries=1 --timeout=10 --output-document="$part" "$url" >&2
    else
        say 'neither curl nor wget is installed'
        false
    fi || return
    found=$(sum_of "$part")
    [ "$found" = $sha256 ] && return
    say "the download has SHA-256 $found, expected $sha256: discarded"
    false
}

given=${TINYSHAKESPEARE:-}
if [ -n "$given" ] && [ ! -f "$given" ]; then
    say "TINYSHAKESPEARE=$given is not a file; give the path of a text, or leave it unset"
    exit 2
fi
if [ -f "$text" ]; then
    [ -z "$given" ] || cmp -s "$given" "$text" ||
        say "$text is there and is kept; remove it to use TINYSHAKESPEARE=$given"
    use
fi
if [ -n "$given" ]; then
    cp "$given" "$part" && mv "$part" "$text" || exit 2
    use
fi
if download; then
    mv "$part" "$text" || exit 2
    use
fi
(cd "$data/.." && find . \( -name build -o -name runs -o -name '.?*' \) -prune -o -type f \
    \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.md' \) -print |
    LC_ALL=C sort | while IFS= read -r file; do cat "$file"; done) >"$part" &&
    [ -s "$part" ] && mv "$part" "$stand_in" || exit 2
say "no TinyShakespeare: $stand_in, the project's own source text, stands in for it; its losses" \
    "cannot be compared with TinyShakespeare's"
echo "$stand_in"
