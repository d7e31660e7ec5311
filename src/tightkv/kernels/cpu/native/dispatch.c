/* Which instruction sets this build and this machine have. */
#include <stddef.h>

#include "internal.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
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
    if (isa->dots == &avxvnni_dots && !__builtin_cpu_supports("avxvnni"))
        return 0;
#endif
    if (isa->ops == &avx512_ops)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
    if (isa->ops == &avx2_ops)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
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
