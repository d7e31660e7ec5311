// CUDA C++ as C++ of this machine: the threads of a block are fibers, and what lanes do together
// is done when the last of them arrives. Stands before the sources, in place of ptx.cuh.
//
// Copies to shared memory happen when they are waited for, not before; dynamic shared memory is
// full of NaN when a block begins; so is memory that the kernel before is told to write, when that
// kernel is waited for. What is not seen: races between lanes of a warp that do not meet.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
struct Place {
    unsigned x, y, z;
};

namespace host {

struct Meeting {  // of `size` fibers, again and again
    int size = 0, arrived = 0;
    unsigned round = 0;
};

struct Copy {
    u32 to;
    const u8 *from;
    u32 bytes;
};

struct Barrier {
    std::vector<Copy> copies;
    u32 expected = 0, rounds = 0;
};

struct Fiber {
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it goes on
    bool begun = false;
    Place thread;
    int lane, warp;
    Meeting *at = nullptr;  // waits for the end of this round
    unsigned round = 0;
    bool done = false;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

inline std::vector<Fiber> fibers;
inline std::map<u32, Barrier> barriers;  // by address
inline Fiber *now;
inline jmp_buf scheduler;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of fibers, for all blocks
constexpr size_t STACK_BYTES = 192 << 10;
inline Place block, grid;
inline char *memory;
inline size_t memory_bytes;
inline std::vector<Meeting> warps;
inline Meeting all;
struct Late {  // what the kernel before has not written yet
    void *to;
    const void *from;
    size_t bytes;
};
inline std::vector<Late> late;
inline Meeting waiting;  // for these writes

inline void write_late() {
    for (const Late &x : late)
        if (x.from)
            memcpy(x.to, x.from, x.bytes);
        else
            memset(x.to, 0xff, x.bytes);
    late.clear();
    waiting.arrived = 0, waiting.round++;
}

inline char slots[64][2][32][128];  // what lanes show each other: warp, round, lane

inline void fail(const char *what) {
    fprintf(stderr, "cuda_on_host: %s\n", what);
    abort();
}

// Jumps, because swapcontext is two system calls.
inline void pass() {
    if (!_setjmp(now->place)) _longjmp(scheduler, 1);
}

inline __attribute__((noinline)) void go_on(Fiber &f) {
    if (_setjmp(scheduler)) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
}

inline void meet(Meeting &m) {
    const unsigned round = m.round;
    if (++m.arrived == m.size) {
        m.arrived = 0, m.round++;
        return;
    }
    now->at = &m, now->round = round;
    pass();
    now->at = nullptr;
}

// Show `mine` to the lanes of the warp; the result has those of all.
template <class T>
const T *show(const T &mine) {
    static_assert(sizeof(T) <= 128, "a slot is too small");
    Meeting &m = warps[now->warp];
    auto &slot = slots[now->warp][m.round & 1];
    // a lane's slots lie sizeof(T) apart
    memcpy((char *)slot + sizeof(T) * now->lane, &mine, sizeof(T));
    meet(m);
    return (const T *)slot;
}

#ifdef __aarch64__
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif

inline float to_float(u16 h) {
    Half x;
    memcpy(&x, &h, 2);
    return (float)x;
}

inline u16 from_float(float f) {
    const Half x = (Half)f;
    u16 h;
    memcpy(&h, &x, 2);
    return h;
}

inline float bits_to_float(u32 u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline u32 float_to_bits(float f) {
    u32 u;
    memcpy(&u, &f, 4);
    return u;
}

inline u16 to_bf16(float f) {
    const u32 u = float_to_bits(f);
    if (f != f) return 0x7fff;
    return (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline void move(const Copy &c) {
    if (c.to + c.bytes > memory_bytes) fail("a copy beyond shared memory");
    memcpy(memory + c.to, c.from, c.bytes);
}

template <class Kernel>
struct Entry {
    static inline const Kernel *kernel;
    static void run() {
        (*kernel)();
        now->done = true;
        pass();
    }
};

template <class Kernel>
void run_block(const Kernel &kernel, int threads, size_t shared) {
    std::vector<char> room(shared + 128, (char)0xff);
    memory = (char *)(((uintptr_t)room.data() + 127) & ~(uintptr_t)127);
    memory_bytes = shared;
    barriers.clear();
    fibers = std::vector<Fiber>(threads);
    warps.assign(threads / 32, {32});
    all = {threads}, waiting = {INT_MAX};
    Entry<Kernel>::kernel = &kernel;
    for (int i = 0; i < threads; i++) {
        Fiber &f = fibers[i];
        f.thread = {(unsigned)i, 0, 0}, f.lane = i % 32, f.warp = i / 32;
        if ((int)stacks.size() == i) stacks.emplace_back(new char[STACK_BYTES]);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks[i].get();
        f.context.uc_stack.ss_size = STACK_BYTES;
        f.context.uc_link = nullptr;
        makecontext(&f.context, Entry<Kernel>::run, 0);
    }
    // A warp runs for as long as it can before the next does: who relies on others must wait.
    for (bool some = true; some;) {
        some = false;
        bool ran = false;
        for (int w = 0; w < threads / 32; w++)
            for (bool more = true; more;) {
                more = false;
                const int warp = block.x % 2 ? threads / 32 - 1 - w : w;  // the last first, too
                for (int lane = 0; lane < 32; lane++) {
                    Fiber &f = fibers[32 * warp + lane];
                    if (f.done) continue;
                    some = true;
                    if (f.at && f.at->round == f.round) continue;
                    ran = more = true, now = &f;
                    go_on(f);
                }
            }
        if (some && !ran && waiting.arrived)
            write_late();  // no sooner: who has not waited may read what was there before
        else if (some && !ran)
            fail("lanes wait for lanes that do not come");
    }
}

template <class Kernel>
void launch(const int *shape, int threads, size_t shared, const Kernel &kernel) {
    grid = {(unsigned)shape[0], (unsigned)shape[1], (unsigned)shape[2]};
    for (block.z = 0; block.z < grid.z; block.z++)
        for (block.y = 0; block.y < grid.y; block.y++)
            for (block.x = 0; block.x < grid.x; block.x++) run_block(kernel, threads, shared);
}

// d (16 x 8) += a (16 x 16) b (16 x 8), as registers of lanes hold them.
inline void multiply(float *d, const float (&a)[8], const float (&b)[4]) {
    struct Operands {
        float a[8], b[4];
    } mine;
    memcpy(mine.a, a, sizeof a), memcpy(mine.b, b, sizeof b);
    const Operands *of = show(mine);
    const int g = now->lane >> 2, t = now->lane & 3;
    for (int k = 0; k < 4; k++)
        for (int s = 0; s < 4; s++) {
            const float *row = of[4 * g + s].a + 2 * (k >> 1);
            const float *column = of[4 * (2 * t + (k & 1)) + s].b;
            d[k] += row[0] * column[0] + row[1] * column[1] + row[4] * column[2] +
                    row[5] * column[3];
        }
}

}  // namespace host

#define threadIdx (host::now->thread)
#define blockIdx (host::block)
#define gridDim (host::grid)
#define blockDim (Place{(unsigned)host::fibers.size(), 1, 1})

inline float __int_as_float(u32 u) { return host::bits_to_float(u); }
inline int __float_as_int(float f) { return (int)host::float_to_bits(f); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }  // built without contraction
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline void __syncthreads() { host::meet(host::all); }
inline void __syncwarp() { host::meet(host::warps[host::now->warp]); }
inline u32 __cvta_generic_to_shared(const void *p) { return (u32)((const char *)p - host::memory); }
template <class T>
T __shfl_sync(u32, T x, int from, int width = 32) {
    return host::show(x)[(host::now->lane & ~(width - 1)) | (from & (width - 1))];
}
template <class T>
T __shfl_xor_sync(u32, T x, int bit) { return host::show(x)[host::now->lane ^ bit]; }
inline u32 __ballot_sync(u32, bool x) {
    const bool *of = host::show(x);
    u32 y = 0;
    for (int i = 0; i < 32; i++) y |= (u32)of[i] << i;
    return y;
}
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
inline bool __any_sync(u32, bool x) {
    const bool *of = host::show(x);
    return std::any_of(of, of + 32, [](bool b) { return b; });
}

// --- ptx.cuh ---
inline void grid_dependency_wait() {  // until here the kernel before may still write
    if (!host::late.empty()) host::meet(host::waiting);
}
inline void launch_dependents() {}
inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline float half_to_float(u16 h) { return host::to_float(h); }
inline u16 float_to_half(float x) { return host::from_float(x); }
inline u32 pack_half2(float low, float high) {
    return host::from_float(low) | (u32)host::from_float(high) << 16;
}
inline u32 pack_bf16x2(float low, float high) {
    return host::to_bf16(low) | (u32)host::to_bf16(high) << 16;
}
inline u32 max_half2(u32 a, u32 b) {
    return pack_half2(fmaxf(half_to_float((u16)a), half_to_float((u16)b)),
                     fmaxf(half_to_float((u16)(a >> 16)), half_to_float((u16)(b >> 16))));
}
inline u32 prmt(u32 low, u32 high, u32 select) {
    const u64 pool = low | (u64)high << 32;
    u32 y = 0;
    for (int k = 0; k < 4; k++) {
        const u32 from = select >> (4 * k);
        u8 byte = (u8)(pool >> (8 * (from & 7)));
        if (from & 8) byte = byte & 128 ? 255 : 0;
        y |= (u32)byte << (8 * k);
    }
    return y;
}
inline u32 __byte_perm(u32 low, u32 high, u32 select) { return prmt(low, high, select); }
inline u32 flip_sign_bits(u32 w) { return w ^ 0x88888888u; }
inline u32 transpose_8x8(u32 x) {
    const u32 *of = host::show(x);
    const int g = host::now->lane >> 2, t = host::now->lane & 3;
    const int half = 16 * (g & 1);
    return ((of[8 * t + g / 2] >> half) & 0xffff) | ((of[8 * t + 4 + g / 2] >> half) << 16);
}
inline void mma_f16(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
    float x[8], y[4];
    for (int k = 0; k < 8; k++) x[k] = half_to_float((u16)(a[k / 2] >> (16 * (k & 1))));
    for (int k = 0; k < 4; k++) y[k] = half_to_float((u16)(b[k / 2] >> (16 * (k & 1))));
    host::multiply(c, x, y);
}
inline void mma_bf16(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
    float x[8], y[4];
    for (int k = 0; k < 8; k++)
        x[k] = __int_as_float(k & 1 ? a[k / 2] & 0xffff0000u : a[k / 2] << 16);
    for (int k = 0; k < 4; k++)
        y[k] = __int_as_float(k & 1 ? b[k / 2] & 0xffff0000u : b[k / 2] << 16);
    host::multiply(c, x, y);
}
template <bool A_UNSIGNED, bool B_UNSIGNED>
void mma_int8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int c0, int c1, int c2,
               int c3) {
    const int c[] = {c0, c1, c2, c3};
    struct Operands {
        u32 a[4], b[2];
    };
    const Operands *of = host::show(Operands{{a0, a1, a2, a3}, {b0, b1}});
    const int g = host::now->lane >> 2, t = host::now->lane & 3;
    const auto number = [](u32 word, int k, bool is_unsigned) {
        const u8 byte = (u8)(word >> (8 * k));
        return is_unsigned ? (int)byte : (int)(signed char)byte;
    };
    for (int k = 0; k < 4; k++) {
        d[k] = c[k];
        for (int s = 0; s < 32; s++) {
            const u32 row = of[4 * g + s % 16 / 4].a[2 * (s / 16) + (k >> 1)];
            const u32 column = of[4 * (2 * t + (k & 1)) + s % 16 / 4].b[s / 16];
            d[k] += number(row, s % 4, A_UNSIGNED) * number(column, s % 4, B_UNSIGNED);
        }
    }
}
inline u32 warp_max(u32 x) {
    const u32 *of = host::show(x);
    return *std::max_element(of, of + 32);
}
inline int load_now(const int *from) { return *from; }
inline void keep(const u8 *&) {}
inline u64 evict_first_policy() { return 0; }
inline void cp_async(u32 to, const u8 *from, u64) { host::now->open.push_back({to, from, 16}); }
inline void cp_async(u32 to, const u8 *from) { cp_async(to, from, 0); }
inline void cp_async_8(u32 to, const u8 *from) { host::now->open.push_back({to, from, 8}); }
inline void cp_async_4(u32 to, const u8 *from) { host::now->open.push_back({to, from, 4}); }
inline void cp_async_commit() {
    host::now->groups.push_back(std::move(host::now->open));
    host::now->open.clear();
}
template <int LATER>
void cp_async_wait() {
    auto &groups = host::now->groups;
    for (; groups.size() > LATER; groups.pop_front())
        for (const host::Copy &c : groups.front()) host::move(c);
}

inline void barrier_init(u32 barrier) { host::barriers[barrier] = {}; }
inline void barrier_init_fence() {}
inline void barrier_expect(u32 barrier, u32 bytes) {
    host::Barrier &b = host::barriers.at(barrier);
    if (b.expected) host::fail("a barrier is used for two tiles at a time");
    b.expected = bytes;
}
inline void bulk_copy(u32 to, const u8 *from, u32 bytes, u32 barrier, u64) {
    if (to % 16 || bytes % 16 || (uintptr_t)from % 16) host::fail("a bulk copy of no multiple of 16");
    host::barriers.at(barrier).copies.push_back({to, from, bytes});
}
inline void barrier_wait(u32 barrier, u32 odd) {
    host::Barrier &b = host::barriers.at(barrier);
    if (b.rounds % 2 != odd) return;  // that round is over
    u32 bytes = 0;
    for (const host::Copy &c : b.copies) host::move(c), bytes += c.bytes;
    if (!bytes || bytes != b.expected) host::fail("a barrier waits for bytes that do not come");
    b = {{}, 0, b.rounds + 1};
}

extern "C" void host_previous_writes(void *to, const void *from, size_t bytes) {
    host::late.push_back({to, from, bytes});
}
