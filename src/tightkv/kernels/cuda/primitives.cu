// What the other sources are written with: types, conversions, tensor-core products, the rotation.
// Upper-case names that are not defined here are constants of the build (kernels/cuda/__init__.py).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#define NEG_INF (__int_as_float(0xff800000))

// Kernels overlap with those before and after them, from sm_90 on (programmatic dependent launch).
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {  // it waits for the end of this one itself
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// 1 where the sign bit is set, else 0. The number must not be zero or NaN.
__device__ __forceinline__ float one_if_negative(u32 bits) {
    float y;
    asm("set.lt.f32.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(__int_as_float(bits)));
    return y;
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u32 pack_model(float low, float high) {
    u32 r;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}

__device__ __forceinline__ float model_to_float(u16 h) {
#if BF16
    return __int_as_float((u32)h << 16);
#else
    return half_to_float(h);
#endif
}

// A pair of halves times the low or the high half of `two`.
template <int HIGH>
__device__ __forceinline__ u32 scaled(u32 pair, u32 two) {
    u32 y;
    if (HIGH)
        asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h};"
            " mul.f16x2 %0, %1, s;}" : "=r"(y) : "r"(pair), "r"(two));
    else
        asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l};"
            " mul.f16x2 %0, %1, s;}" : "=r"(y) : "r"(pair), "r"(two));
    return y;
}

__device__ __forceinline__ u32 turn(u32 x) {  // transpose an 8 x 8 tile of halves
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ void mma(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_model(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    mma(c, a0, a1, a2, a3, b0, b1);
#endif
}

// x [D] of a warp's lanes, lane l holding channels l + 32 k, times the unscaled Hadamard matrix.
__device__ __forceinline__ void hadamard(float (&x)[D / 32], int lane) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            float other = __shfl_xor_sync(~0u, x[k], bit);
            x[k] = (lane & bit) ? other - x[k] : x[k] + other;
        }
#pragma unroll
    for (int bit = 1; bit < D / 32; bit *= 2)
#pragma unroll
        for (int k = 0; k < D / 32; k++)
            if (!(k & bit)) {
                float a = x[k], b = x[k + bit];
                x[k] = a + b;
                x[k + bit] = a - b;
            }
}
