// Seal pages of many layers in one launch: once per step, and from the rings alone (integrations that seal later).
//
// The pages are those that appends of steps before have completed; a page has the same place in all layers.

#include "seal_pages.cuh"

struct SealedLayer {
    u8 *pages;
    const u16 *ring_key;
    const float *factors;  // [HKV, D, D]
    long long page_bytes;
};

struct SealedPage {
    int ring_row, at, id, exact_from;  // `at` and `exact_from` are positions of tokens
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, D <= 256 ? 4 : 2)
    seal_layers(const SealedLayer *layers, const int *count, const SealedPage *pages, const float *rotation,
                int num_layers, int slots) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Scratch s;
    grid_dependency_wait();
    launch_dependents();  // an append, which waits for all of this before it writes to rings and pages
    const int blocks = gridDim.x, todo = *count, heads = num_layers * HKV;
    const int parts = parts_of_page(blocks, todo * heads);
    // Blocks side by side have the pages of one head, which share its factors.
    for (int job = blockIdx.x; job < todo * heads * parts; job += blocks) {
        const SealedPage chosen = pages[job / parts % todo];
        const int owner = job / parts / todo, head = owner % HKV;
        const SealedLayer layer = layers[owner / HKV];
        KeyPage page;
        page.record = layer.pages + chosen.id * layer.page_bytes + head * RECORD;
        page.factors = layer.factors + (long long)head * D * D, page.rotation = rotation;
        page.at = page.real_from = chosen.at, page.exact_from = chosen.exact_from;
        seal_part(s, (Rows *)memory, KeyReader(layer.ring_key, slots, chosen.ring_row, head), page, job % parts, parts);
    }
}
