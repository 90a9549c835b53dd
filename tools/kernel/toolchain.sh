# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# Chooses the toolchain, and runs commands in it. Sourced after tools/lib.sh.
#
# The host's own serves when it has everything: a Rust toolchain that the kernel accepts, QEMU,
# virtme-ng, perf and a kernel source. Else it is the Debian 13 root of tools/kernel/root.
# TOOLCHAIN=root or TOOLCHAIN=host takes the choice away.

# A wrong KERNEL_SRC is found before anything is made.
check_tree() {
	local tree=$1 file version oldest
	[ -d "$tree" ] || die "KERNEL_SRC=$tree is not a directory." "Give the top directory of a Linux source tree."
	version=$(sed -nE 's/^(VERSION|PATCHLEVEL) = ([0-9]+)$/\2/p' "$tree/Makefile" 2>/dev/null | paste -sd.)
	oldest=$(sed -n 's/^linux-source-//p' "$TOP/tools/kernel/packages" | sort -V | head -n 1)
	[ -z "$version" ] || [ "$(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1)" = "$oldest" ] ||
		die "KERNEL_SRC=$tree is Linux $version, which is too old: this tree needs $oldest."
	for file in Makefile Kconfig kernel/events/core.c rust/kernel/lib.rs; do
		[ -f "$tree/$file" ] ||
			die "KERNEL_SRC=$tree is not a Linux source tree with Rust in it: $file is missing." \
				"Give the top directory of an unbuilt Linux 7.3 source tree, or leave KERNEL_SRC out."
	done
	[ ! -e "$tree/.config" ] ||
		die "KERNEL_SRC=$tree has been built in." "Clean it ('make mrproper' there) or give a clean copy."
}

if [ -n "${KERNEL_SRC:-}" ]; then
	check_tree "$KERNEL_SRC"
	KERNEL_SRC=$(realpath "$KERNEL_SRC")
fi

# source_in DIR: the tar ball there of the kernel source that this tree fits best, else of the newest.
source_in() {
	local package
	while read -r package; do
		if [ -f "$1/$package.tar.xz" ]; then
			printf '%s\n' "$1/$package.tar.xz"
			return
		fi
	done < <(grep '^linux-source-' "$TOP/tools/kernel/packages")
	find "$1" -maxdepth 1 -name 'linux-source-*.tar.xz' 2>/dev/null | sort -V | tail -n 1
}

# Prints the kernel source that a host toolchain would use, as a tar ball or a directory.
host_source() {
	if [ -n "${KERNEL_SRC:-}" ]; then
		printf '%s\n' "$KERNEL_SRC"
	else
		source_in /usr/src
	fi
}

host_tools="rustc cargo bindgen clang ld.lld llvm-ar make bc bison flex perf vng qemu-system-x86_64 rsync"

host_serves() {
	local tool source probe
	for tool in $host_tools; do
		command -v "$tool" >/dev/null || return 1
	done
	source=$(host_source)
	[ -n "$source" ] || return 1
	probe=$CACHE/probe-$(printf '%s' "$source" | digest)
	if [ ! -f "$probe/Makefile" ] && [ -f "$source" ]; then
		mkdir -p "$probe"
		tar -C "$probe" --strip-components=1 --wildcards -xf "$source" '*/Makefile' '*/scripts' '*/rust' '*/arch/x86' || return 1
	elif [ -d "$source" ]; then
		probe=$source
	fi
	make -s -C "$probe" LLVM=1 rustavailable >"$LOG/rustavailable.log" 2>&1
}

# A kernel of Debian's is met with the compilers that it was built with.
[[ ${KERNEL:-} != stock* ]] || TOOLCHAIN=${TOOLCHAIN:-root}

if [ -z "${ROOT+set}" ]; then
	case "${TOOLCHAIN:-auto}" in
	auto) if host_serves; then ROOT=; else ROOT=$("$TOP/tools/kernel/root"); fi ;;
	host) ROOT= ;;
	root) ROOT=$("$TOP/tools/kernel/root") ;;
	*) die "TOOLCHAIN=$TOOLCHAIN is neither host, root nor auto." ;;
	esac
	export ROOT
fi

# What the objects of a build depend on: the versions of what makes them.
toolchain_key() {
	if [ -n "$ROOT" ]; then
		awk '$1 == "Package:" { name = $2 }
			$1 == "Version:" && name ~ /^(rustc|rust-src|bindgen|clang-[0-9]+|lld-[0-9]+|llvm-[0-9]+)$/ { print name, $2 }' \
			"$ROOT/var/lib/dpkg/status"
	else
		for tool in rustc bindgen clang ld.lld; do "$tool" --version | head -n 1; done
	fi
}

# enter COMMAND…: runs it in the toolchain, the checkout and the cache at their own paths.
# ENTER_BINDS is an array of further bwrap arguments.
ENTER_BINDS=()
enter() {
	local path args=()
	if [ -z "$ROOT" ]; then
		"$@"
		return
	fi
	args=(--bind "$ROOT" / --dev-bind /dev /dev --bind /sys /sys
		--tmpfs /tmp --tmpfs /run --tmpfs /var/tmp
		--ro-bind /etc/resolv.conf /etc/resolv.conf
		--bind "$TOP" "$TOP" --bind "$CACHE" "$CACHE")
	# Certificates of the host, so that cargo trusts what the host trusts.
	for path in /etc/ssl/certs /usr/share/ca-certificates /usr/local/share/ca-certificates; do
		[ ! -d "$path" ] || args+=(--ro-bind "$path" "$path")
	done
	# And its way to the crates, where it has set one.
	path=${CARGO_HOME:-$HOME/.cargo}/config.toml
	if [ -f "$path" ]; then
		mkdir -p "$CACHE/cargo"
		args+=(--ro-bind "$path" "$CACHE/cargo/config.toml")
	fi
	[ -z "${KERNEL_SRC:-}" ] || args+=(--ro-bind "$KERNEL_SRC" "$KERNEL_SRC")
	[ "$(id -u)" -eq 0 ] || args+=(--unshare-user --uid 0 --gid 0)
	bwrap "${args[@]}" "${ENTER_BINDS[@]}" --die-with-parent --unshare-pid --proc /proc --chdir "$PWD" \
		--setenv PATH /usr/sbin:/usr/bin:/sbin:/bin --setenv HOME /root --setenv LC_ALL C.UTF-8 \
		--setenv CARGO_HOME "$CACHE/cargo" --unsetenv RUSTUP_HOME --unsetenv RUSTUP_TOOLCHAIN \
		"$@"
}

# own_apt DIR COMMAND…: a command of apt in the toolchain, with its state in DIR, so that the root stays
# as it was made.
own_apt() {
	local state=$1 command=$2
	shift 2
	mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
	enter "$command" -o Dir::State::lists="$state/lists" -o Dir::Cache="$state/cache" -o APT::Sandbox::User=root "$@"
}

# build_crate NAME DIRECTORY: its programs come to $BUILD/target/release.
build_crate() {
	step "$1: build" enter env CARGO_TARGET_DIR="$BUILD/target" CARGO_TERM_COLOR=never \
		cargo build --release --locked --manifest-path "$TOP/$2/Cargo.toml"
}
