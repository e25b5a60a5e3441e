#!/usr/bin/env python3
"""Writes the table of `serve`'s flags into README.md, from what the program itself says, between the two marker lines.
With --check it changes nothing and fails when the table is stale, or when the program links a library whose package has
no row in the table of licences. So do libraries that are linked statically, where the program holds their symbols. It
fails, too, when a README says that a test is in a file which does not have it.

  scripts/readme_tables.py [--check] [--binary build/k3serve]
"""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- flags: begin, made by scripts/readme_tables.py -->", "<!-- flags: end -->"


def table(binary):
    help_text = subprocess.run([binary, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    lines, group, flag = [], None, None
    flags = []  # (group, name, value, help)
    for line in help_text.splitlines():
        head = re.fullmatch(r"(\w[\w ,]*):", line)
        start = re.match(r"  --(\[no-\])?([a-z0-9-]+)(?: (\S.*?))?(?:\s{2,}(.*))?$", line)
        if head:
            group = head.group(1)
        elif start:
            flags.append([group, start.group(2), start.group(3) or "", start.group(4) or ""])
        elif flags and line.startswith(" " * 10):
            flags[-1][3] += " " + line.strip()
    for name_group in dict.fromkeys(f[0] for f in flags):
        if name_group == "Other":
            continue
        lines += ["", f"**{name_group}**", "", "| flag | default | what it sets |", "|---|---|---|"]
        for flag in flags:
            if flag[0] != name_group:
                continue
            text = flag[3].strip()
            match = re.search(r" ?\[([^\[\]]*)\]$", text)
            default = match.group(1) if match else ("off" if not flag[2] else "")
            text = text[:match.start()] if match else text
            value = f" {flag[2]}" if flag[2] else ""
            shown = f"`--{flag[1]}{value}`".replace("|", "\\|")
            lines.append(f"| {shown} | {default} | {text.strip()} |")
    return "\n".join(lines[1:]) + "\n"


# Sources that are compiled in, by a name in their symbols.
STATIC = {b"xgrammar": {"xgrammar", "picojson", "dlpack"}}


def unlisted_libraries(binary, text):
    """What is linked and the licence table does not name: shared libraries by Debian package, none where there is no dpkg,
    and static ones."""
    licences = text.split("## Licences")[1].split("\n## ")[0]
    named = set(re.findall(r"`([^`]+)`", licences))
    program = pathlib.Path(binary).read_bytes()
    missing = {name for symbol, names in STATIC.items() if symbol in program for name in names - named}
    linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    real = [str(pathlib.Path(path).resolve()) for path in re.findall(r" => (/\S+)", linked)]
    # The package database may name a file below /lib, which is /usr/lib.
    paths = [path for library in real for path in (library, library.removeprefix("/usr"))]
    try:
        found = subprocess.run(["dpkg-query", "-S", *paths], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return missing
    owners = {}
    for line in found.splitlines():
        package, path = line.split(": ", 1)
        owners.setdefault(path.removeprefix("/usr"), set()).add(package.split(":")[0])
    for packages in owners.values():
        if not packages & named:
            missing |= packages
    return missing


def misplaced_tests():
    """What READMEs say of tests, as `file` Name, OtherName, and the file does not have."""
    sources = {}
    for path in [*(ROOT / "tests").rglob("*_test.cc"), *(ROOT / "tests").rglob("*_test.py")]:
        sources.setdefault(path.name, []).append(path.read_text())
    wrong = []
    for readme in [path for below in ("", "*/", "*/*/") for path in ROOT.glob(f"{below}README.md")]:
        text, folder = readme.read_text(), readme.relative_to(ROOT).parent
        for file, names in re.findall(r"`(?:[\w/]+/)?(\w+_test\.(?:cc|py))`((?:,? \w+)*)", text):
            if file not in sources:
                wrong.append(f"{folder}: {file}")
            for name in re.findall(r"\b(?:[A-Z]\w*[a-z][A-Z]\w*|test_\w+)\b", names):
                if not any(re.search(rf"(?:, {name}\)|def {name}\()", source) for source in sources.get(file, [])):
                    wrong.append(f"{folder}: {file} {name}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(ROOT / "build" / "k3serve"))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit("readme_tables: README.md lacks the marker lines")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    missing = unlisted_libraries(args.binary, text)
    if missing:
        sys.exit(f"readme_tables: linked, but not in README's table of licences: {', '.join(sorted(missing))}")
    wrong = misplaced_tests()
    if wrong:
        sys.exit(f"readme_tables: named in a README, but not there: {', '.join(wrong)}")
    fresh = f"{before}{BEGIN}\n\n{table(args.binary)}\n{END}{after}"
    if fresh == text:
        return
    if args.check:
        sys.exit("readme_tables: the table of flags in README.md is stale: run scripts/readme_tables.py")
    path.write_text(fresh)


if __name__ == "__main__":
    main()
