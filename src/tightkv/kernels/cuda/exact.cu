// Tokens that are kept exact, sinks and ring: scores and values in the model's own frame.

// Where the exact tokens of a sequence are: sinks, then the ring.
struct Exact {
    const u16 *sink_key, *sink_value, *ring_key, *ring_value;  // of the sequence and head
    int sinks, count, start, ring_from, ring;
};

__device__ __forceinline__ bool exact_place(const Exact &x, int e, int &at, long long &place) {
    const bool sink = e < x.sinks;
    at = sink ? x.start + e : x.ring_from + e - x.sinks;
    place = (long long)(sink ? e : at % x.ring) * HKV * D;
    return sink;
}

// 16 of them, from the `from`-th on; in their own frame, not rotated.
__device__ __forceinline__ void exact_tokens(State &st, const u32 (&q)[NT][KX][4], const Exact &x,
                                             const Bounds &v, int from, int col0, int r, int c,
                                             float scale) {
    const u16 *keys[2], *values[4];
    int at[2], unused;
    long long place;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int e = from + r + 8 * k;
        keys[k] = (exact_place(x, e, at[k], place) ? x.sink_key : x.ring_key) + place;
        if (e >= x.count) keys[k] = 0;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {  // tokens 2 c, 2 c + 1 and 8 more
        const int e = from + 2 * c + (k & 1) + 8 * (k >> 1);
        values[k] = (exact_place(x, e, unused, place) ? x.sink_value : x.ring_value) + place;
        if (e >= x.count) values[k] = 0;
    }
    const uint4 zero = {0, 0, 0, 0};
    uint4 h[KX], g[KX];
    uint2 w[VX][4];
#pragma unroll
    for (int i = 0; i < KX; i++) {
        h[i] = keys[0] ? *(const uint4 *)(keys[0] + key_channel(i, c)) : zero;
        g[i] = keys[1] ? *(const uint4 *)(keys[1] + key_channel(i, c)) : zero;
    }
#pragma unroll
    for (int i = 0; i < VX; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            w[i][k] = values[k] ? *(const uint2 *)(values[k] + value_channel(i, r))
                                : make_uint2(0, 0);
    float s[NT][1][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) s[n][0][k] = 0.f;
#pragma unroll
    for (int i = 0; i < KX; i++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma_model(s[n][0], h[i].x, g[i].x, h[i].z, g[i].z, q[n][i][0], q[n][i][1]);
            mma_model(s[n][0], h[i].y, g[i].y, h[i].w, g[i].w, q[n][i][2], q[n][i][3]);
        }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int col = col0 + 8 * n + 2 * c + (k & 1);
            const float e = seen(v, at[k >> 1], v.first_at + col / G,
                                 s[n][0][k] * scale * 1.4426950408889634f, 0);
            s[n][0][k] = keys[k >> 1] ? e + base_of(st.peak[n][k & 1]) : NEG_INF;
        }
    softmax_step<1>(st, s);
    u32 p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            p[n][k] = turn(pack_model(s[n][0][2 * k], s[n][0][2 * k + 1]));
#pragma unroll
    for (int i = 0; i < VX; i++) {
        u32 a[4], b[4];  // channel y: tokens (2c, 2c+1), and the 8 later
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const u32 pick = (y & 1) ? 0x7632 : 0x5410;
            a[y] = y < 2 ? __byte_perm(w[i][0].x, w[i][1].x, pick)
                         : __byte_perm(w[i][0].y, w[i][1].y, pick);
            b[y] = y < 2 ? __byte_perm(w[i][2].x, w[i][3].x, pick)
                         : __byte_perm(w[i][2].y, w[i][3].y, pick);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma_model(st.acc[n][i][0], a[0], a[1], b[0], b[1], p[n][0], p[n][1]);
            mma_model(st.acc[n][i][1], a[2], a[3], b[2], b[3], p[n][0], p[n][1]);
        }
    }
}
