#!/usr/bin/env bash
# Makes a Python environment with what the client tests need and prints its interpreter. Does nothing when it is there
# already. Usage: scripts/python_env.sh DIR
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
dir=$1
wanted=$root/tests/clients/requirements.txt

if ! cmp -s "$wanted" "$dir/requirements.txt"; then
  echo "python_env: installing the packages of the client tests into $dir" >&2
  rm -rf "$dir"
  python3 -m venv "$dir"
  "$dir/bin/python" -m pip install -q --disable-pip-version-check -r "$wanted" >&2
  cp "$wanted" "$dir/requirements.txt"
fi
echo "$dir/bin/python"
