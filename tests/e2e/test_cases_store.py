#!/usr/bin/env python3
"""Every case and incident of tests/cases_store.md has its line, and every test that it names is a test."""
import glob, os, re, sys

tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
text = open(os.path.join(tests, "cases_store.md"), encoding="utf-8").read()
known = {}
for path in glob.glob(os.path.join(tests, "*", "test_*.c")):
    source = open(path, encoding="utf-8").read()
    known[os.path.basename(path)[:-2]] = set(re.findall(r"cmocka_unit_test\w*\(\s*(\w+)", source))
ids, named, bad = [], 0, []
for line in text.splitlines():
    cells = [c.strip() for c in line.strip("|").split("|")]
    if not line.startswith("| ") or not re.fullmatch(r"K?\d+", cells[0]):
        continue
    ids.append(cells[0])
    found = re.findall(r"(test_\w+): (\w+)", cells[2])
    if not found and not cells[2].startswith("—"):
        bad.append(f"{cells[0]} names no test and gives no reason")
    for program, test in found:
        named += 1
        if test not in known.get(program, ()):
            bad.append(f"{cells[0]}: there is no {test} in {program}")
want = [f"K{i:02}" for i in range(1, 27)] + [str(i) for i in range(1, 57)]
if ids != want:
    bad.append(f"lines missing, doubled or out of order: {set(want) ^ set(ids)}")
for b in bad:
    print(f"# {b}")
print(f"{'not ok' if bad else 'ok'}: {len(ids)} cases, {named} tests named")
sys.exit(bool(bad))
