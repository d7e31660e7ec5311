// Seal: the keys of pages that an append completes, coded relative to their mean and with error feedback
// (math/feedback.py) where there are factors.
//
// Blocks are single warps: one fits beside the blocks of attention, in whose time pages are sealed. With
// feedback a token lies in D / 16 lanes, lane c of them holding four channels of each quarter from 4 c on, and
// a lane has two tokens. Rows of factors come through shared memory, four at a time. A coordinate is rounded by
// the lane that holds it; the others add what it missed, times the row, to what they hold of the coordinates
// before it.

#include "encode.cuh"

#define LANES (D / 16)  // of a token
#define DEPTH 2  // tokens of a lane
#define TOKENS (DEPTH * 32 / LANES)  // of a block
#define PASSES (PAGE / TOKENS)
#define QUARTER (D / 4)
#define STAGES 4  // groups of four rows that are there or on their way
#define TINY 1.1754943508222875e-38f

constexpr int AT_ONCE = D < 256 ? 4 : 2;  // tokens whose sums are made together

struct __align__(16) Scratch {
    float keys[TOKENS][D + 4];
    float mean[D];
    float scales[TOKENS];  // or norms; negative where the mean was taken off
    u8 codes[TOKENS][D];
};
typedef float Rows[4][D];  // of factors

// Pages that row `row` completes.
__device__ __forceinline__ int completed(const AppendParams &a, int row, int batch, int &index) {
    if (row >= batch) return 0;
    const int length = a.lengths[row], before = length - (a.cu_seqlens[row + 1] - a.cu_seqlens[row]);
    index = before / PAGE;
    return before < 0 ? 0 : length / PAGE - index;
}

__device__ __forceinline__ int count_pages(const AppendParams &a, int batch, int lane) {
    int count = 0, index;
    for (int row = lane; row < (batch + 31) / 32 * 32; row += 32) count += completed(a, row, batch, index);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) count += __shfl_xor_sync(~0u, count, bit);
    return count;
}

// The n-th of them: its row, and its index within the row.
__device__ __forceinline__ void find_page(const AppendParams &a, int batch, int n, int lane, int &row,
                                          int &index) {
    for (int base = 0;; base += 32) {
        int own = 0;
        const int count = completed(a, base + lane, batch, own);
        int sum = count;  // of the rows up to this lane's
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const int other = __shfl_sync(~0u, sum, lane - bit);
            sum += lane >= bit ? other : 0;
        }
        const int all = __shfl_sync(~0u, sum, 31);
        if (n < all) {
            const int who = __ffs(__ballot_sync(~0u, sum > n)) - 1;
            row = base + who;
            index = __shfl_sync(~0u, own + n - (sum - count), who);
            return;
        }
        n -= all;
    }
}

struct __align__(2 * N) Channels {  // neighbouring ones, of a lane
    u16 of[N];
};

// Reads keys of a row's head: new ones, and older ones from the ring.
struct KeyReader {
    const u16 *fresh, *ring, *center;
    long long stride;
    int before, slots;
    __device__ __forceinline__ KeyReader(const AppendParams &a, int row, int head) {
        const int begin = a.cu_seqlens[row];
        before = a.lengths[row] - (a.cu_seqlens[row + 1] - begin);
        stride = a.key_n, slots = a.ring;
        fresh = a.key + head * a.key_h + begin * stride;
        center = a.key_center ? a.key_center + head * D : nullptr;
        ring = a.ring_key + ((long long)a.ring_rows[row] * slots * HKV + head) * D;
    }
    __device__ __forceinline__ Channels operator()(int at, int lane) const {
        const u16 *p = at >= before ? fresh + (at - before) * stride
                                    : ring + (long long)(at % slots) * HKV * D;
        return ((const Channels *)p)[lane];
    }
    // Tokens of the ring are relative to the center already.
    __device__ __forceinline__ float number(const Channels &x, int k, int at, int lane) const {
        return finite(model_to_float(relative(x.of[k], at >= before ? center : nullptr, N * lane + k)));
    }
};

// The sum of tokens [from, to), in the order of an append's, to shared memory; several are on their way at a time.
__device__ __forceinline__ void sum_page(float (&to_sum)[D], const KeyReader &keys, int from, int to, int lane) {
    constexpr int AHEAD = PAGE / PARTS < 8 ? PAGE / PARTS : 8, BESIDE = D < 256 ? 2 : 1;
    float sum[N];
#pragma unroll
    for (int k = 0; k < N; k++) sum[k] = 0.f;
#pragma unroll 1
    for (int p = 0; p < PARTS; p += BESIDE) {
        float part[BESIDE][N];
#pragma unroll
        for (int q = 0; q < BESIDE; q++)
#pragma unroll
            for (int k = 0; k < N; k++) part[q][k] = 0.f;
#pragma unroll 1
        for (int first = from + p; first < to; first += PARTS * AHEAD) {
            Channels x[BESIDE][AHEAD];
#pragma unroll
            for (int q = 0; q < BESIDE; q++)
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (const int at = first + q + PARTS * i; at < to) x[q][i] = keys(at, lane);
#pragma unroll
            for (int q = 0; q < BESIDE; q++)
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (const int at = first + q + PARTS * i; at < to)
#pragma unroll
                        for (int k = 0; k < N; k++) part[q][k] += keys.number(x[q][i], k, at, lane);
        }
#pragma unroll
        for (int q = 0; q < BESIDE; q++)
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] += part[q][k];
    }
#pragma unroll
    for (int k = 0; k < N; k++) to_sum[N * lane + k] = sum[k];
}

#if FEEDBACK
__device__ __forceinline__ int nearest(float y, float &centroid) {
    int index = 0;
    centroid = Codebook<KEY_BITS>::magnitude(0);
#pragma unroll
    for (int i = 0; i < (1 << (KEY_BITS - 1)) - 1; i++)
        if (fabsf(y) > Codebook<KEY_BITS>::threshold(i))
            index = i + 1, centroid = Codebook<KEY_BITS>::magnitude(i + 1);
    if (y < 0.f) index += 1 << (KEY_BITS - 1), centroid = -centroid;
    return index;
}

__device__ __forceinline__ void read4(const float *p, float (&v)[4]) {
    const float4 all = *(const float4 *)p;
    v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
}

// Rows D - 4 - 4 n to D - 1 - 4 n up to the diagonal: copies are begun, not waited for.
__device__ __forceinline__ void fetch_rows(Rows *stages, const float *factors, int n, int lane) {
    const int i = D - 4 - 4 * n;
    const u32 to = (u32)__cvta_generic_to_shared(stages + n % STAGES);
    const u8 *from = (const u8 *)(factors + i * D) + 16 * lane;
#pragma unroll
    for (int part = 0; part < D; part += 32)
        if (4 * ((part + lane) % QUARTER) <= i) cp_async(to + 16 * (part + lane), from + 16 * part);
    cp_async_commit();
}

// Products and sums are rounded one by one: none are fused.
__device__ __forceinline__ void add_multiple(float &sum, float factor, float x) {
    sum = __fadd_rn(sum, __fmul_rn(factor, x));
}

typedef float Token[4][4];  // what a lane has of one

// Scaled coordinates of the lane's tokens, from `token` on -> what the later coordinates missed, and L^T x - x.
__device__ __forceinline__ void feed_back(const Scratch &s, int token, Token (&missed)[DEPTH],
                                          Token (&projected)[DEPTH], const float *factors, Rows *stages, int lane) {
    const int c = lane % LANES;
#pragma unroll
    for (int k = 3; k >= 0; k--) {
        float x[DEPTH][4];
#pragma unroll
        for (int e = 0; e < DEPTH; e++) read4(&s.keys[token + e][k * QUARTER + 4 * c], x[e]);
#pragma unroll 1
        for (int owner = LANES - 1; owner >= 0; owner--) {
            const int n = (4 - k) * LANES - 1 - owner;
            cp_async_wait<STAGES - 2>();
            __syncwarp();  // rows are there for all, and those before them are no longer read
            fetch_rows(stages, factors, n + STAGES - 1, lane);
            const float *rows = &stages[n % STAGES][0][4 * c];
#pragma unroll
            for (int j = 3; j >= 0; j--) {
                float now[DEPTH], error[DEPTH];
#pragma unroll
                for (int e = 0; e < DEPTH; e++) {
                    nearest(__fadd_rn(x[e][j], missed[e][k][j]), error[e]);
                    now[e] = __shfl_sync(~0u, x[e][j], owner, LANES);
                    error[e] = __shfl_sync(~0u, __fadd_rn(x[e][j], -error[e]), owner, LANES);
                }
#pragma unroll
                for (int m = 0; m <= k; m++) {
                    float row[4];
                    read4(rows + j * D + m * QUARTER, row);
#pragma unroll
                    for (int l = 0; l < 4; l++) {
                        if (m == k) row[l] = c < owner + (l < j) ? row[l] : 0.f;  // below the diagonal
#pragma unroll
                        for (int e = 0; e < DEPTH; e++) {
                            add_multiple(missed[e][m][l], error[e], row[l]);
                            add_multiple(projected[e][m][l], now[e], row[l]);
                        }
                    }
                }
            }
        }
    }
}

// The block's tokens, in shared memory, are brought to unit variance.
__device__ __forceinline__ void scale_keys(Scratch &s, const float *signs, int lane) {
#pragma unroll AT_ONCE
    for (int token = 0; token < TOKENS; token++) {
        float x[N], size = 0.f;
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = s.keys[token][lane + 32 * k];
        rotate(x, signs, lane);
        bool centered = false;
        if (MEAN_BITS > 0) {
            centered = center_key(x, s.mean, lane, size);
        } else {
            double square = 0;
#pragma unroll
            for (int k = 0; k < N; k++) square += (double)x[k] * (double)x[k];
            size = (float)warp_sum(square);
        }
        const float norm = __fsqrt_rn(size);
#pragma unroll
        for (int k = 0; k < N; k++)
            s.keys[token][lane + 32 * k] = __fmul_rn(__fdiv_rn(x[k], fmaxf(norm, TINY)), FEEDBACK_WIDTH);
        if (lane == 0) s.scales[token] = centered ? -norm : norm;
    }
    __syncwarp();
}

// Codes of the block's tokens, and scales.
__device__ __forceinline__ void encode(Scratch &s, const float *factors, const float *signs, Rows *stages, int lane) {
    scale_keys(s, signs, lane);
    const int c = lane % LANES, first = DEPTH * (lane / LANES);
    Token missed[DEPTH], projected[DEPTH];
#pragma unroll
    for (int e = 0; e < DEPTH; e++)
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) missed[e][k][j] = projected[e][k][j] = 0.f;
    feed_back(s, first, missed, projected, factors, stages, lane);
#pragma unroll
    for (int e = 0; e < DEPTH; e++) {
        const int token = first + e;
        double whole = 0, along = 0;  // the key's square in the metric, its product with what is decoded
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 word = 0;
            float x[4];
            read4(&s.keys[token][k * QUARTER + 4 * c], x);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int d = k * QUARTER + 4 * c + j;
                const float target = __fadd_rn(x[j], missed[e][k][j]);
                float centroid;
                word |= (u32)nearest(target, centroid) << (8 * j);
                const double size = __fadd_rn(x[j], projected[e][k][j]);
                const double own = (double)factors[d * (D + 1)] * size;
                whole += own * size;
                along += own * (size - (double)__fadd_rn(target, -centroid));
            }
            *(u32 *)&s.codes[token][k * QUARTER + 4 * c] = word;
        }
#pragma unroll
        for (int bit = 1; bit < LANES; bit *= 2) {
            whole += __shfl_xor_sync(~0u, whole, bit);
            along += __shfl_xor_sync(~0u, along, bit);
        }
        float ratio = __fdiv_rn((float)whole, fmaxf((float)along, TINY));
        ratio = fminf(fmaxf(ratio, 1.f / FEEDBACK_MOST), FEEDBACK_MOST);
        const float norm = s.scales[token];
        const float scale = fminf(__fmul_rn(__fmul_rn(fabsf(norm), FEEDBACK_INVERSE), ratio), 65504.f);
        __syncwarp();  // all lanes of the token have read its norm
        if (c == 0) s.scales[token] = __float_as_int(norm) < 0 ? -scale : scale;
    }
}
#else
__device__ __forceinline__ void encode(Scratch &s, const float *, const float *signs, Rows *, int lane) {
#pragma unroll AT_ONCE
    for (int token = 0; token < TOKENS; token++) {
        float x[N], size;
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = s.keys[token][lane + 32 * k];
        rotate(x, signs, lane);
        const bool centered = MEAN_BITS > 0 && center_key(x, s.mean, lane, size);
        float scale = quantize<KEY_BITS, KEY_MODE>(x, s.codes[token], lane);
        scale = fminf(fmaxf(scale, -65504.f), 65504.f);
        if (lane == 0) s.scales[token] = centered ? -scale : scale;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(32, 12)
    seal(const AppendParams a, const float *all_factors, int batch) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Scratch s;
    Rows *stages = (Rows *)memory;
    const int lane = threadIdx.x & 31;
    // What is read was there before the append that this follows, and that has begun.
    launch_dependents();
    const int pages = count_pages(a, batch, lane);
    const int parts = pages ? max(1, min(PASSES, (int)gridDim.x / (pages * HKV))) : 0;

    for (int job = blockIdx.x; job < pages * HKV * parts; job += gridDim.x) {
        const int part = job % parts, head = job / parts % HKV;
        int row, index;
        find_page(a, batch, job / parts / HKV, lane, row, index);
        const int page_at = index * PAGE, exact_from = a.ring_valid_from[row];
        const float *factors = all_factors + (long long)head * D * D;
        const int id = a.block_table[row * a.table_b + index];
        if (id < 0) continue;  // nobody will read it
        u8 *record = a.pages + id * a.page_bytes + head * RECORD;
        u16 *scales = (u16 *)(record + KEY_SCALE_AT);
        u32 *plane = (u32 *)record;
        const KeyReader keys(a, row, head);

        if (MEAN_BITS > 0) {
            const int real_from = max(a.left_pad[row], page_at), to = page_at + PAGE;
            if (exact_from <= page_at) {
                __syncwarp();  // the mean before is no longer read
                sum_page(s.mean, keys, real_from, to, lane);
                __syncwarp();
                float sum[N];
#pragma unroll
                for (int k = 0; k < N; k++) sum[k] = s.mean[lane + 32 * k];
                mean_of_sum(sum, to - real_from, a.rotation, record, part == 0, s.mean, lane);
            } else {
                read_mean(record, s.mean, lane);
            }
        }

#pragma unroll 1
        for (int pass = part; pass < PASSES; pass += parts) {
            const int pass_at = page_at + pass * TOKENS;
            if (pass_at + TOKENS <= exact_from) continue;
            __syncwarp();  // rows and codes of the pass before are no longer read
#if FEEDBACK
#pragma unroll
            for (int n = 0; n < STAGES - 1; n++) fetch_rows(stages, factors, n, lane);
#endif
            Channels x[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (pass_at + t >= exact_from) x[t] = keys(pass_at + t, lane);
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
#pragma unroll
                for (int k = 0; k < N; k++)  // codes of tokens that are no longer exact stay
                    s.keys[t][N * lane + k] =
                        pass_at + t >= exact_from ? keys.number(x[t], k, pass_at + t, lane) : 0.f;
            __syncwarp();
            encode(s, factors, a.rotation, stages, lane);
            __syncwarp();
            for (int token = lane; token < TOKENS; token += 32)
                if (const int t = pass_at + token - page_at; page_at + t >= exact_from)
                    scales[t / 32 * 32 + t % 8 * 4 + t % 32 / 8] = float_to_half(s.scales[token]);
            constexpr int C = D / 32;
            for (int w = lane; w < TOKENS * KEY_BITS * C; w += 32) {
                const int token = w / (KEY_BITS * C), j = w / C % KEY_BITS, c = w % C;
                const int t = pass_at + token - page_at;
                if (page_at + t < exact_from) continue;
                plane[(((t / 32 * KEY_BITS + j) * 8 + t % 8) * C + c) * 4 + t % 32 / 8] =
                    pack<KEY_BITS>(j, [&](int n) { return s.codes[token][32 * c + n]; });
            }
        }
    }
    if (blockIdx.x == 0) grid_dependency_wait();  // who waits for this waits for the kernels before
}
