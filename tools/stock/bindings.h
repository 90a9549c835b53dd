/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What kernel::perf needs of C and the bindings of a kernel without it lack. The same headers as
 * tools/kernel/patches adds to rust/bindings/bindings_helper.h.
 */
#include <linux/hrtimer_types.h>
#include <linux/kdebug.h>
#include <linux/perf_event.h>
#include <linux/uprobes.h>
#include <linux/user-return-notifier.h>
#include <../../kernel/events/internal.h>
#include <asm/debugreg.h>
#include <asm/insn.h>
#include <asm/trapnr.h>

/* As arch/x86/include/asm/step.h, which a patch of tools/kernel/patches adds. */
enum {
	STEPPER_TF	= _TIF_FORCED_TF,
	STEPPER_TF_MASK	= _TIF_FORCED_TF | _TIF_SINGLESTEP,
};

#include "helpers.c"
