// SPDX-License-Identifier: GPL-2.0
/* Overflow notification by signal: no ring buffer is needed. */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int main(void)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_SW_TASK_CLOCK,
		.sample_period = 10000000,	/* 10 ms of CPU time */
		.disabled = 1,
		.exclude_kernel = 1,
		.exclude_hv = 1,
	};
	struct timespec none = { 0 };
	int fd, sig = SIGRTMIN, n = 0;
	siginfo_t info;
	sigset_t set;

	/* A real-time signal, so that it is queued and says where it is from. */
	sigemptyset(&set);
	sigaddset(&set, sig);
	sigprocmask(SIG_BLOCK, &set, NULL);

	fd = syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
	if (fd < 0)
		err(1, "perf_event_open");
	if (fcntl(fd, F_SETOWN, getpid()) < 0 || fcntl(fd, F_SETSIG, sig) < 0 ||
	    fcntl(fd, F_SETFL, O_ASYNC) < 0)
		err(1, "fcntl");
	if (ioctl(fd, PERF_EVENT_IOC_ENABLE, 0) < 0)
		err(1, "PERF_EVENT_IOC_ENABLE");

	while (n < 5) {
		if (sigtimedwait(&set, &info, &none) == sig)
			printf("overflow %d of fd %d: %s\n", ++n, info.si_fd,
			       info.si_code == POLL_IN ? "POLL_IN" : "?");
	}
	return 0;
}
