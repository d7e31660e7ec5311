/* Which instruction sets this build and this machine have. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "internal.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

/* Best first. */
static const struct isa built[] = {
#if defined(__aarch64__)
    {"dotprod", &neon_ops, &dotprod_dots},
    {"neon", &neon_ops, NULL},
#elif defined(__x86_64__)
    {"vnni", &avx512_ops, &vnni_dots},
    {"avx512_vnni", &avx512_ops, &avx512_vnni_dots},
    {"avx512", &avx512_ops, &avx512_dots},
#ifdef HAS_AVXVNNI
    {"avxvnni", &avx2_ops, &avxvnni_dots},
#endif
    {"avx2", &avx2_ops, &avx2_dots},
    {"avx2_float", &avx2_ops, NULL},
#endif
    {"portable", &portable_ops, NULL},
};
enum { BUILT = sizeof built / sizeof *built };

static const struct isa *_Atomic chosen;
static char names[BUILT * sizeof built->name]; /* each with a comma, or the final zero */
static pthread_once_t named = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
/* Two features that __builtin_cpu_supports has no names for in many compilers. That registers of 32
   bytes are in use it says with "avx2". */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

#ifdef HAS_AVXVNNI
static int has_avxvnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 && /* a: the last subleaf */
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif
#endif

static int can_run(const struct isa *isa)
{
#if defined(__aarch64__) && defined(__linux__)
    if (isa->dots != NULL)
        return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && !defined(__APPLE__) /* every Apple processor has it */
    if (isa->dots != NULL)
        return 0;
#elif defined(__x86_64__)
    __builtin_cpu_init();
    if (isa->dots == &vnni_dots && !__builtin_cpu_supports("avx512vbmi"))
        return 0;
    if ((isa->dots == &vnni_dots || isa->dots == &avx512_vnni_dots) &&
        !__builtin_cpu_supports("avx512vnni"))
        return 0;
#ifdef HAS_AVXVNNI
    if (isa->dots == &avxvnni_dots && !has_avxvnni())
        return 0;
#endif
    if (isa->ops == &avx512_ops)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
    if (isa->ops == &avx2_ops)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
    return isa->ops != NULL;
}

const struct isa *current_isa(void)
{
    const struct isa *isa = atomic_load_explicit(&chosen, memory_order_relaxed); /* of constants */
    if (isa == NULL) {
        for (isa = built; !can_run(isa);)
            isa++;
        const struct isa *none = NULL; /* what another thread has chosen meanwhile stays */
        if (!atomic_compare_exchange_strong(&chosen, &none, isa))
            isa = none;
    }
    return isa;
}

static void write_names(void)
{
    for (int k = 0; k < BUILT; k++)
        if (can_run(&built[k])) {
            if (names[0] != 0)
                strcat(names, ",");
            strcat(names, built[k].name);
        }
}

const char *tightkv_supported(void)
{
    pthread_once(&named, write_names);
    return names;
}

const char *tightkv_chosen(void) { return current_isa()->name; }

int tightkv_use(const char *name)
{
    for (int k = 0; k < BUILT; k++)
        if (can_run(&built[k]) && strcmp(built[k].name, name) == 0) {
            atomic_store(&chosen, &built[k]);
            return 0;
        }
    return -1;
}
