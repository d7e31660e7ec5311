// What one launch seals: pages that appends of steps before have completed, in many layers. A page has the same place
// in all of them.
#pragma once

#include "encode.cuh"

struct SealedLayer {
    u8 *pages;
    const u16 *ring_key;
    const float *factors;  // of error feedback [HKV, D, D], or null
    long long page_bytes;
    const u16 *ring_scales;  // of a ring of codes
};

struct SealedPage {
    int ring_row, at, id, exact_from;  // `at` and `exact_from` are positions of tokens
};

struct SealParams {
    const SealedLayer *layers;
    const int *count;
    const SealedPage *pages;
    const float *rotation;
    int num_layers, slots;  // tokens of a ring
};

// A head of a page in a layer, by number: neighbours have pages of the same head, which share its factors.
struct SealedHead {
    SealedLayer layer;
    SealedPage page;
    int head;
    __device__ __forceinline__ SealedHead(const SealParams &a, int number, int pages)
        : layer(a.layers[number / pages / HKV]), page(a.pages[number % pages]), head(number / pages % HKV) {}
    __device__ __forceinline__ u8 *record() const { return layer.pages + page.id * layer.page_bytes + head * RECORD; }
    __device__ __forceinline__ u16 *ring(int slots) const {
        return (u16 *)layer.ring_key + ((long long)page.ring_row * slots * HKV + head) * D;
    }
    __device__ __forceinline__ RingCodes codes(int slots) const {
        return RingCodes(layer.ring_key, layer.ring_scales, (long long)page.ring_row * slots, head, true);
    }
};
