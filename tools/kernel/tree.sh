# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# The work tree of one kernel: pristine source + patches + this repo's files, and its objects.
# Sourced after tools/lib.sh and toolchain.sh. It lives in the cache, is shared by all checkouts and
# brought to the state of one of them under its lock, so that make only redoes what differs.
#
#   $tree/src       source: hard links to the pristine one, except what patches and overlay changed
#   $tree/obj       objects (O=)
#   $tree/managed   list of the files that patches and overlay put into src
#   $tree/state     key of the image that obj holds, absent while it is being changed

KERNEL=${KERNEL:-product}

if [[ $KERNEL == stock* ]]; then
	. "$TOP/tools/stock/tree.sh"
	return
fi

patches() {
	find "$TOP/tools/kernel/patches" -maxdepth 1 -name '*.patch' | LC_ALL=C sort
}

# Config fragments of this kernel, in the order in which later ones win.
fragments() {
	local name
	for name in base product "$KERNEL"; do
		[ -f "$TOP/tools/kernel/config/$name.config" ] ||
			die "KERNEL=$KERNEL: there is no tools/kernel/config/$name.config." \
				"Kernels: $(cd "$TOP/tools/kernel/config" && echo *.config | sed 's/\.config//g; s/base *//')"
		printf '%s\n' "$TOP/tools/kernel/config/$name.config"
	done | awk '!seen[$0]++'
}

fragments >/dev/null

# Files of this repo that are laid over the kernel tree, relative to the top.
overlay() (
	cd "$TOP" || exit
	find rust samples Documentation tools/testing \
		-name target -prune -o -type f '(' ! -name '.*' -o -name .gitignore ')' ! -name '*.o' ! -name '*.ko' ! -name '*.mod*' -print 2>/dev/null |
		LC_ALL=C sort || true
)

# Of those, what the kernel image depends on: modules and what is only read or run later are not.
image_overlay() {
	overlay | sed -E '/^(Documentation|tools)\/|^samples\/rust\/.*\.rs$/d'
}

contents() {
	(cd "$TOP" && xargs -r -d '\n' sha256sum)
}

kernel_paths() {
	SRC=$("$TOP/tools/kernel/source")
	tree=$CACHE/tree-$KERNEL-$(printf '%s\n' "$(basename "$SRC")" "$(toolchain_key)" | digest)
	image_key=$({
		basename "$tree"
		# Debian's source is named by its version; any other may change under its name.
		[ -z "${KERNEL_SRC:-}" ] || find "$SRC" -type f -printf '%P %s %T@\n' | LC_ALL=C sort
		fragments | contents | cut -d' ' -f1
		patches | contents | cut -d' ' -f1
		image_overlay | contents
	} | digest)
	# shellcheck disable=SC2034
	image=$CACHE/image-$image_key
}

# stage: writes into $tree/stage each file that differs from the pristine source.
stage() {
	local stage=$tree/stage file patch
	rm -rf "$stage"
	mkdir -p "$stage"
	: >"$tree/managed.new"
	while read -r patch; do
		sed -nE 's,^(---|\+\+\+) [ab]/([^\t]*).*,\2,p' "$patch"
	done < <(patches) | LC_ALL=C sort -u | while read -r file; do
		printf '%s\n' "$file" >>"$tree/managed.new"
		[ ! -f "$SRC/$file" ] || (cd "$SRC" && cp --parents -p "$file" "$stage")
	done
	while read -r patch; do
		patch -d "$stage" -p1 -s -F0 -t --no-backup-if-mismatch <"$patch" >"$LOG/patch.log" 2>&1 || {
			sed 's/^/    | /' "$LOG/patch.log" >&2
			die "the patch ${patch#"$TOP"/} does not apply to $(basename "$SRC")." \
				"Refresh it for this kernel version, or build the version it was made for."
		}
	done < <(patches)
	while read -r file; do
		[ ! -e "$SRC/$file" ] ||
			die "$file would hide a file that the kernel source has." "Change the kernel's own files by a patch in tools/kernel/patches."
		printf '%s\n' "$file" >>"$tree/managed.new"
	done < <(overlay)
	(cd "$TOP" && overlay | xargs -r -d '\n' cp --parents -p -t "$stage")
}

# place FROM TO: copies when the contents differ, with a new time and never through a hard link.
place() {
	cmp -s "$1" "$2" && return
	mkdir -p "$(dirname "$2")"
	rm -f "$2"
	cp "$1" "$2"
}

# sync_tree: brings $tree/src to this checkout's state. Files whose contents stay keep their time.
sync_tree() {
	local file
	if [ ! -d "$tree/src" ]; then
		rm -rf "$tree/src.part"
		mkdir -p "$tree"
		cp -al "$SRC" "$tree/src.part" 2>/dev/null || cp -a "$SRC" "$tree/src.part"
		mv "$tree/src.part" "$tree/src"
		rm -f "$tree/managed"
	elif [ -n "${KERNEL_SRC:-}" ]; then
		touch "$tree/managed"
		sed 's,^,/,' "$tree/managed" >"$tree/exclude"
		enter rsync -a --delete --exclude-from="$tree/exclude" "$SRC/" "$tree/src/"
	fi
	stage
	# Written before the tree changes, so that an interrupted run still knows what it may have put there.
	touch "$tree/managed"
	LC_ALL=C sort -u "$tree/managed.new" "$tree/managed" >"$tree/managed.all"
	mv "$tree/managed.all" "$tree/managed"
	while read -r file; do
		if [ -e "$tree/stage/$file" ]; then
			place "$tree/stage/$file" "$tree/src/$file"
		elif [ -e "$SRC/$file" ] && ! grep -qxF "$file" "$tree/managed.new"; then
			place "$SRC/$file" "$tree/src/$file"
		else
			rm -f "$tree/src/$file"
		fi
	done <"$tree/managed"
	mv "$tree/managed.new" "$tree/managed"
}

kmake() {
	enter make -C "$tree/src" O="$tree/obj" LLVM=1 \
		KBUILD_BUILD_USER=perf KBUILD_BUILD_HOST=aux "$@"
}

# allnoconfig with KCONFIG_ALLCONFIG gives what olddefconfig would, and no symbol that nobody asked for.
# Run under step, where the shell does not stop at errors by itself.
configure() {
	local fragment=()
	mapfile -t fragment < <(fragments)
	cat "${fragment[@]}" >"$tree/allconfig" &&
		kmake -s KCONFIG_CONFIG="$tree/config.new" KCONFIG_ALLCONFIG="$tree/allconfig" allnoconfig &&
		enter "$TOP/tools/kernel/check-config" "$tree/config.new" "${fragment[@]}" || return
	cmp -s "$tree/config.new" "$tree/obj/.config" || cp "$tree/config.new" "$tree/obj/.config"
}

# build_tree: makes the objects of this checkout's kernel in the tree, whose lock is held.
build_tree() {
	[ ! -e "$tree/state" ] || [ "$(cat "$tree/state")" != "$image_key" ] || return 0
	rm -f "$tree/state"
	need_space "$CACHE" 3 "the kernel build"
	# A file may be edited while it is copied: what is built must be what the key names.
	local key
	while sync_tree; do
		key=$image_key
		kernel_paths
		[ "$key" != "$image_key" ] || break
	done
	mkdir -p "$tree/obj"
	key=$(cd "$tree/stage" && { fragments; find . -name 'Kconfig*'; } | LC_ALL=C sort | xargs -r -d '\n' sha256sum | digest)
	if [ -n "${KERNEL_SRC:-}" ] || [ "$(cat "$tree/configured" 2>/dev/null)" != "$key" ]; then
		rm -f "$tree/configured"
		step "configure the $KERNEL kernel" configure || exit 1
		printf '%s\n' "$key" >"$tree/configured"
	fi
	step "build the $KERNEL kernel" kmake -j"$(nproc)" bzImage modules_prepare || exit 1
	cp "$tree/obj/vmlinux.symvers" "$tree/obj/Module.symvers"
	printf '%s\n' "$image_key" >"$tree/state"
}
