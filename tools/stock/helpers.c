// SPDX-License-Identifier: GPL-2.0
/*
 * rust/helpers/perf.c for a module, which can not name all that it names.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <generated/utsversion.h>
#include <linux/sched.h>
#include <linux/tracepoint.h>
#include <linux/uprobes.h>
#include <linux/utsname.h>
#include <trace/events/sched.h>
#include <trace/events/signal.h>

/*
 * The tracepoints are not exported. A module finds them as any other user of tracepoints does that
 * is not built in: by walking them.
 */
struct lookup {
	const char *name;
	struct tracepoint *tp;
};

static void match(struct tracepoint *tp, void *priv)
{
	struct lookup *lookup = priv;

	if (!strcmp(tp->name, lookup->name))
		lookup->tp = tp;
}

static struct tracepoint *find_tracepoint(const char *name)
{
	struct lookup lookup = { .name = name };

	for_each_kernel_tracepoint(match, &lookup);
	return lookup.tp;
}

static int probe_register(const char *name, void *probe, void *data)
{
	struct tracepoint *tp = find_tracepoint(name);

	return tp ? tracepoint_probe_register(tp, probe, data) : -ENOENT;
}

static int probe_unregister(const char *name, void *probe, void *data)
{
	struct tracepoint *tp = find_tracepoint(name);

	return tp ? tracepoint_probe_unregister(tp, probe, data) : -ENOENT;
}

#define register_trace_sched_switch(probe, data) \
	probe_register("sched_switch", probe, data)
#define unregister_trace_sched_switch(probe, data) \
	probe_unregister("sched_switch", probe, data)
#define register_trace_sched_process_fork(probe, data) \
	probe_register("sched_process_fork", probe, data)
#define unregister_trace_sched_process_fork(probe, data) \
	probe_unregister("sched_process_fork", probe, data)
#define register_trace_signal_deliver(probe, data) \
	probe_register("signal_deliver", probe, data)
#define unregister_trace_signal_deliver(probe, data) \
	probe_unregister("signal_deliver", probe, data)

#define __rust_helper

/* Nothing in C calls these. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC diagnostic ignored "-Wmissing-declarations"

#include "../../rust/helpers/irqflags.c"
#include "../../rust/helpers/perf.c"

/* As in kernel/events/uprobes.c; compared with the running kernel's when this is built. */
struct xol_area {
	wait_queue_head_t	wq;
	unsigned long		*bitmap;
	struct page		*page;
	unsigned long		vaddr;
};

unsigned long rust_helper_uprobe_get_trampoline_vaddr(void)
{
	struct xol_area *area = READ_ONCE(current->mm->uprobes_state.xol_area);

	return area ? area->vaddr : UPROBE_NO_TRAMPOLINE_VADDR;
}

int rust_helper_check_kernel(void)
{
	if (!strcmp(init_utsname()->version, UTS_VERSION))
		return 0;
	pr_err("built for the kernel %s\n", UTS_VERSION);
	pr_err("but this is          %s: build it again\n", init_utsname()->version);
	return -ENOEXEC;
}
