#!/bin/sh
# Stands in for cmake while `ibverbs-sys` is built: it configures rdma-core, which makes its headers, but compiles
# nothing of it, and needs no libnl. The headers are linked to where `ibverbs-sys` looks for them.
if [ "$1" = --build ]; then exec ln -sfn "$2/include" "$2/../include"; fi
exec "$VERBS_CMAKE" -DENABLE_RESOLVE_NEIGH=0 "$@"
