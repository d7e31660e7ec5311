// Append: copy the new tokens to ring and sinks, encode what they touch.
//
// Blocks have a sequence, a head and a side (key or value); those of many tokens, every so many-th
// page too. A warp encodes a token, lane l holding channels l + 32 k; codes go through shared memory
// and are packed word by word.

#define MOST_THREADS 256
#define PARTS 8  // of a page's sum, however many threads there are: the sum must not depend on it
#define N (D / 32)  // channels a lane
#define ROOM (PAGE * D > 32768 ? 32768 / D : PAGE)  // tokens whose codes fit shared memory

struct Append {
    const u16 *key, *value;
    u8 *pages;
    const int *block_table, *lengths, *starts, *ring_rows, *exact_starts, *first;
    u16 *ring_key, *ring_value, *sink_key, *sink_value;
    const float *signs;
    long long key_n, key_h, value_n, value_h, table_b, page_bytes;
    int ring, sinks, open, copy, encode;  // the last two: which half is done, or both
};

__device__ __forceinline__ float finite(float x) {
    if (x != x) return 0.f;
    if (x == __int_as_float(0x7f800000)) return 65504.f;
    return x == __int_as_float(0xff800000) ? -65504.f : x;
}

__device__ __forceinline__ double total(double x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

// The same sums in the same order as math.rotation.
__device__ __forceinline__ void rotate(float (&x)[N], const float *signs, int lane) {
#if ROTATED
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= signs[lane + 32 * k];
    hadamard(x, lane);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= ROOT;
#endif
}

template <int BITS>
struct Book;
template <>
struct Book<KEY_BITS> {
    static __device__ __forceinline__ float threshold(int i) {
        const float t[] = {KEY_THRESHOLDS};
        return t[i];
    }
    static __device__ __forceinline__ float magnitude(int i) {
        const float m[] = {KEY_MAGNITUDES};
        return m[i];
    }
};
#if VALUE_BITS != KEY_BITS
template <>
struct Book<VALUE_BITS> {
    static __device__ __forceinline__ float threshold(int i) {
        const float t[] = {VALUE_THRESHOLDS};
        return t[i];
    }
    static __device__ __forceinline__ float magnitude(int i) {
        const float m[] = {VALUE_MAGNITUDES};
        return m[i];
    }
};
#endif

// Rotated y of one token -> codes in shared memory, scale (all lanes).
template <int BITS, int MODE>
__device__ __forceinline__ float quantize(const float (&y)[N], u8 *codes, int lane) {
    const float tiny = 1.1754943508222875e-38f;
    double square = 0;
#pragma unroll
    for (int k = 0; k < N; k++) square += (double)y[k] * (double)y[k];
    const float norm = __fsqrt_rn((float)total(square));
    double yc = 0, cc = 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
        float z = __fdiv_rn(y[k], fmaxf(norm, tiny)) * WIDTH, size = fabsf(z), c;
        int index = 0;
        if constexpr (BITS == 8) {  // whole multiples of a unit
            const float level = fminf(fmaxf(rintf(z * Book<BITS>::threshold(0)), -127.f), 127.f);
            index = (int)level, c = level * Book<BITS>::magnitude(0);
        } else {
            c = Book<BITS>::magnitude(0);
#pragma unroll
            for (int i = 0; i < (1 << (BITS - 1)) - 1; i++)
                if (size > Book<BITS>::threshold(i)) index = i + 1, c = Book<BITS>::magnitude(i + 1);
            if (z < 0.f) index += 1 << (BITS - 1), c = -c;
        }
        codes[lane + 32 * k] = (u8)index;
        c = c * ROOT;
        yc += (double)y[k] * (double)c;
        cc += (double)c * (double)c;
    }
    if (MODE == 0) return norm;
    if (MODE == 1) return __fdiv_rn(norm, fmaxf(__fsqrt_rn((float)total(cc)), tiny));
    if (MODE == 2) return __fdiv_rn((float)total(yc), fmaxf((float)total(cc), tiny));
    return __fdiv_rn(norm * norm, fmaxf((float)total(yc), tiny));
}

// Word j of 32 codes code(0..31).
template <int BITS, class F>
__device__ __forceinline__ u32 pack(int j, F code) {
    u32 w = 0;
    if (BITS == 8) {
#pragma unroll
        for (int n = 0; n < 4; n++) w |= (u32)code(4 * j + n) << (8 * n);
    } else if (BITS == 4) {
#pragma unroll
        for (int n = 0; n < 8; n++) w |= (u32)code(8 * j + n) << (4 * n);
    } else if (BITS == 3) {
#pragma unroll
        for (int n = 0; n < 8; n++)
            w |= (u32)code(8 * j + n) << (4 * n) | (((u32)code(24 + n) >> j) & 1) << (4 * n + 3);
    } else {
#pragma unroll
        for (int n = 0; n < 16; n++) w |= (u32)code(16 * j + n) << (4 * (n % 8) + 2 * (n / 8));
    }
    return w;
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) append(const Append a) {
    __shared__ u8 codes[ROOM][D];
    __shared__ float sums[PARTS][D];
    __shared__ float mean[D];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int row = blockIdx.x / HKV, head = blockIdx.x % HKV;
    const bool is_key = blockIdx.y == 0;
    wait_for_previous();
    let_next_start();  // attention, mostly
    const int begin = a.first[row], count = a.first[row + 1] - begin;
    const int length = a.lengths[row];
    if (!count || length < count) return;
    const int before = length - count, start = a.starts[row];
    const long long owner = a.ring_rows[row];
    const u16 *source = is_key ? a.key + head * a.key_h : a.value + head * a.value_h;
    const long long stride = is_key ? a.key_n : a.value_n;
    u16 *ring = (is_key ? a.ring_key : a.ring_value) + (owner * a.ring * HKV + head) * D;
    u16 *sink = (is_key ? a.sink_key : a.sink_value) + (owner * a.sinks * HKV + head) * D;

    if (a.copy) {
        const int own = blockIdx.z * warps + warp, step = gridDim.z * warps;
        for (int t = max(count - a.ring, 0) + own; t < count; t += step) {
            const u16 *x = source + (begin + t) * stride;
            u16 *place = ring + (long long)((before + t) % a.ring) * HKV * D;
            for (int d = lane; d < D; d += 32) place[d] = x[d];
        }
        const int sinks_to = min(length, start + a.sinks);
        for (int at = max(before, start) + own; at < sinks_to; at += step) {
            const u16 *x = source + (begin + at - before) * stride;
            u16 *place = sink + (long long)(at - start) * HKV * D;
            for (int d = lane; d < D; d += 32) place[d] = x[d];
        }
    }
    if (!a.encode) return;

    for (int index = before / PAGE + blockIdx.z; index * PAGE < length; index += gridDim.z) {
        const int page_at = index * PAGE;
        const bool complete = page_at + PAGE <= length;
        if (!complete && !a.open) return;
        const int exact_from = a.exact_starts[row];
        const int low = max(complete ? exact_from : before, page_at);
        const int high = min(length, page_at + PAGE);
        u8 *record = a.pages + a.block_table[row * a.table_b + index] * a.page_bytes + head * RECORD;
        const bool center = is_key && complete && MEAN_BITS > 0;

        auto load = [&](int at, float(&x)[N]) {
            const u16 *p = at >= before ? source + (begin + at - before) * stride
                                        : ring + (long long)(at % a.ring) * HKV * D;
#pragma unroll
            for (int k = 0; k < N; k++) x[k] = finite(model_to_float(p[lane + 32 * k]));
        };

        if (center) {
            if (exact_from <= page_at) {
                for (int p = warp; p < PARTS; p += warps) {
                    float part[N];
#pragma unroll
                    for (int k = 0; k < N; k++) part[k] = 0.f;
                    for (int at = max(start, page_at) + p; at < page_at + PAGE; at += PARTS) {
                        float x[N];
                        load(at, x);
#pragma unroll
                        for (int k = 0; k < N; k++) part[k] += x[k];
                    }
#pragma unroll
                    for (int k = 0; k < N; k++) sums[p][lane + 32 * k] = part[k];
                }
                __syncthreads();
                if (warp == 0) {
                    const float real = max(page_at + PAGE - max(start, page_at), 1);
                    float x[N];
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        x[k] = 0.f;
                        for (int p = 0; p < PARTS; p++) x[k] += sums[p][lane + 32 * k];
                        x[k] = __fdiv_rn(x[k], real);
                    }
                    rotate(x, a.signs, lane);
#if MEAN_BITS == 8
                    float top = 0.f;
#pragma unroll
                    for (int k = 0; k < N; k++) top = fmaxf(top, fabsf(x[k]));
#pragma unroll
                    for (int bit = 1; bit < 32; bit *= 2)
                        top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
                    const u16 half_step = to_half(__fdiv_rn(top, 127.f));
                    const float step = half_to_float(half_step);
                    if (lane == 0) *(u16 *)(record + MEAN_AT + D) = half_step;
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        float level = rintf(__fdiv_rn(x[k], fmaxf(step, 6.103515625e-05f)));
                        level = fminf(fmaxf(level, -127.f), 127.f);
                        ((signed char *)(record + MEAN_AT))[lane + 32 * k] = (signed char)level;
                        mean[lane + 32 * k] = level * step;
                    }
#else
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        const u16 h = to_half(x[k]);
                        ((u16 *)(record + MEAN_AT))[lane + 32 * k] = h;
                        mean[lane + 32 * k] = half_to_float(h);
                    }
#endif
                }
            } else if (warp == 0) {
                for (int d = lane; d < D; d += 32)
#if MEAN_BITS == 8
                    mean[d] = (float)((signed char *)(record + MEAN_AT))[d] *
                              half_to_float(*(u16 *)(record + MEAN_AT + D));
#else
                    mean[d] = half_to_float(((u16 *)(record + MEAN_AT))[d]);
#endif
            }
            __syncthreads();
        }

#pragma unroll 1
        for (int part = page_at; part < page_at + PAGE; part += ROOM) {
            const int from = max(low, part), to = min(high, part + ROOM);
            if (from >= to) continue;
            for (int at = from + warp; at < to; at += warps) {
                const int t = at - page_at;
                float x[N];
                load(at, x);
                rotate(x, a.signs, lane);
                float scale;
                u16 *scales;
                if (is_key) {
                    bool centered = false;
                    if (center) {
                        double plain = 0, rest = 0;
                        float y[N];
#pragma unroll
                        for (int k = 0; k < N; k++) {
                            y[k] = x[k] - mean[lane + 32 * k];
                            plain += (double)x[k] * (double)x[k];
                            rest += (double)y[k] * (double)y[k];
                        }
                        centered = (float)total(rest) < (float)total(plain);
#pragma unroll
                        for (int k = 0; k < N; k++) x[k] = centered ? y[k] : x[k];
                    }
                    scale = quantize<KEY_BITS, KEY_MODE>(x, codes[t % ROOM], lane);
                    scale = fminf(fmaxf(scale, -65504.f), 65504.f);
                    scale = centered ? -scale : scale;
                    scales = (u16 *)(record + KEY_SCALE_AT);
                } else {
                    scale = quantize<VALUE_BITS, VALUE_MODE>(x, codes[t % ROOM], lane);
                    scale = fminf(fmaxf(scale, -65504.f), 65504.f);
                    scales = (u16 *)(record + VALUE_SCALE_AT);
                }
                if (lane == 0) scales[(t / 32) * 32 + (t % 8) * 4 + (t % 32) / 8] = to_half(scale);
            }
            __syncthreads();

            const int first_block = (from - page_at) / 32, last_block = (to - page_at - 1) / 32;
            if (is_key) {
                constexpr int C = D / 32, BLOCK = KEY_BITS * 32 * C;  // words of 32 tokens
                u32 *plane = (u32 *)record;
                for (int w = first_block * BLOCK + threadIdx.x; w < (last_block + 1) * BLOCK; w += blockDim.x) {
                    const int i = w % 4, c = w / 4 % C, r = w / (4 * C) % 8, j = w / (32 * C) % KEY_BITS;
                    const int t = w / BLOCK * 32 + 8 * i + r;
                    if (page_at + t < from || page_at + t >= to) continue;
                    plane[w] = pack<KEY_BITS>(j, [&](int k) { return codes[t % ROOM][32 * c + k]; });
                }
            } else {
                constexpr int C = D / 16, BLOCK = VALUE_BITS * 16 * C;
                u32 *plane = (u32 *)(record + VALUE_AT);
                for (int w = first_block * BLOCK + threadIdx.x; w < (last_block + 1) * BLOCK; w += blockDim.x) {
                    const int i = w % 4, c = w / 4 % 4, ch = w / 16 % C, j = w / (16 * C) % VALUE_BITS;
                    const int t = w / BLOCK * 32 + 2 * (4 * i + c);
                    const bool even = page_at + t >= from && page_at + t < to;
                    const bool odd = page_at + t + 1 >= from && page_at + t + 1 < to;
                    if (!even && !odd) continue;
                    u32 word = pack<VALUE_BITS>(j, [&](int k) {
                        return ((k & 1) ? odd : even) ? codes[(t + (k & 1)) % ROOM][16 * ch + k / 2] : (u8)0;
                    });
                    if (!even || !odd) {
                        u32 own = pack<VALUE_BITS>(j, [&](int k) {
                            return ((k & 1) ? odd : even) ? (u8)((1 << VALUE_BITS) - 1) : (u8)0;
                        });
                        word |= plane[w] & ~own;
                    }
                    plane[w] = word;
                }
            }
            __syncthreads();  // codes are free for what comes next
        }
    }
}
