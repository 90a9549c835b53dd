// SPDX-License-Identifier: GPL-2.0

#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <asm/irq_regs.h>

__rust_helper void rust_helper___module_get(struct module *module)
{
	__module_get(module);
}

#ifndef CONFIG_MODULE_UNLOAD
__rust_helper void rust_helper_module_put(struct module *module)
{
	module_put(module);
}
#endif

__rust_helper void rust_helper_on_each_cpu(smp_call_func_t func, void *info, int wait)
{
	on_each_cpu(func, info, wait);
}

#ifdef CONFIG_PERF_EVENTS

__rust_helper struct pt_regs *rust_helper_get_irq_regs(void)
{
	return get_irq_regs();
}

__rust_helper int rust_helper_user_mode(struct pt_regs *regs)
{
	return user_mode(regs);
}

__rust_helper bool rust_helper_is_idle_task(const struct task_struct *task)
{
	return is_idle_task(task);
}

__rust_helper void rust_helper_perf_sample_data_init(struct perf_sample_data *data,
						     u64 addr, u64 period)
{
	perf_sample_data_init(data, addr, period);
}

#endif /* CONFIG_PERF_EVENTS */

#ifdef CONFIG_X86_64

#include <asm/cpufeature.h>
#include <asm/msr.h>
#include <asm/segment.h>
#include <linux/sched/task_stack.h>
#include <linux/uaccess.h>
#include <linux/uprobes.h>
#include <trace/events/sched.h>
#include <trace/events/signal.h>

__rust_helper struct pt_regs *rust_helper_task_pt_regs(struct task_struct *task)
{
	return task_pt_regs(task);
}

__rust_helper int rust_helper_test_tsk_thread_flag(struct task_struct *task, int flag)
{
	return test_tsk_thread_flag(task, flag);
}

__rust_helper void rust_helper_set_tsk_thread_flag(struct task_struct *task, int flag)
{
	set_tsk_thread_flag(task, flag);
}

__rust_helper void rust_helper_clear_tsk_thread_flag(struct task_struct *task, int flag)
{
	clear_tsk_thread_flag(task, flag);
}

/* 64 or 32, or 0 if the segment of the code, or of the stack of 32-bit code, may have a base. */
__rust_helper unsigned int rust_helper_user_code_bits(struct pt_regs *regs)
{
	if (user_64bit_mode(regs))
		return 64;

	return regs->cs == __USER32_CS && regs->ss == __USER_DS ? 32 : 0;
}

__rust_helper bool rust_helper_is_xen_pv(void)
{
	return cpu_feature_enabled(X86_FEATURE_XENPV);
}

/* What FRED says of the event that the registers were saved for, or NULL without FRED. */
__rust_helper struct fred_ss *rust_helper_fred_ss(struct pt_regs *regs)
{
	return cpu_feature_enabled(X86_FEATURE_FRED) ? &regs->fred_ss : NULL;
}

__rust_helper bool rust_helper_get_user_nofault(u64 *to, const u64 __user *from)
{
	int err;

	pagefault_disable();
	err = get_user(*to, from);
	pagefault_enable();

	return !err;
}

__rust_helper u64 rust_helper_rdtsc(void)
{
	return rdtsc();
}

#ifdef CONFIG_TRACEPOINTS

__rust_helper int
rust_helper_register_trace_sched_switch(void (*probe)(void *data, bool preempt,
						      struct task_struct *prev,
						      struct task_struct *next,
						      unsigned int prev_state),
					void *data)
{
	return register_trace_sched_switch(probe, data);
}

__rust_helper int
rust_helper_unregister_trace_sched_switch(void (*probe)(void *data, bool preempt,
							struct task_struct *prev,
							struct task_struct *next,
							unsigned int prev_state),
					  void *data)
{
	return unregister_trace_sched_switch(probe, data);
}

__rust_helper int
rust_helper_register_trace_sched_process_fork(void (*probe)(void *data,
							    struct task_struct *parent,
							    struct task_struct *child),
					      void *data)
{
	return register_trace_sched_process_fork(probe, data);
}

__rust_helper int
rust_helper_unregister_trace_sched_process_fork(void (*probe)(void *data,
							      struct task_struct *parent,
							      struct task_struct *child),
						void *data)
{
	return unregister_trace_sched_process_fork(probe, data);
}

__rust_helper int
rust_helper_register_trace_signal_deliver(void (*probe)(void *data, int sig,
							struct kernel_siginfo *info,
							struct k_sigaction *ka),
					  void *data)
{
	return register_trace_signal_deliver(probe, data);
}

__rust_helper int
rust_helper_unregister_trace_signal_deliver(void (*probe)(void *data, int sig,
							  struct kernel_siginfo *info,
							  struct k_sigaction *ka),
					    void *data)
{
	return unregister_trace_signal_deliver(probe, data);
}

__rust_helper void rust_helper_tracepoint_synchronize_unregister(void)
{
	tracepoint_synchronize_unregister();
}

#endif /* CONFIG_TRACEPOINTS */
#endif /* CONFIG_X86_64 */

#ifdef CONFIG_PERF_AUX_RUST_COMPARE

#include <../../kernel/events/internal.h>

/* For tests of both. */
__rust_helper void rust_helper_perf_aux_choose(bool rust)
{
	if (rust)
		static_branch_enable(&perf_aux_rust_key);
	else
		static_branch_disable(&perf_aux_rust_key);
}

#endif /* CONFIG_PERF_AUX_RUST_COMPARE */
