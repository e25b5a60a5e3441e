#!/usr/bin/env python3
"""Times tiktoken and k3serve's tokenizer on the same 4 MB of prose and code, one after the other, and prints the ratio.

    python3 scripts/bench_tokenizer.py --bench BUILD/tests/bench/tokenizer_bench --model configs/models/tiny-k3 [--json FILE]

Both are timed in processor time of one thread, the best of several runs. tiktoken gets the text after the cuts that the
format prescribes, as the released tokenizer calls it. Needs tiktoken (pip).
"""

import argparse
import glob
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def compare_tokenizer():
    spec = importlib.util.spec_from_file_location("compare_tokenizer", os.path.join(HERE, "compare_tokenizer.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gather(files, size):
    """The first `size` characters of the files' texts; the whole is repeated when there is less."""
    text = ""
    for file in files:
        with open(file, encoding="utf-8", errors="ignore") as source:
            text += source.read()
        if len(text) >= size:
            break
    if not text:
        sys.exit("no files to take text from: give --text")
    return (text * (size // len(text) + 1))[:size]


def prose_and_code():
    import pydoc_data.topics

    library = sysconfig.get_path("stdlib")
    prose_files = [f for f in glob.glob("/usr/share/common-licenses/*") if os.path.isfile(f)]
    prose_files += glob.glob("/usr/share/doc/**/*.txt", recursive=True) + glob.glob("/usr/share/doc/**/*.md", recursive=True)
    topics = "\n".join(pydoc_data.topics.topics.values())[:1_000_000]
    prose = topics + gather(sorted(prose_files), max(2_000_000 - len(topics), 1))
    code = gather(sorted(glob.glob(library + "/*.py")), 1_200_000)
    code += gather(sorted(glob.glob("/usr/include/**/*.h", recursive=True)), 800_000)
    return prose + code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="the built tokenizer_bench")
    parser.add_argument("--model", required=True, help="folder with tiktoken.model")
    parser.add_argument("--text", help="a UTF-8 file to use instead")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", help="where the result goes")
    args = parser.parse_args()

    if args.text:
        with open(args.text, encoding="utf-8") as file:
            text = file.read()
    else:
        text = prose_and_code()
    compare = compare_tokenizer()
    encoding = compare.load_reference(args.model)
    parts = list(compare.cut(text))
    seconds, tokens = float("inf"), 0
    for _ in range(args.runs):
        begin = time.thread_time()
        tokens = sum(len(encoding.encode(part, disallowed_special=())) for part in parts)
        seconds = min(seconds, time.thread_time() - begin)

    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [args.bench, args.model, file.name, "--runs", str(args.runs)]
        command += ["--tiktoken-seconds", f"{seconds:.6f}", "--tiktoken-tokens", str(tokens)]
        sys.exit(subprocess.run(command + (["--json", args.json] if args.json else [])).returncode)


main()
