/* Which instruction sets this build and this machine have. */
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

static const struct isa *chosen;

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
    if (isa->dots == &vnni_dots &&
        !(__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi")))
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
    for (int k = 0; chosen == NULL; k++)
        if (can_run(&built[k]))
            chosen = &built[k];
    return chosen;
}

const char *tightkv_supported(void)
{
    static char names[64];
    if (names[0] == 0)
        for (int k = 0; k < BUILT; k++)
            if (can_run(&built[k])) {
                if (names[0] != 0)
                    strcat(names, ",");
                strcat(names, built[k].name);
            }
    return names;
}

const char *tightkv_chosen(void) { return current_isa()->name; }

int tightkv_use(const char *name)
{
    for (int k = 0; k < BUILT; k++)
        if (can_run(&built[k]) && strcmp(built[k].name, name) == 0) {
            chosen = &built[k];
            return 0;
        }
    return -1;
}
