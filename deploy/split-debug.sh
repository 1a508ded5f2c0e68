#!/bin/sh
# split-debug.sh EXECUTABLE OUT: OUT is the executable without symbols and line tables, which OUT.debug has.
# Backtraces have functions and lines if OUT.debug is beside OUT. Debuggers find it there too.
set -eu
objcopy --only-keep-debug "$1" "$2.debug"
chmod 644 "$2.debug"
objcopy --strip-all --add-gnu-debuglink="$2.debug" "$1" "$2"
