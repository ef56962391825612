// check.h - the runner of the C tests. Each test runs in a process of its own, so that a crash, a failed check, a sanitizer's report or a leak is
// the failure of one test and the others still run.
#pragma once

#define _POSIX_C_SOURCE 200809L  // fork: included first

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// _exit: after a failed check the leak checker would only add noise.
#define CHECK(...)                                                                      \
    do {                                                                                \
        if (!(__VA_ARGS__)) {                                                           \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #__VA_ARGS__);   \
            fflush(NULL);                                                               \
            _exit(1);                                                                   \
        }                                                                               \
    } while (0)

struct test {
    const char * name;
    void         (*run)(void);
};

#define TEST(name) { #name, name }

static inline bool run_test(const struct test * test) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        test->run();
        exit(0);  // the leak checker runs here
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) {
        perror(test->name);
        return false;
    }
    const bool ok = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    printf("%s %s\n", ok ? "ok  " : "FAIL", test->name);
    return ok;
}

// With arguments, only the tests of these names.
static inline int run_tests(const struct test * tests, size_t n, int argc, char ** argv) {
    int n_run = 0, n_failed = 0;
    for (size_t i = 0; i < n; i++) {
        bool wanted = argc < 2;
        for (int a = 1; a < argc; a++) {
            wanted |= strcmp(argv[a], tests[i].name) == 0;
        }
        if (wanted) {
            n_run++;
            n_failed += !run_test(&tests[i]);
        }
    }
    printf("%d tests, %d failed\n", n_run, n_failed);
    return n_failed > 0 || n_run == 0;
}

// xorshift64*: the same traces on every machine. The state must not be 0.
static inline uint64_t next_random(uint64_t * state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545F4914F6CDD1Du;
}

// In [0, n).
static inline int32_t random_below(uint64_t * state, int32_t n) {
    return (int32_t) ((next_random(state) >> 33) % (uint64_t) n);
}

// `list` becomes a random order of 0 .. n-1.
static inline void shuffle(uint64_t * state, int32_t * list, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t j = random_below(state, i + 1);
        list[i]         = list[j];
        list[j]         = i;
    }
}
