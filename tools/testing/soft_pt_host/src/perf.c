// SPDX-License-Identifier: GPL-2.0
/*
 * What the perf tool's Intel PT decoder makes of a trace, told step by step.
 *
 * It is C because it needs the decoder's own headers, which belong to no ABI.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "intel-pt-decoder.h"
#include "intel-pt-insn-decoder.h"

enum soft_pt_step {
	SOFT_PT_ENABLED,
	SOFT_PT_INSN,
	SOFT_PT_DISABLED,
	SOFT_PT_ASYNC_DISABLED,
	SOFT_PT_ASYNC_BRANCH,
	SOFT_PT_OVERFLOW,
	SOFT_PT_ERROR,
};

struct soft_pt_decode {
	const unsigned char *trace;
	size_t len;
	bool return_compression;
	bool branch_enable;
	/* Copies code and tells whether it is 64-bit; returns its length. */
	size_t (*read)(void *ctx, uint64_t ip, unsigned char *buf, size_t len, bool *wide);
	void (*step)(void *ctx, int step, uint64_t a, uint64_t b);
	void *ctx;
};

static int get_trace(struct intel_pt_buffer *buffer, void *data)
{
	struct soft_pt_decode *d = data;

	buffer->buf = d->trace;
	buffer->len = d->len;
	d->len = 0;
	return 0;
}

static int walk_insn(struct intel_pt_insn *insn, uint64_t *insn_cnt, uint64_t *ip,
		     uint64_t to_ip, uint64_t max_insn_cnt, void *data)
{
	struct soft_pt_decode *d = data;
	uint64_t count = 0;

	insn->length = 0;
	insn->op = INTEL_PT_OP_OTHER;
	insn->branch = INTEL_PT_BR_NO_BRANCH;

	while (!to_ip || *ip != to_ip) {
		unsigned char buf[INTEL_PT_INSN_BUF_SZ];
		bool wide;
		size_t len;

		len = d->read(d->ctx, *ip, buf, sizeof(buf), &wide);
		if (!len || intel_pt_get_insn(buf, len, wide, insn))
			return -22; /* EINVAL, as perf's own */
		d->step(d->ctx, SOFT_PT_INSN, *ip, wide);
		count++;
		if (insn->branch != INTEL_PT_BR_NO_BRANCH)
			break;
		if (max_insn_cnt && count >= max_insn_cnt)
			break;
		*ip += insn->length;
		if (to_ip && *ip == to_ip) {
			insn->length = 0;
			insn->op = INTEL_PT_OP_OTHER;
		}
	}
	*insn_cnt = count;
	return 0;
}

int soft_pt_perf_decode(struct soft_pt_decode *d)
{
	struct intel_pt_params params = {
		.get_trace = get_trace,
		.walk_insn = walk_insn,
		.data = d,
		.return_compression = d->return_compression,
		.branch_enable = d->branch_enable,
	};
	struct intel_pt_decoder *decoder = intel_pt_decoder_new(&params);

	if (!decoder)
		return -1;
	for (;;) {
		const struct intel_pt_state *state = intel_pt_decode(decoder);
		bool async = state->flags & INTEL_PT_ASYNC;

		if (state->err == INTEL_PT_ERR_NODATA)
			break;
		if (state->err == INTEL_PT_ERR_OVR) {
			d->step(d->ctx, SOFT_PT_OVERFLOW, 0, 0);
			continue;
		}
		if (state->err) {
			d->step(d->ctx, SOFT_PT_ERROR, state->err, state->from_ip);
			break;
		}
		if (state->type & INTEL_PT_TRACE_BEGIN)
			d->step(d->ctx, SOFT_PT_ENABLED, state->to_ip, 0);
		else if (state->type & INTEL_PT_TRACE_END)
			d->step(d->ctx, async ? SOFT_PT_ASYNC_DISABLED : SOFT_PT_DISABLED,
				state->from_ip, 0);
		else if ((state->type & INTEL_PT_BRANCH) && async)
			d->step(d->ctx, SOFT_PT_ASYNC_BRANCH, state->from_ip, state->to_ip);
	}
	intel_pt_decoder_free(decoder);
	return 0;
}
