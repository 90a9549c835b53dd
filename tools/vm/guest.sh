# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# Sourced in the VM before a command or an interactive shell: loads the module under test.
# The environment comes from tools/vm/run.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/tmp

# Fast, and with more features than the root's own file system. A checkout under /tmp stays there, and
# so does the directory of --out.
shared=()
for dir in "$TOP" ${OUT:+"$OUT"}; do
	[[ $dir != /tmp/* ]] || shared+=("$dir")
done
for i in "${!shared[@]}"; do
	mkdir -p "/run/shared/$i"
	mount --bind "${shared[i]}" "/run/shared/$i"
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
for i in "${!shared[@]}"; do
	mkdir -p "${shared[i]}"
	mount --move "/run/shared/$i" "${shared[i]}"
done

# guest_step NAME: what the run is doing, for the message of a run that hangs.
guest_step() {
	echo "<6>vm-step: $*" >/dev/kmsg
}
export -f guest_step

if [ -n "${MODULE:-}" ]; then
	export PERF_AUX_MODULE=$MODULE
	guest_step "load ${MODULE##*/}"
	# shellcheck disable=SC2086
	insmod "$MODULE" $MODULE_ARGS || {
		dmesg | tail -n 10
		echo "error: ${MODULE##*/} could not be loaded (see the kernel's words above)"
		exit 1
	} >&2
	for more in ${MORE_MODULES:-}; do
		insmod "$more" || exit 1
	done
fi
guest_step "run the command"
