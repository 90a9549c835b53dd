// SPDX-License-Identifier: GPL-2.0
/* A limited number of overflows: PERF_EVENT_IOC_REFRESH. */
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
	int fd, sig = SIGRTMIN, round, hup;
	siginfo_t info;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, sig);
	sigprocmask(SIG_BLOCK, &set, NULL);

	fd = syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
	if (fd < 0)
		err(1, "perf_event_open");
	if (fcntl(fd, F_SETOWN, getpid()) < 0 || fcntl(fd, F_SETSIG, sig) < 0 ||
	    fcntl(fd, F_SETFL, O_ASYNC) < 0)
		err(1, "fcntl");

	for (round = 1; round <= 2; round++) {
		/* Three more overflows; this also switches the event on. */
		if (ioctl(fd, PERF_EVENT_IOC_REFRESH, 3) < 0)
			err(1, "PERF_EVENT_IOC_REFRESH");
		for (hup = 0; !hup;) {
			if (sigtimedwait(&set, &info, &none) != sig)
				continue;
			hup = info.si_code == POLL_HUP;
			printf("round %d: %s\n", round, hup ? "POLL_HUP" : "POLL_IN");
		}
		/* With POLL_HUP the event has been switched off. */
	}
	return 0;
}
