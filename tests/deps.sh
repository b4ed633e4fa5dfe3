#!/usr/bin/env bash
# Installs what is missing on a Debian machine.  deps.sh build: enough to build and run; deps.sh test: that and
# what the tests use.  Says what it does; does nothing, and needs no rights, when everything is there.
set -euo pipefail
build=(gcc libc6-dev cmake ninja-build pkg-config libuv1-dev liblmdb-dev libcurl4-openssl-dev libjansson-dev libsodium-dev
    libxxhash-dev libpcre2-dev libseccomp-dev bubblewrap)
tests=(libcmocka-dev python3 xz-utils git make sqlite3 procps strace libubsan1 libasan8 libtsan2)
want=("${build[@]}")
case "${1:-}" in
build) ;;
test) want+=("${tests[@]}") ;;
*) echo "usage: $0 build|test" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
    echo "deps.sh: this is not Debian; install the equivalents of: ${want[*]}" >&2
    exit 0
fi
missing=()
for p in "${want[@]}"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q '^install ok installed' || missing+=("$p")
done
[ ${#missing[@]} -gt 0 ] || exit 0

run=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "deps.sh: as root, run: apt-get install ${missing[*]}" >&2; exit 1; }
    run=(sudo)
fi
echo "Installing: ${missing[*]}"
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { "${run[@]}" apt-get update -q && "${run[@]}" apt-get install -q -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "deps.sh: apt-get failed (whole log: $log)" >&2
    exit 1
fi
rm -f "$log"
