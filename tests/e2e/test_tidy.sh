#!/usr/bin/env bash
# House rules that a machine can check.  Each finding names the rule and the replacement.
set -u
cd "$(dirname "$0")/../.."
findings=$(mktemp)
trap 'rm -f "$findings"' EXIT
check() { # text, then the findings on standard input (in a pipe, hence in a process of its own: the file counts)
    local found
    found=$(cat)
    [ -z "$found" ] && return
    { echo "not ok: $1"; echo "$found" | head -n 20 | sed 's/^/    /'; } | tee -a "$findings"
}
libs=$(git ls-files 'base/*.[ch]' 'engine/*.[ch]' 'kernels/*.[ch]' 'kernels/cpu/*.[ch]' 'kvstore/*.[ch]' 'sandbox/*.[ch]' 'tools/*.[ch]' 'agent/*.[ch]')
all=$(git ls-files '*.c' '*.h')
# shellcheck disable=SC2086
{
    grep -nE '\b(strcpy|strcat|sprintf|vsprintf|gets|strtok|atoi|atol|atof)\(' $libs | grep -v 'strcpy(p->name, text)' | check "banned call: use snprintf, dm_buf, strtoll with a check"
    grep -nE '\b(printf|puts|putchar|perror)\(|fprintf\(std(out|err)' $(echo "$libs" | grep -vE '^agent/(cmd|term|main|cli|out|ui)|/launcher/main\.c') | check "libraries never print: log with dm_log or return a dm_err"
    grep -nE '(^|[^_a-z])(exit|abort)\(' $(echo "$libs" | grep -vE '^agent/(cmd|main|cli)|^base/error\.c|/launcher/') | grep -vE '^\S+:\s*(\*|/\*)|\* .*exit\(' | check "libraries never exit: return an error"
    grep -nE '\bgetenv\(' $(echo "$libs" | grep -vE '^base/options\.c|^agent/') | check "the environment is read once, through an options table"
    grep -nE '\b(malloc|calloc|realloc|strdup|strndup)\(' $(echo "$libs" | grep -v '^base/') | grep -vE 'dm_(malloc|calloc|realloc|strdup|strndup)\(|/launcher/|^\S+:\s*(\*|/\*|//)' | check "allocate with dm_malloc and kin: they carry the fault counter"
    grep -nE '\b(TODO|FIXME|XXX|HACK)\b' $all CMakeLists.txt tests/*.sh | grep -v 'XXXXXX' | check "left behind: do it or drop it"
    git ls-files | xargs grep -nIE '(^|[^a-z])/(work|farm)/' -- 2>/dev/null | grep -v '^tests/e2e/test_tidy.sh' | check "a path of one machine"
    wc -l $all | awk '$2 != "total" && $1 > 1500 && $2 !~ /unicode_tables/ {print $2 ": " $1 " lines"}' | check "a file that holds more than one idea"
}
# Dependencies point one way.
arrows() { grep -nE "#include \"($2)/" $(git ls-files "$1/*.[ch]" "$1/**/*.[ch]") | check "$1 must not include $2"; }
arrows base 'engine|kernels|kvstore|tools|sandbox|agent'
arrows kernels 'engine|kvstore|tools|sandbox|agent'
arrows engine 'kvstore|tools|sandbox|agent'
arrows kvstore 'engine|kernels|tools|sandbox|agent'
arrows sandbox 'engine|kernels|kvstore|tools|agent'
arrows tools 'engine|kernels|kvstore|agent'
[ -s "$findings" ] && exit 1
echo "ok: house rules"
