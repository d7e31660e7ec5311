// Seal with error feedback: the keys of pages that an append completes (math/feedback.py).
//
// A token lies in D / 16 lanes, lane c of them holding four channels of each quarter from 4 c on, so
// that a warp encodes 512 / D tokens at once. Rows of factors come through shared memory, four at a
// time. A coordinate is rounded by the lane that holds it; the others add what it missed, times the
// row, to what they hold of the coordinates before it.
#pragma once

#include "encode.cuh"
#include "sealed_layers.cuh"

#define WARPS 4
#define LANES (D / 16)  // of a token
#define TOKENS (32 / LANES)  // of a warp
#define PASS (WARPS * TOKENS)  // tokens that a block encodes at once
#define QUARTER (D / 4)
#define STAGES 4  // groups of four rows that are there or on their way
#define TINY 1.1754943508222875e-38f

constexpr int AT_ONCE = D < 256 ? 2 : 1;  // tokens whose sums a warp makes together

struct __align__(16) Scratch {
    float keys[PASS][D + 4];
    u8 codes[PASS][D];
    float norms[PASS];  // with the sign of the scale
    float sums[PARTS][D], mean[D];
};
typedef float Rows[4][D];  // of factors

// Pages that row `row` completes.
__device__ __forceinline__ int completed(const AppendParams &a, int row, int batch, int &index) {
    if (row >= batch) return 0;
    const int length = a.lengths[row], before = length - (a.cu_seqlens[row + 1] - a.cu_seqlens[row]);
    index = max(before - a.lag, 0) / PAGE;
    return before < 0 ? 0 : max(length - a.lag, 0) / PAGE - index;
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

struct __align__(N < 8 ? 2 * N : 16) Channels {  // neighbouring ones, of a lane
    u16 of[N];
};

// Reads keys of a row's head: new ones, and older ones from the ring.
struct KeyReader {
    const u16 *fresh, *ring, *center;
    const float *rotation;
    RingCodes codes;  // in place of `ring`, with a window of 8 bits
    long long stride;
    int before, slots;
    __device__ __forceinline__ KeyReader(const AppendParams &a, int row, int head) {
        const int begin = a.cu_seqlens[row];
        before = a.lengths[row] - (a.cu_seqlens[row + 1] - begin);
        stride = a.key_n, slots = a.ring;
        fresh = a.key + head * a.key_h + begin * stride;
        center = a.key_center ? a.key_center + head * D : nullptr;
        ring = a.ring_key + ((long long)a.ring_rows[row] * slots * HKV + head) * D;
        rotation = a.rotation;
        if (RING_CODES) codes = RingCodes(a.ring_key, a.ring_scales, (long long)a.ring_rows[row] * slots, head, true);
    }
    // Of the ring alone.
    __device__ __forceinline__ KeyReader(const SealedHead &x, int slots)
        : fresh(nullptr), ring(x.ring(slots)), center(nullptr), rotation(nullptr), codes(x.codes(slots)), stride(0),
          before(0x7fffffff), slots(slots) {}
    __device__ __forceinline__ Channels operator()(int at, int lane) const {
        const u16 *p = at >= before ? fresh + (at - before) * stride
                                    : ring + (long long)(at % slots) * HKV * D;
        return ((const Channels *)p)[lane];
    }
    // As numbers; tokens of the ring are relative to the center already.
    __device__ __forceinline__ void convert(Channels x, int at, int lane, float (&to)[N]) const {
        if (center && at >= before)
#pragma unroll
            for (int k = 0; k < N; k++) x.of[k] = relative(x.of[k], center, N * lane + k);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = finite(model_to_float(x.of[k]));
    }
    // Rotated, as a ring of codes has it: channels lane + 32 k.
    __device__ __forceinline__ void rounded(int at, float (&x)[N], int lane) const {
        if (at < before) {
            read_codes(codes, at % slots, true, x, lane);
            return;
        }
        const u16 *p = fresh + (at - before) * stride;
#pragma unroll
        for (int k = 0; k < N; k++)
            x[k] = finite(model_to_float(relative(p[lane + 32 * k], center, lane + 32 * k)));
        rotate(x, rotation, lane);
        scale_exact(x, round_exact(x, true));
    }
};

// The mean of keys [from, to), to shared memory; in the order of an append's, but all of a warp are on their way
// at a time.
__device__ __forceinline__ void make_mean(Scratch &s, const KeyReader &keys, int from, int to,
                                          const float *rotation, u8 *record, bool first, int lane, int warp) {
    constexpr int AHEAD = PAGE / PARTS < 8 ? PAGE / PARTS : 8;
#pragma unroll
    for (int p = warp; p < PARTS; p += WARPS) {
        float sum[N];
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] = 0.f;
#pragma unroll 1
        for (int at = from + p; RING_CODES && at < to; at += PARTS) {
            float one[N];
            keys.rounded(at, one, lane);
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] += one[k];
        }
#pragma unroll 1
        for (int at = from + p; !RING_CODES && at < to; at += PARTS * AHEAD) {
            Channels x[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + PARTS * i < to) x[i] = keys(at + PARTS * i, lane);
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + PARTS * i < to) {
                    float one[N];
                    keys.convert(x[i], at + PARTS * i, lane, one);
#pragma unroll
                    for (int k = 0; k < N; k++) sum[k] += one[k];
                }
        }
#pragma unroll
        for (int k = 0; k < N; k++) s.sums[p][RING_CODES ? lane + 32 * k : N * lane + k] = sum[k];
    }
    __syncthreads();
    if (warp == 0) {
        float sum[N];
#pragma unroll
        for (int k = 0; k < N; k++) {
            sum[k] = 0.f;
#pragma unroll
            for (int p = 0; p < PARTS; p++) sum[k] += s.sums[p][lane + 32 * k];
        }
        mean_of_sum(sum, to - from, rotation, record, first, s.mean, lane);
    }
}

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
__device__ __forceinline__ void fetch_rows(Rows *stages, const float *factors, int n) {
    const int i = D - 4 - 4 * n, thread = threadIdx.x % (32 * WARPS);
    const u32 to = (u32)__cvta_generic_to_shared(stages + n % STAGES) + 16 * thread;
    const u8 *from = (const u8 *)(factors + i * D) + 16 * thread;
#pragma unroll
    for (int part = 0; part < D; part += 32 * WARPS)
        if (part + thread < D && 4 * ((part + thread) % QUARTER) <= i) cp_async(to + 16 * part, from + 16 * part);
    cp_async_commit();
}

// Products and sums are rounded one by one: none are fused.
__device__ __forceinline__ void add_multiple(float &sum, float factor, float x) {
    sum = __fadd_rn(sum, __fmul_rn(factor, x));
}

// Scaled coordinates x of the lane's token -> what the later coordinates missed, and L^T x - x.
__device__ __forceinline__ void feed_back(const float (&token)[D + 4], float (&missed)[4][4],
                                          float (&projected)[4][4], const float *factors, Rows *stages, int c) {
#pragma unroll
    for (int k = 3; k >= 0; k--) {
        float x[4];
        read4(&token[k * QUARTER + 4 * c], x);
#pragma unroll 1
        for (int owner = LANES - 1; owner >= 0; owner--) {
            const int n = (4 - k) * LANES - 1 - owner;
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // rows are there for all, and those before them are no longer read
            fetch_rows(stages, factors, n + STAGES - 1);
            const float *rows = &stages[n % STAGES][0][4 * c];
#pragma unroll
            for (int j = 3; j >= 0; j--) {
                float centroid;
                nearest(__fadd_rn(x[j], missed[k][j]), centroid);
                const float now = __shfl_sync(~0u, x[j], owner, LANES);
                const float error = __shfl_sync(~0u, __fadd_rn(x[j], -centroid), owner, LANES);
#pragma unroll
                for (int m = 0; m <= k; m++) {
                    float row[4];
                    read4(rows + j * D + m * QUARTER, row);
#pragma unroll
                    for (int l = 0; l < 4; l++) {
                        if (m == k) row[l] = c < owner + (l < j) ? row[l] : 0.f;  // below the diagonal
                        add_multiple(missed[m][l], error, row[l]);
                        add_multiple(projected[m][l], now, row[l]);
                    }
                }
            }
        }
    }
}

// The warp's keys, in shared memory, brought to unit variance.
__device__ __forceinline__ void scale_keys(Scratch &s, const float *rotation, int lane, int warp) {
#pragma unroll AT_ONCE
    for (int token = warp * TOKENS; token < (warp + 1) * TOKENS; token++) {
        float x[N], size = 0.f;
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = s.keys[token][lane + 32 * k];
        if (!RING_CODES) rotate(x, rotation, lane);
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
        if (lane == 0) s.norms[token] = centered ? -norm : norm;
    }
    __syncwarp();
}

// Codes of the lane's token, to shared memory, and its scale.
__device__ __forceinline__ float encode(Scratch &s, int token, const float *factors, Rows *stages, int c) {
    float missed[4][4], projected[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) missed[k][j] = projected[k][j] = 0.f;
    feed_back(s.keys[token], missed, projected, factors, stages, c);

    double whole = 0, along = 0;  // the key's square in the metric, its product with what is decoded
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 word = 0;
        float x[4];
        read4(&s.keys[token][k * QUARTER + 4 * c], x);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int d = k * QUARTER + 4 * c + j;
            const float target = __fadd_rn(x[j], missed[k][j]);
            float centroid;
            word |= (u32)nearest(target, centroid) << (8 * j);
            const double size = __fadd_rn(x[j], projected[k][j]);
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
    const float norm = s.norms[token];
    const float scale = fminf(__fmul_rn(__fmul_rn(fabsf(norm), FEEDBACK_INVERSE), ratio), 65504.f);
    return __float_as_int(norm) < 0 ? -scale : scale;
}

// The keys of a page's head that are sealed together.
struct KeyPage {
    u8 *record;
    const float *factors, *rotation;
    int at, exact_from, real_from;  // positions: its first token, the first exact one, the first that is no padding
};

// Every `parts`-th group of the page's tokens, from the `part`-th on, by all threads of a block.
__device__ __forceinline__ void seal_part(Scratch &s, Rows *stages, const KeyReader &keys, const KeyPage &page, int part,
                                          int parts) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int page_at = page.at, exact_from = page.exact_from;
    u16 *scales = (u16 *)(page.record + KEY_SCALE_AT);
    u32 *plane = (u32 *)page.record;

    if (MEAN_BITS > 0) {
        __syncthreads();  // the mean before is no longer read
        if (exact_from <= page_at)
            make_mean(s, keys, page.real_from, page_at + PAGE, page.rotation, page.record, part == 0, lane, warp);
        else if (warp == 0)
            read_mean(page.record, s.mean, lane);
        __syncthreads();
    }

    for (int pass = part; pass < PAGE / PASS; pass += parts) {
        const int pass_at = page_at + pass * PASS, own_at = pass_at + warp * TOKENS;
        if (pass_at + PASS <= exact_from) continue;
        __syncthreads();  // rows of the pass before are no longer read
#pragma unroll
        for (int n = 0; n < STAGES - 1; n++) fetch_rows(stages, page.factors, n);

#if RING_CODES
#pragma unroll AT_ONCE
        for (int t = 0; t < TOKENS; t++) {
            float one[N] = {};
            if (own_at + t >= exact_from) keys.rounded(own_at + t, one, lane);
#pragma unroll
            for (int k = 0; k < N; k++) s.keys[warp * TOKENS + t][lane + 32 * k] = one[k];
        }
#else
        Channels x[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++)  // all at once
            if (own_at + t >= exact_from) x[t] = keys(own_at + t, lane);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float one[N];
            keys.convert(x[t], own_at + t, lane, one);
#pragma unroll
            for (int k = 0; k < N; k++)  // codes of tokens that are no longer exact stay
                s.keys[warp * TOKENS + t][N * lane + k] = own_at + t >= exact_from ? one[k] : 0.f;
        }
#endif
        __syncwarp();
        scale_keys(s, page.rotation, lane, warp);
        const int token = warp * TOKENS + lane / LANES, t = pass_at + token - page_at;
        const float scale = encode(s, token, page.factors, stages, lane % LANES);
        if (lane % LANES == 0 && page_at + t >= exact_from)
            scales[t / 32 * 32 + t % 8 * 4 + t % 32 / 8] = float_to_half(scale);
        __syncwarp();

        constexpr int C = D / 32;
        for (int w = lane; w < TOKENS * KEY_BITS * C; w += 32) {
            const int token = warp * TOKENS + w / (KEY_BITS * C), j = w / C % KEY_BITS, c = w % C;
            const int t = pass_at + token - page_at;
            if (page_at + t < exact_from) continue;
            plane[(((t / 32 * KEY_BITS + j) * 8 + t % 8) * C + c) * 4 + t % 32 / 8] =
                pack<KEY_BITS>(j, [&](int n) { return s.codes[token][32 * c + n]; });
        }
        __syncwarp();  // codes are free for what comes next
    }
}

// Blocks that share a page's head, of `blocks` for so many heads of pages.
__device__ __forceinline__ int parts_of_page(int blocks, int heads) {
    return heads ? max(1, min(PAGE / PASS, blocks / heads)) : 0;
}

// Blocks take jobs in turn: the keys of a part of a page, of one head.
__device__ __forceinline__ void seal_pages(const AppendParams &a, const float *all_factors, int batch, int block,
                                           int blocks, char *memory) {
    __shared__ Scratch s;
    const int lane = threadIdx.x & 31;
    const int pages = count_pages(a, batch, lane), parts = parts_of_page(blocks, pages * HKV);

    for (int job = block; job < pages * HKV * parts; job += blocks) {
        const int head = job / parts % HKV;
        int row, index;
        find_page(a, batch, job / parts / HKV, lane, row, index);
        const int id = a.block_table[row * a.table_b + index];
        if (id < 0) continue;  // nobody will read it
        KeyPage page;
        page.record = a.pages + id * a.page_bytes + head * RECORD;
        page.factors = all_factors + (long long)head * D * D, page.rotation = a.rotation;
        page.at = index * PAGE, page.exact_from = a.ring_valid_from[row];
        page.real_from = max(a.left_pad[row], page.at);
        seal_part(s, (Rows *)memory, KeyReader(a, row, head), page, job % parts, parts);
    }
}
