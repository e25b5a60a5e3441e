#!/usr/bin/env python3
"""Compares k3serve's tokenizer with tiktoken, id by id, on fixed and random strings. Exits 1 at the first difference.

    python3 scripts/compare_tokenizer.py --tool BUILD/tests/server/text/k3_encode_tool --model configs/models/tiny-k3
    ... --write tests/data/tokenizer_cases.json      writes the fixed cases and some random ones, by tiktoken, as test data

Needs tiktoken (pip). The special tokens come from tokenizer_config.json where the folder has one, else K3's.
"""

import argparse
import base64
import json
import os
import random
import string
import struct
import subprocess
import sys

import tiktoken

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
K3_SPECIALS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 6: "[start_header_id]",
    7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip


def load_reference(folder):
    with open(os.path.join(folder, "tiktoken.model"), "rb") as file:
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in file if line.strip())}
    names = {len(ranks) + offset: name for offset, name in K3_SPECIALS.items()}
    config = os.path.join(folder, "tokenizer_config.json")
    if os.path.exists(config):
        with open(config) as file:
            names = {int(i): entry["content"] for i, entry in json.load(file)["added_tokens_decoder"].items()}
    first = len(ranks)
    specials = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(first, first + 256)}
    return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def cut(text):
    """The cuts before encoding: 400,000 characters, and 25,000 of one kind within those."""
    for start in range(0, len(text), 400_000):
        part = text[start : start + 400_000]
        begin, run, was_space = 0, 0, None
        for i, c in enumerate(part):
            space = c.isspace()
            run = run + 1 if space == was_space else 1
            was_space = space
            if run > 25_000:
                yield part[begin:i]
                begin, run = i, 1
        yield part[begin:]


class Reference:
    def __init__(self, encoding):
        self.encoding = encoding

    def encode(self, text, control):
        allowed = "all" if control else set()
        return [i for part in cut(text) for i in self.encoding.encode(part, allowed_special=allowed, disallowed_special=())]


class Tool:
    def __init__(self, path, folder):
        self.process = subprocess.Popen([path, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def encode(self, data, mode):
        self.process.stdin.write(mode + struct.pack("<I", len(data)) + data)
        self.process.stdin.flush()
        (count,) = struct.unpack("<I", self.process.stdout.read(4))
        if count == 0xFFFFFFFF:
            return None
        return list(struct.unpack(f"<{count}i", self.process.stdout.read(4 * count)))


HAN = ["世界", "年", "月", "漢字", "〇", "々", "〆", "。", "𠀀", "𪛖", "⺀", "〩", "\U00016ff0", "\U00031350", "\U0002ebf0"]
FIXED = [
    "世界Hello世界", "2026年11月29日", "I'LL we've DON'T it's", "——“引号”", "カタカナとひらがなと漢字", "한국어", "٣٤٥",
    "a\u0301e\u0301", "\t\tx\r\n\r\n\ty", " a", "  a", "   a", "    a", "     a", "1234567", "𠀀", "👩\u200d💻👨\u200d👩\u200d👧", "\u00a0\u3000",
    "\u180e x\u180e", "it'ſ ITſ", "\x1c\x1d\x1e\x1f \x85", "ǅabc ǅABC", "ⅷⅧ", "\U00031350a\U00031350", "ᲀᲉᲊ", "\U0001e4d0\U0001e6c0",
    "a" * 30, "don't'll", "x\u0301\u0301Y\u0301z", "__init__", "{}{}{}();", "é" * 9, "\ufeff\u200b", "A\u0345b", "9〇9", "漢a漢A漢1漢 漢",
]  # fmt: skip
ALPHABETS = [
    HAN,
    list("abcdefghijklmnopqrstuvwxyz"),
    list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'", "'ſ", "’s"],
    [" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2003", "\x1c", "\x85", "\u180e", "\u200b", "\u2028"],
    list("0123456789") + ["٣", "½", "Ⅷ", "²"],
    list("!?.,;:-_=+*/\\|<>[]{}()@#$%^&\"`~") + ["——", "“", "”", "…", "€"],
    ["カ", "ナ", "ひ", "한", "국", "é", "É", "ß", "ﬁ", "ǅ", "ʰ", "ª", "Ж", "ж", "ع", "ש", "ก", "न", "\u093f", "ा"],
    ["\u0301", "\u0308", "\u200d", "\ufe0f", "😀", "👩", "🏳", "🇫", "🇷", "\u20e3"],
    ["Hello", " the", "def ", "return", "http://", "camelCase", "HTTPServer", "__init__", "x86_64"],
]


def random_string(rng):
    alphabets = rng.sample(ALPHABETS, rng.randint(1, 4))
    if rng.random() < 0.1:  # anything that Unicode has, assigned or not
        alphabets.append([chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(20)])
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(0, 60)))


def runs():
    """4 KiB of one character each, whatever its length in bytes."""
    for unit in ["x", " ", "\n", "_", "{", "中", "ab"]:
        yield (unit * 4096)[: 4096 // max(len(c.encode()) for c in unit)]


def long_strings(rng):
    yield "a" * 25_001
    yield " " * 25_001 + "x"
    yield "中" * 60_000
    yield "ab " * 150_000 + "\n" * 30_000
    yield "x \x1c" * 100_000 + "\x1c" * 30_000 + "\u200b" * 26_000
    yield "".join(rng.choice("abc") for _ in range(40_000))
    yield from runs()
    yield "".join(random_string(rng) for _ in range(15_000))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", help="the built k3_encode_tool")
    parser.add_argument("--model", required=True, help="folder with tiktoken.model")
    parser.add_argument("--count", type=int, default=10_000, help="random strings")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", help="write test data instead of comparing")
    args = parser.parse_args()

    encoding = load_reference(args.model)
    reference = Reference(encoding)
    rng = random.Random(args.seed)
    if args.write:
        texts = FIXED + [random_string(rng) for _ in range(150)] + list(runs())
        texts.append("".join(rng.choice(string.ascii_lowercase) for _ in range(4096)))
        cases = [{"text": t, "ids": reference.encode(t, False)} for t in texts]
        with open(args.write, "w") as file:
            json.dump({"made_by": f"scripts/compare_tokenizer.py, tiktoken {tiktoken.__version__}", "encode": cases}, file)
            file.write("\n")
        return

    tool = Tool(args.tool, args.model)
    specials = sorted(encoding._special_tokens)

    def check(text, mode):
        ids = tool.encode(text.encode(), b"c" if mode == "control" else b"o")
        expected = reference.encode(text, mode == "control")
        if ids != expected or b"".join(map(encoding.decode_single_token_bytes, ids)) != text.encode():
            sys.exit(f"{mode}: {text[:200]!r}\n tiktoken {expected[:100]}\n k3serve  {ids and ids[:100]}")

    compared = 0
    for text in FIXED + list(long_strings(rng)) + [random_string(rng) for _ in range(args.count)]:
        check(text, "ordinary")
        marked = text[: len(text) // 2] + rng.choice(specials) + text[len(text) // 2 :] if len(text) < 1000 else text
        check(marked, "ordinary")
        check(marked, "control")
        compared += 3
    for byte in range(256):
        if tool.encode(bytes([byte]), b"b") != encoding._encode_bytes(bytes([byte])):
            sys.exit(f"byte {byte:#x}")
        if byte >= 0x80 and tool.encode(bytes([byte]), b"o") is not None:
            sys.exit(f"byte {byte:#x} was taken as text")
    print(f"{compared} encodings and 256 single bytes equal tiktoken {tiktoken.__version__}'s")


if __name__ == "__main__":
    main()
