/* Tasks taken one by one by a team of threads: torch's own team where it can be had. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "internal.h"

#define MOST_THREADS 256

static void (*_Atomic shared_parallel)(void (*)(void *), void *, unsigned, unsigned);

void tightkv_share_threads(void (*parallel)(void (*)(void *), void *, unsigned, unsigned))
{
    shared_parallel = parallel;
}

struct team {
    const struct work *work;
    _Atomic int64_t next;
    _Atomic int failed;
};

static void join(void *context)
{
    struct team *team = context;
    const struct work *work = team->work;
    void *own = NULL;
    int64_t task;
    while ((task = atomic_fetch_add(&team->next, 1)) < work->tasks) {
        if (own == NULL && (own = work->open(work->context)) == NULL) {
            atomic_store(&team->failed, 1);
            return;
        }
        work->body(work->context, own, task);
    }
    if (own != NULL)
        work->close(own);
}

static void *join_thread(void *context)
{
    join(context);
    return NULL;
}

static void own_parallel(struct team *team, int64_t threads)
{
    pthread_t started[MOST_THREADS];
    int64_t count = 0;
    while (count + 1 < least(threads, MOST_THREADS) &&
           pthread_create(&started[count], NULL, join_thread, team) == 0)
        count++;
    join(team);
    while (count > 0)
        pthread_join(started[--count], NULL);
}

int run_tasks(const struct work *work, int64_t threads)
{
    struct team team = {work, 0, 0};
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = shared_parallel;
    if (threads < 2 || work->tasks < 2)
        join(&team);
    else if (parallel != NULL)
        parallel(join, &team, (unsigned)threads, 0);
    else
        own_parallel(&team, threads);
    return atomic_load(&team.failed) ? -1 : 0;
}
