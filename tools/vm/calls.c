// SPDX-License-Identifier: GPL-2.0
/*
 * The small program of "make run", with a flow that a reader can check by eye: a loop that calls
 * one of three functions through a table, one of them recursive, one with a branch that goes
 * both ways.
 */

#include <stdio.h>
#include <stdlib.h>

#define noinline __attribute__((__noinline__))

typedef unsigned long (*step_fn)(unsigned long n);

static noinline unsigned long fibonacci(unsigned long n)
{
	return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

static noinline unsigned long collatz(unsigned long n)
{
	unsigned long steps = 0;

	while (n != 1) {
		if (n & 1)
			n = 3 * n + 1;
		else
			n /= 2;
		steps++;
	}
	return steps;
}

static noinline unsigned long square(unsigned long n)
{
	return n * n;
}

static const step_fn table[] = { fibonacci, collatz, square };

int main(int argc, char **argv)
{
	unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 0) : 100;
	unsigned long sum = 0;
	unsigned long i;

	for (i = 0; i < rounds; i++)
		sum += table[i % 3](i % 9 + 1);
	printf("%lu\n", sum);
	return 0;
}
