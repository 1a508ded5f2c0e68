#!/usr/bin/env bash
# Boots the VM, runs one job in it, and ends with the job's status.
# Usage: boot.sh CACHE JOB [SECONDS]   JOB: a folder that is copied over the VM's root; its /job/run is started.
# Exit code 124: the job took too long. 125: the VM failed. The kernel's log: CACHE/serial-JOB.
set -euo pipefail

cache=$1 job=$2 seconds=${3:-240}
work=$(mktemp -d "$cache/boot.XXXXXX")
serial=$cache/serial-$(basename "$job")
emulator=
cleanup() {
    [ -z "$emulator" ] || kill "$emulator" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
say() { printf 'rdma-vm: %s\n' "$*" >&2; }

host_lib=$cache/host/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$host_lib:$cache/host/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR=$host_lib/qemu

# The kernel unpacks archives in their order.
pack() {
    local cpio=$cache/host/bin/cpio
    [ -x "$cpio" ] || cpio=$(command -v cpio)
    cp "$cache/base.cpio" "$work/initrd"
    (cd "$job" && find . | "$cpio" -o -H newc --quiet) >>"$work/initrd"
}

# Always emulated, even with /dev/kvm: on some machines it only runs certain kernels.
start() {
    local qemu=$cache/host/usr/bin/qemu-system-x86_64
    [ -x "$qemu" ] || qemu=$(command -v qemu-system-x86_64)
    : >"$serial" && : >"$work/out"
    "$qemu" -L "$cache/host/usr/share/seabios" -L "$cache/host/usr/share/qemu" \
        -nodefaults -no-user-config -display none -no-reboot -M pc -accel tcg,thread=multi -cpu max \
        -m "${TEST_VM_MIB:-1536}" -smp "${TEST_VM_CORES:-1}" -kernel "$cache/vmlinux" -initrd "$work/initrd" \
        -append "console=ttyS0 quiet panic=-1 no_timer_check nowatchdog cryptomgr.notests" \
        -serial "file:$serial" -serial "file:$work/out" -device isa-debug-exit,iobase=0xf4,iosize=0x01 \
        </dev/null 2>"$work/errors" &
    emulator=$!
}

booted() { grep -qa '^VM-BOOT' "$serial"; }

# Shows the job's output as it comes.
wait_for_end() {
    local began=$SECONDS boot_seconds=60
    tail -c +1 -f "$work/out" --pid="$emulator" -s 0.2 2>/dev/null &
    local tail=$!
    while kill -0 "$emulator" 2>/dev/null; do
        if [ $((SECONDS - began)) -ge $((seconds + boot_seconds)) ]; then break; fi
        if [ $((SECONDS - began)) -ge $boot_seconds ] && ! booted; then break; fi
        sleep 0.2
    done
    late=
    if kill -0 "$emulator" 2>/dev/null; then late=1 && kill "$emulator"; fi
    status=0
    wait "$emulator" || status=$?
    emulator=
    wait "$tail" || true
}

pack
for attempt in 1 2 3; do
    start
    wait_for_end
    if booted; then break; fi
    say "attempt $attempt to boot failed: $(tail -c 300 "$serial" | tr -d '\r' | tail -1) $(cat "$work/errors")"
done
if [ -n "$late" ] && booted; then
    say "the job took more than $seconds seconds"
    exit 124
fi
# Both must agree: a kernel that panics ends the emulator with 0.
said=$(grep -a '^VM-EXIT' "$serial" | tail -1 | tr -dc 0-9 || true)
case "$status:$said" in
    65:0) exit 0 ;;
    67:[1-9]*) grep -qa VM-BROKEN "$serial" || exit "$said" ;;
esac
say "the VM failed (emulator's status $status, said '$said'): $(cat "$work/errors")"
# The kernel's error, if there is one, comes first, and then the whole log.
grep -an -m 1 -A 80 'BUG: \|Oops: \|Kernel panic' "$serial" >&2 || tail -c 2000 "$serial" >&2
exit 125
