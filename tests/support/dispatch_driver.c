/* Threads that ask at once which instruction sets there are, for ThreadSanitizer to watch. */
#include <stdio.h>

#include "dispatch.c"

/* The tables themselves, which dispatch only compares: no kernel runs here. */
const struct ops portable_ops;
#if defined(__aarch64__)
const struct ops neon_ops;
const struct dots dotprod_dots;
#elif defined(__x86_64__)
const struct ops avx2_ops, avx512_ops;
const struct dots vnni_dots, avx512_vnni_dots, avx512_dots, avxvnni_dots, avx2_dots;
#endif

enum { THREADS = 4 };
static pthread_barrier_t start;

static void *ask(void *to)
{
    pthread_barrier_wait(&start);
    *(const char **)to = tightkv_supported();
    tightkv_use(tightkv_chosen());
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    const char *found[THREADS];
    pthread_barrier_init(&start, NULL, THREADS);
    for (int k = 0; k < THREADS; k++)
        pthread_create(&threads[k], NULL, ask, &found[k]);
    for (int k = 0; k < THREADS; k++)
        pthread_join(threads[k], NULL);
    puts(found[0]);
    return 0;
}
