// Instructions by name: all inline assembler is here, so that another machine can have its own.
// Upper-case names that are not defined here are constants of the build (kernels/cuda/source.py).
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

// Kernels overlap with those before and after them, from sm_90 on (programmatic dependent launch).
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_dependents() {  // it waits for the end of this one itself
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// --- numbers ---
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// The larger of the low halves and of the high ones.
__device__ __forceinline__ u32 max_half2(u32 a, u32 b) {
    u32 y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// --- bits ---
__device__ __forceinline__ u32 prmt(u32 low, u32 high, u32 select) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(select));
    return y;
}

// The fourth bit of all nibbles turned; in assembler, or it is done twice.
__device__ __forceinline__ u32 flip_sign_bits(u32 w) {
    u32 y;
    asm("xor.b32 %0, %1, 0x88888888;" : "=r"(y) : "r"(w));
    return y;
}

// --- what lanes do together ---
__device__ __forceinline__ u32 transpose_8x8(u32 x) {  // transpose an 8 x 8 tile of halves
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ void mma_f16(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d (16 x 8) = a (16 x 32) b (32 x 8) + c of bytes; those of A and of B may be unsigned.
template <bool A_UNSIGNED, bool B_UNSIGNED>
__device__ __forceinline__ void mma_int8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                                          int c0, int c1, int c2, int c3) {
#define MMA_INT8(kinds)                                                                            \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." kinds ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"  \
        " {%10,%11,%12,%13};"                                                                       \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                            \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3))
    if (A_UNSIGNED && B_UNSIGNED)
        MMA_INT8("u8.u8");
    else if (A_UNSIGNED)
        MMA_INT8("u8.s8");
    else if (B_UNSIGNED)
        MMA_INT8("s8.u8");
    else
        MMA_INT8("s8.s8");
#undef MMA_INT8
}

__device__ __forceinline__ void mma_bf16(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 warp_max(u32 x) {  // of a warp's lanes
    return __reduce_max_sync(~0u, x);
}

// What is cheap to find again the compiler finds again in each turn of a loop, and waits for it.
__device__ __forceinline__ void keep(const u8 *&x) { asm volatile("" : "+l"(x)); }

// --- copies to shared memory ---
__device__ __forceinline__ u64 evict_first_policy() {  // a policy of the L2 cache
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// 16 bytes to an address in shared memory.
__device__ __forceinline__ void cp_async(u32 to, const u8 *from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy) : "memory");
}

__device__ __forceinline__ void cp_async(u32 to, const u8 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_8(u32 to, const u8 *from) {  // 8 bytes
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_4(u32 to, const u8 *from) {  // 4 bytes
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER>  // all but the last `LATER` groups of copies are there
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

__device__ __forceinline__ int load_now(const int *from) {  // here, not where it is needed first
    int x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}

// --- bulk copies, from sm_90 on: many bytes an instruction, counted by a barrier in shared memory ---
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {  // copies may use what was made until here
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Sizes and addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 to, const u8 *from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

// Until all bytes of the barrier's round are there; rounds are odd and even.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 odd) {
    u32 there;
    do {
        asm volatile("{ .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, p; }" : "=r"(there) : "r"(barrier), "r"(odd) : "memory");
    } while (!there);
}
#endif
