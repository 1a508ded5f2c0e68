#!/bin/sh
# Runs a command as in a container: on a host of its own (a network namespace), as an unprivileged user, in the
# read-only root file system of an image, without a way to get privileges.
# Usage: enter.sh NAMESPACE ROOT COMMAND…
set -eu
namespace=$1 root=$2
shift 2
exec ip netns exec "$namespace" unshare --mount --ipc --propagation private sh -eu -c '
    root=$1
    shift
    mount --bind "$root" "$root"
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    mount -t tmpfs -o size=64m tmpfs "$root/dev/shm"
    mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
    mount -o remount,bind,ro "$root"
    exec setpriv --no-new-privs chroot --userspec=65532:65532 "$root" "$@"
' sh "$root" "$@"
