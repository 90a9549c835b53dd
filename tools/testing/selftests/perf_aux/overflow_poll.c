// SPDX-License-Identifier: GPL-2.0
/* Overflow notification by poll(): the event must have a ring buffer. */
#define _GNU_SOURCE
#include <err.h>
#include <linux/perf_event.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_SW_TASK_CLOCK,
		.sample_period = 10000000,	/* 10 ms of CPU time */
		.sample_type = PERF_SAMPLE_IP,
		.wakeup_events = 1,
		.exclude_kernel = 1,
		.exclude_hv = 1,
	};
	long page = sysconf(_SC_PAGESIZE);
	struct perf_event_mmap_page *ring;
	struct pollfd pfd = { .events = POLLIN };
	int n = 0, status = 1;
	__u64 head;
	pid_t pid;

	pid = fork();
	if (pid < 0)
		err(1, "fork");
	while (!pid)	/* the child is what is observed */
		;

	pfd.fd = syscall(SYS_perf_event_open, &attr, pid, -1, -1, PERF_FLAG_FD_CLOEXEC);
	if (pfd.fd < 0) {
		warn("perf_event_open");
		goto out;
	}

	/* Nothing to wait for yet: this does not take the second it could. */
	poll(&pfd, 1, 1000);
	printf("without a ring buffer: %s\n", pfd.revents == POLLHUP ? "POLLHUP" : "?");

	ring = mmap(NULL, page * (1 + 8), PROT_READ | PROT_WRITE, MAP_SHARED, pfd.fd, 0);
	if (ring == MAP_FAILED) {
		warn("mmap");
		goto out;
	}
	while (n < 5) {
		if (poll(&pfd, 1, 10000) != 1 || !(pfd.revents & POLLIN)) {
			warnx("poll: revents %#x", pfd.revents);
			goto out;
		}
		head = __atomic_load_n(&ring->data_head, __ATOMIC_ACQUIRE);
		printf("wake-up %d: POLLIN, %llu bytes of records\n", ++n,
		       (unsigned long long)(head - ring->data_tail));
		/* Reading the records goes here; then their room is given back. */
		__atomic_store_n(&ring->data_tail, head, __ATOMIC_RELEASE);
	}
	status = 0;
out:
	kill(pid, SIGKILL);
	return status;
}
