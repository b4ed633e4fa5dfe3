#!/usr/bin/env python3
"""Writes unicode_tables.c: the character classes that the tokenizer's splits need, as of Unicode 16.0.

usage: unicode_gen.py > unicode_tables.c

Needs character data of exactly that version: Python's own unicodedata where it is 16.0, else the module
unicodedata2 16.0.  The version matters: characters assigned later are split differently, and the ids change."""
import sys

WANTED = "16.0.0"
SPACES = [(0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
          (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]


def character_data():
    import unicodedata
    if unicodedata.unidata_version == WANTED:
        return unicodedata
    import unicodedata2
    if unicodedata2.unidata_version == WANTED:
        return unicodedata2
    sys.exit(f"unicode_gen: need Unicode {WANTED}, have {unicodedata.unidata_version} and {unicodedata2.unidata_version}")


def ranges(data, majors):
    """[first, last] runs of code points whose general category starts with one of majors."""
    runs = []
    for cp in range(0x110000):
        if data.category(chr(cp))[0] not in majors:
            continue
        if runs and runs[-1][1] == cp - 1:
            runs[-1][1] = cp
        else:
            runs.append([cp, cp])
    return runs


def table(name, comment, runs):
    cells = [f"{{0x{a:04X}, 0x{b:04X}}}" for a, b in runs]
    lines = ["    " + ", ".join(cells[i:i + 6]) for i in range(0, len(cells), 6)]
    rows = ",\n".join(lines)
    return (f"/* {comment}: {len(runs)} ranges */\nstatic const unicode_range {name}_ranges[] = {{\n{rows},\n}};\n"
            f"const unicode_set unicode_{name} = {{{name}_ranges, {len(runs)}}};\n")


def main():
    data = character_data()
    print("/* Made by unicode_gen.py from the character data of Unicode 16.0; do not edit. */")
    print('#include "engine/unicode_int.h"\n')
    print(table("number", "N", ranges(data, "N")))
    print(table("letter_mark", "L and M", ranges(data, "LM")))
    print(table("punct_symbol", "P and S", ranges(data, "PS")))
    print(table("space", "what \\s matches", SPACES), end="")


main()
