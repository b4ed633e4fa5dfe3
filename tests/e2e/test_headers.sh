#!/usr/bin/env bash
# Every public header stands alone, in C and in C++.
set -euo pipefail
cd "$(dirname "$0")/../.."
flags=$(pkg-config --cflags libuv jansson lmdb)
check() { # compiler, language, flags…
    local cc=$1 lang=$2
    shift 2
    for m in base kernels engine kvstore sandbox tools agent; do
        printf '#include "%s/%s.h"\nint main(void) { return 0; }\n' "$m" "$m" | "$cc" -x "$lang" -I. $flags "$@" -fsyntax-only -Wall -Wextra -Werror - || { echo "not ok: $m/$m.h as $lang"; exit 1; }
    done
    echo "ok: $lang"
}
check "${CC:-gcc}" c -std=gnu17
if command -v g++ >/dev/null; then check g++ c++ -std=c++17
else echo "# SKIP g++ is not installed: headers not tried in C++"; fi
