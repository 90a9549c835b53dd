# SPDX-License-Identifier: GPL-2.0
#
# The one command surface. Everything it does is in tools/; objects are in build/ and in the cache.

export KERNEL KERNEL_SRC TOOLCHAIN DEBIAN_MIRROR V ACCEL VM_TIMEOUT CMD SUITES TESTS BOCHS
# Set only if the user has: an empty one means something else.
ifdef MODULE
export MODULE
endif
ifdef MODULE_ARGS
export MODULE_ARGS
endif

.DEFAULT_GOAL := help
.PHONY: run test torture kernel module deb perf vm bench check patches series clean distclean help

help:
	@sed -n 's/^#> \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

#> AUX sampling for Linux perf in Rust, and soft_pt: Intel PT traces without the hardware.
#>
#>   make run        build what is missing, boot the VM, record two programs and show what perf decodes
#>   make test       every test; ends with the line "N passed, N failed, N skipped"
#>   make torture    the random and repeated tests at length; MINUTES=N for each part, SEED=N, PARTS='…'
#>   make vm         a shell in the VM with soft_pt loaded as intel_pt; CMD='…' runs that instead
#>   make deb        a Debian package that builds soft_pt for the kernel it is installed on
#>   make perf       one with a perf that records soft_pt on AMD and other processors than Intel's
#>
#> With KERNEL=stock, run, test and vm take Debian's own kernel instead of building one.
#>
#>   make kernel     the kernel with this tree in it          make check     style, lints and documentation
#>   make module     soft_pt.ko, or that of MODULE=           make bench     the speed table
#>   make patches    check that the patch series applies      make clean     remove build/
#>   make series     all of it as patches, to be sent          make distclean remove the cache too
#>
#> Variables: SUITES='NAME…' TESTS='NAME…' (for test)  KERNEL=product|debug|stock  KERNEL_SRC=DIR
#>            COMMITS=all|'NUMBER…' (for series: builds each commit, or these)
#>            MODULE=NAME|DIR (for module and vm: a sample of samples/rust, or the directory of a driver)
#>            BOCHS=PROGRAM (for the suite bochs: an emulator with FRED and shadow stacks)
#>            DEBIAN_MIRROR=URL  TOOLCHAIN=host|root  ACCEL=kvm|tcg  VM_TIMEOUT=SECONDS  MODULE_ARGS='name=soft_pt'  V=1
#> make returns 2 for any failure; tools/vm/run -- 'COMMAND' returns the command's own status.
#> The first run makes a Debian 13 toolchain and a kernel in $XDG_CACHE_HOME/perf-aux-rust.

run:
	@tools/vm/demo

test:
	@tools/test $(SUITES)

torture:
	@tools/torture $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(PARTS)

kernel:
	@tools/kernel/image

module:
	@tools/kernel/module $(MODULE)

deb:
	@tools/debian/package

perf:
	@tools/debian/perf --package

vm:
	@tools/vm/run $(if $(CMD),-- "$$CMD")

bench:
	@tools/bench

check:
	@tools/check

patches:
	@tools/kernel/try-patches

series:
	@tools/kernel/series $(if $(COMMITS),--build $(filter-out all,$(COMMITS)))

clean:
	@rm -rf build

distclean: clean
	@tools/kernel/clean-cache
