#!/usr/bin/env bash
# Makes a folder (and its .tar.gz) that runs on any x86-64 Linux with a glibc as new as this one's: the binary, every
# shared library but glibc and the GPU driver, the shipped model, licences.
# Usage: scripts/package.sh [--cuda ON|OFF|AUTO] [--grammar ON|OFF|AUTO] [--binary FILE] [--out DIR]
#   --grammar ON   fails where the sources of structured output are not there, instead of leaving it out
#   --binary FILE  take this build instead of making one; it must have been linked with the run path of this script
#   --out DIR      the folder itself; no .tar.gz is made. Default: dist/k3serve-VERSION-linux-x86_64 and its .tar.gz
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

cuda=AUTO
grammar=AUTO
binary=
out=
while [ $# -gt 0 ]; do
  case "$1" in
    --cuda | --grammar | --binary | --out)
      [ $# -ge 2 ] || { echo "package: $1 needs a value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift 2
      ;;
    *)
      echo "package: unknown argument $1" >&2
      exit 2
      ;;
  esac
done

# A DT_RPATH, not a DT_RUNPATH: it also holds for the libraries that a library needs. The path goes through CMake's own
# variable: in plain linker flags the shell that links would take $ORIGIN for a variable of its own.
# shellcheck disable=SC2016  # $ORIGIN is for the dynamic loader
rpath='$ORIGIN/../lib'
link_flags=-Wl,--disable-new-dtags
if [ -z "$binary" ]; then
  # One folder per kind: the link flags differ from a developer's build.
  build_dir=build-package-$(echo "$cuda" | tr '[:upper:]' '[:lower:]')
  scripts/build.sh "$build_dir" k3serve -- -DCMAKE_BUILD_TYPE=Release -DK3_TESTS=OFF "-DK3_CUDA=$cuda" "-DK3_GRAMMAR=$grammar" \
    "-DCMAKE_EXE_LINKER_FLAGS=$link_flags" "-DCMAKE_BUILD_RPATH=$rpath"
  binary=$build_dir/k3serve
fi
[ -x "$binary" ] || { echo "package: no program at $binary" >&2; exit 1; }

version=$(sed -n 's/^project(k3serve VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
archive=
if [ -z "$out" ]; then
  out=dist/k3serve-$version-linux-x86_64
  archive=$out.tar.gz
fi
rm -rf "$out"
mkdir -p "$out/bin" "$out/lib" "$out/share/licenses" "$out/models" "$out/configs"
install -m 755 "$binary" "$out/bin/k3serve"
strip --strip-unneeded "$out/bin/k3serve"
install -m 755 docker/healthcheck.sh "$out/share/healthcheck.sh"
cp -r configs/models/tiny-k3 "$out/models/"
cp -r configs/server "$out/configs/"
cp LICENSE "$out/"
grammar_sources=$(sed -n 's/^K3_XGRAMMAR_DIR:PATH=//p' "$(dirname "$binary")/CMakeCache.txt" 2>/dev/null || true)
for text in LICENSE NOTICE; do
  if [ -f "$grammar_sources/$text" ]; then install -m 644 "$grammar_sources/$text" "$out/share/licenses/xgrammar-$text"; fi
done
if [ -d "$grammar_sources" ]; then
  install -m 644 "$grammar_sources/3rdparty/dlpack/LICENSE" "$out/share/licenses/dlpack"
  sed '/\*\//q' "$grammar_sources/3rdparty/picojson/picojson.h" >"$out/share/licenses/picojson"
fi
for headers in nlohmann-json3-dev libboost1.74-dev; do
  if [ -f "/usr/share/doc/$headers/copyright" ]; then
    install -m 644 "/usr/share/doc/$headers/copyright" "$out/share/licenses/$headers"
  fi
done

# glibc's own parts must be the machine's: they match its loader. libcuda belongs to the driver.
is_system() {
  case "$1" in
    linux-vdso.so.* | ld-linux-*.so.* | libc.so.* | libm.so.* | libmvec.so.* | libpthread.so.* | libdl.so.* | librt.so.* | \
      libresolv.so.* | libutil.so.* | libanl.so.* | libnsl.so.* | libcuda.so.* | libnvidia-*.so.*) return 0 ;;
    *) return 1 ;;
  esac
}

# ldd lists the whole closure. "name => path (address)"; the loader and the vdso have no arrow.
while read -r name arrow path _; do
  [ "$arrow" = "=>" ] || continue
  is_system "$name" && continue
  if [ "$path" = not ]; then
    echo "package: $name is not installed here" >&2
    exit 1
  fi
  install -m 644 "$(readlink -f "$path")" "$out/lib/$name"
  strip --strip-unneeded "$out/lib/$name" 2>/dev/null || true  # the vendor's are stripped already
  # The list of packages, and each one's licence text where the machine has it. The database may name the file below
  # /lib, which is /usr/lib.
  real=$(readlink -f "$path")
  owner=$( (dpkg-query -S "$real" || dpkg-query -S "${real#/usr}") 2>/dev/null | sed -n '1s/[:,].*//p' || true)
  if [ -n "$owner" ]; then
    echo "$name $owner $(dpkg-query -W -f='${Version}' "$owner")" >>"$out/share/licenses/packages.txt"
    if [ -f "/usr/share/doc/$owner/copyright" ]; then
      install -m 644 "/usr/share/doc/$owner/copyright" "$out/share/licenses/$owner"
    fi
  else
    echo "$name (no Debian package)" >>"$out/share/licenses/packages.txt"
  fi
done < <(ldd "$out/bin/k3serve")

# From here on nothing outside the folder but glibc may be used.
strays=$(env -i ldd "$out/bin/k3serve" | while read -r name arrow path _; do
  [ "$arrow" = "=>" ] || continue
  is_system "$name" && continue
  case "$(readlink -f "$path")" in
    "$(readlink -f "$out")"/lib/*) ;;
    *) echo "$name => $path" ;;
  esac
done)
if [ -n "$strays" ]; then
  echo "package: these libraries come from outside the package (was the program linked with the run path $rpath and $link_flags?):" >&2
  echo "$strays" >&2
  exit 1
fi
env -i "$out/bin/k3serve" version >/dev/null || { echo "package: the packaged program does not run" >&2; exit 1; }

if [ -n "$archive" ]; then
  # Same names, owners and order whoever packs.
  tar --sort=name --owner=0 --group=0 --numeric-owner -C "$(dirname "$out")" -czf "$archive" "$(basename "$out")"
  echo "$archive $(stat -c %s "$archive") bytes"
else
  echo "$out $(du -sb "$out" | cut -f1) bytes"
fi
