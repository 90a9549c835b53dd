# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# KERNEL=stock: the places of a kernel that Debian built. Sourced by tools/kernel/tree.sh, for which
# it defines kernel_paths.
#
#   $image/release      the kernel's release, as uname -r says it
#   $image/version      the version of its Debian packages
#   $image/bzImage      the kernel
#   $image/headers      its linux-headers package
#   $image/source       link to its source, unpacked
#   $image/tree         what tools/stock/build prepares, and its .lock beside

case $KERNEL in
stock | stock-cloud-amd64) flavour=cloud-amd64 ;;
stock-amd64) flavour=amd64 ;;
*) die "KERNEL=$KERNEL: Debian's kernels here are stock (that is, stock-cloud-amd64) and stock-amd64." ;;
esac
[ -z "${KERNEL_SRC:-}" ] || die "KERNEL=$KERNEL takes the kernel from Debian: KERNEL_SRC has no meaning with it."
[ -n "$ROOT" ] || die "KERNEL=$KERNEL needs the compilers that Debian built its kernel with." "Leave TOOLCHAIN out."

# The kernel is the newest of when the toolchain was made, and stays it.
image=$CACHE/stock-$flavour-${ROOT##*-}

kernel_paths() {
	[ -d "$image" ] || die "the kernel has not been fetched." "make kernel KERNEL=$KERNEL does that."
	# shellcheck disable=SC2034
	SRC=$(realpath "$image/source")
}
