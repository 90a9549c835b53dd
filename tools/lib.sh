# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# What every script under tools/ shares: places, messages, timed steps, locks and keys.
# Sourced, never run. V=1 streams the output that otherwise goes to build/log/.

set -euo pipefail

TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=$TOP/build
LOG=$BUILD/log
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/perf-aux-rust
V=${V:-0}
export TOP

mkdir -p "$LOG" "$CACHE"

say() {
	printf '%s\n' "$*" >&2
}

# die MESSAGE [WHAT TO DO]
die() {
	printf '\nerror: %s\n' "$1" >&2
	[ $# -lt 2 ] || printf '       %s\n' "${@:2}" >&2
	exit 1
}

# Prints "1m05s" for 65.
duration() {
	if [ "$1" -ge 60 ]; then
		printf '%dm%02ds' $(($1 / 60)) $(($1 % 60))
	else
		printf '%ds' "$1"
	fi
}

# Says every 15 seconds how far the step writing to a log has come: objects for a build, else lines.
heartbeat() {
	local log=$1 name=$2 start=$SECONDS objects
	while sleep 15; do
		objects=$(grep -cE '^  (CC|AS|RUSTC|LD|AR|BINDGEN|HOSTCC|HOSTRUSTC)[ A-Z[]' "$log" 2>/dev/null || true)
		if [ "${objects:-0}" -gt 0 ]; then
			printf '    %s: %s, %s objects\n' "$name" "$(duration $((SECONDS - start)))" "$objects" >&2
		else
			printf '    %s: %s, %s\n' "$name" "$(duration $((SECONDS - start)))" \
				"$(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c1-90)" >&2
		fi
	done
}

# step NAME COMMAND…: runs a long command with its output in build/log/NAME.log and prints its
# time. Returns the command's status, after showing the end of the log when it failed.
step() {
	local name=$1 log=$LOG/${1//[^A-Za-z0-9._-]/-}.log start=$SECONDS rc=0 beat
	shift
	printf '==> %s\n' "$name" >&2
	if [ "$V" = 1 ]; then
		"$@" </dev/null > >(tee "$log" >&2) 2>&1 || rc=$?
	else
		: >"$log"
		# Its last sleep may outlive it, and must not hold the caller's locks.
		heartbeat "$log" "$name" 7>&- 8>&- 9>&- &
		beat=$!
		"$@" </dev/null >"$log" 2>&1 || rc=$?
		kill "$beat" 2>/dev/null || true
		wait "$beat" 2>/dev/null || true
	fi
	if [ "$rc" -ne 0 ]; then
		if [ "$V" != 1 ]; then
			say "    the end of the log:"
			tail -n 25 "$log" | sed 's/^/    | /' >&2
		fi
		say "    $name failed after $(duration $((SECONDS - start))); the whole log is $log"
	else
		say "    $name: $(duration $((SECONDS - start)))"
	fi
	return "$rc"
}

# lock FILE FD: waits for the exclusive lock, and says so when somebody else holds it.
lock() {
	eval "exec $2>'$1'"
	flock -n "$2" || {
		say "    waiting for another run that holds $1"
		flock "$2"
	}
}

# Short key of what arrives on standard input.
digest() {
	sha256sum | cut -c1-16
}

# need_space DIRECTORY GIB WHAT
need_space() {
	local have
	have=$(df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }')
	[ "$have" -ge "$2" ] ||
		die "$3 needs $2 GiB free in $1, and there are $have." \
			"Free some, run 'make distclean', or set XDG_CACHE_HOME to a larger file system."
}
