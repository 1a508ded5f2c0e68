#!/usr/bin/env bash
# Fetches and assembles the parts of the VM: an emulator, a kernel with Soft-RoCE, and a small root file system.
# Nothing is installed. Debian's packages are downloaded and unpacked into .cache/rdma-vm, once; root is not needed.
# Usage: prepare.sh CACHE
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=$1
say() { printf 'rdma-vm: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The emulator, and the packages and tools of the root file system. `-cloud-` kernels have no rdma_rxe.
programs=(qemu-system-x86 busybox-static cpio kmod libibverbs1 ibverbs-providers iproute2 xz-utils)

# These packages, and their dependencies that this machine lacks. apt resolves them, and installs nothing.
wanted() {
    apt-get -s install --no-install-recommends "${programs[@]}" | awk '$1 == "Inst" { print $2 }'
    printf '%s\n' "${programs[@]}"
}

kernel_package() {
    apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-[0-9]/ { print $2; exit }'
}

fetch() {
    command -v apt-get >/dev/null || die "the VM is put together from Debian's packages, and there is no apt-get here"
    local kernel
    kernel=$(kernel_package)
    if [ -z "$kernel" ] && [ "$(id -u)" -eq 0 ]; then
        apt-get update -qq
        kernel=$(kernel_package)
    fi
    [ -n "$kernel" ] || die "apt knows no linux-image-amd64; as root: apt-get update"
    rm -rf "$cache/debs" && mkdir -p "$cache/debs"
    say "downloading $kernel, qemu and what they need (about 110 MB)"
    mapfile -t packages < <(wanted | sort -u)
    (cd "$cache/debs" && apt-get download -qq -o APT::Sandbox::User=root "$kernel" "${packages[@]}") \
        || die "apt-get download failed; as root: apt-get update"
    unpack "${kernel#linux-image-}"
}

unpack() {
    local version=$1 deb
    rm -rf "$cache/host" "$cache/kernel" && mkdir -p "$cache/host" "$cache/kernel"
    for deb in "$cache"/debs/*.deb; do
        case $deb in
            */linux-image-*) dpkg -x "$deb" "$cache/kernel" ;;
            *) dpkg -x "$deb" "$cache/host" ;;
        esac
    done
    rm -rf "$cache/debs"
    echo "$version" >"$cache/version"
}

# Unpacked here instead of by the guest: the plain ELF file boots five seconds faster, by its PVH note.
extract_kernel() {
    python3 - "$cache/kernel/boot/vmlinuz-$1" "$cache/vmlinux" <<'PYTHON'
import lzma, struct, sys
image = open(sys.argv[1], "rb").read()
base = ((image[0x1F1] or 4) + 1) * 512
offset, length = struct.unpack_from("<II", image, 0x248)
payload = image[base + offset : base + offset + length]
assert payload[:6] == b"\xfd7zXZ\0", "the kernel is not packed with xz"
open(sys.argv[2], "wb").write(lzma.LZMADecompressor().decompress(payload))
PYTHON
}

# A file of the unpacked packages, or the machine's own.
find_file() {
    local name
    for name in "$@"; do
        for candidate in "$cache/host$name" "$name"; do
            if [ -e "$candidate" ]; then echo "$candidate" && return; fi
        done
    done
    die "$1 is in none of the packages"
}

# The libraries that a program needs, from the unpacked packages or the machine.
libraries_of() {
    LD_LIBRARY_PATH="$libs" ldd "$1" | grep -oE '/[^ ]+' || true
}

# Puts a program or library at its usual path, with all its libraries.
put() {
    local root=$1 path=$2 file library target
    file=$(find_file "$path")
    mkdir -p "$root$(dirname "$path")"
    cp -L "$file" "$root$path"
    for library in $(libraries_of "$file"); do
        target=${library#"$cache/host"}
        [ -e "$root$target" ] || { mkdir -p "$root$(dirname "$target")" && cp -L "$library" "$root$target"; }
    done
}

# In loading order. rxe asks for "crc32", a name that modprobe does not know.
modules() {
    local module tool
    tool=$(find_file /bin/kmod /usr/bin/kmod)
    ln -sf "$tool" "$cache/modprobe" && ln -sf "$tool" "$cache/depmod"
    "$cache/depmod" -b "$cache/kernel" "$1"
    for module in crc32_generic rdma_rxe rdma_ucm dummy veth sch_netem sch_ingress cls_u32 act_gact act_pedit; do
        "$cache/modprobe" -d "$cache/kernel" -S "$1" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }'
}

build_root() {
    local version=$1 root=$cache/root module
    rm -rf "$root"
    mkdir -p "$root"/{bin,sbin,lib/modules,proc,sys,dev,tmp,run,var,etc/libibverbs.d,job}
    cp "$(find_file /bin/busybox)" "$root/bin/busybox" && ln -s busybox "$root/bin/sh"
    modules "$version" >"$cache/modules"
    while read -r module; do
        cp "$module" "$root/lib/modules/" && basename "$module" >>"$root/lib/modules/order"
    done <"$cache/modules"
    # libibverbs loads its provider from these two places.
    cp "$(find_file /etc/libibverbs.d/rxe.driver)" "$root/etc/libibverbs.d/"
    put "$root" "$lib/libibverbs.so.1"
    for module in "$cache/host$lib"/libibverbs/librxe-rdmav*.so "$lib"/libibverbs/librxe-rdmav*.so; do
        [ ! -e "$module" ] || put "$root" "${module#"$cache/host"}"
    done
    put "$root" /usr/bin/rdma
    put "$root" /bin/ip
    put "$root" /sbin/tc
    put "$root" "$lib/libgcc_s.so.1"
    cp "$here/init" "$root/init" && chmod +x "$root/init"
    (cd "$root" && find . | "$(find_file /bin/cpio /usr/bin/cpio)" -o -H newc --quiet) >"$cache/base.cpio.new"
    rm -rf "$root"
    mv "$cache/base.cpio.new" "$cache/base.cpio"
}

lib=/usr/lib/x86_64-linux-gnu
libs=$cache/host$lib:$cache/host/lib/x86_64-linux-gnu
mkdir -p "$cache"
[ "$(uname -m)" = x86_64 ] || die "the VM is put together for x86_64 only"
[ -e "$cache/version" ] || fetch
version=$(cat "$cache/version")
[ -e "$cache/vmlinux" ] || extract_kernel "$version"
build_root "$version"
# Marks the cache as made by these versions of the scripts.
cat "$here/prepare.sh" "$here/init" >"$cache/built-by"
