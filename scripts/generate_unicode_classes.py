#!/usr/bin/env python3
"""Writes server/text/unicode_classes.cc: the pre-tokenizer's class of every code point.

The classes are read off tiktoken itself (its regular-expression engine is asked about each code point), so that they carry
that engine's Unicode version and case folding, whatever versions the libraries of the serving machine have.

    python3 scripts/generate_unicode_classes.py > server/text/unicode_classes.cc
"""

import importlib.metadata
import sys

import tiktoken

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
BYTE_RANKS = {bytes([b]): b for b in range(256)}


def matching(pattern, before=""):
    """Code points that the one-character `pattern` matches, each tried after `before`. Unmatched text yields no tokens."""
    probe = tiktoken.Encoding("probe", pat_str=before + pattern, mergeable_ranks=BYTE_RANKS, special_tokens={})
    found = set()
    for start in range(0, len(CODE_POINTS), 50000):
        text = "".join(before + chr(c) for c in CODE_POINTS[start : start + 50000])
        found.update(ord(c) for c in bytes(probe.encode_ordinary(text)).decode())
    return found - {ord(c) for c in before}


def main():
    han = matching(r"\p{Han}")
    upper, lower = matching(r"[\p{Lu}\p{Lt}]"), matching(r"\p{Ll}")
    other_letter, mark, number = matching(r"[\p{Lm}\p{Lo}]"), matching(r"\p{M}"), matching(r"\p{N}")
    space = matching(r"\s")
    folds_to = {c: letter for letter in "strevmld" for c in matching(f"(?i:{letter})", before="'")}

    def class_of(c):
        if c in (0x0A, 0x0D):
            return "\n"
        if c == 0x20 or c == 0x27:
            return chr(c)
        if c in space:
            return "\t"
        if c in han:
            if c in upper or c in lower:
                sys.exit(f"U+{c:04X} is a cased Han letter, for which there is no class")
            return "H" if c in other_letter else "J" if c in number else "K" if c in mark else "P"
        if c in folds_to:
            return folds_to[c].upper() if c in upper else folds_to[c]
        if c in upper:
            return "A"
        if c in lower:
            return "a"
        return "o" if c in other_letter else "k" if c in mark else "1" if c in number else "."

    ranges, previous = [], None
    for c in CODE_POINTS:
        current = class_of(c)
        if current != previous:
            ranges.append((c, current))
            previous = current

    escapes = {"\n": "\\n", "\t": "\\t", "'": "\\'"}
    cells = [f"{{0x{first:x}, '{escapes.get(cls, cls)}'}}," for first, cls in ranges]
    lines, line = [], ""
    for cell in cells:
        if len(line) + len(cell) > 115:
            lines.append(line)
            line = ""
        line += (" " if line else "") + cell
    lines.append(line)
    version = importlib.metadata.version("tiktoken")
    print(f"// Written by scripts/generate_unicode_classes.py with tiktoken {version}: do not edit.")
    print('#include "server/text/unicode_classes.h"\n')
    print("namespace k3 {\nnamespace {\n")
    print("// Ascending; each range reaches to the next one's first code point.")
    print("// clang-format off")
    print("constexpr CharClassRange kRanges[] = {")
    print("\n".join("    " + text for text in lines))
    print("};\n// clang-format on\n")
    print("}  // namespace\n")
    print("std::span<const CharClassRange> CharClassRanges() { return kRanges; }\n")
    print("}  // namespace k3")


main()
