// Seal pages of many layers with error feedback: once per step, and from the rings alone.

#include "seal_pages.cuh"
#include "sealed_layers.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, D <= 256 ? 4 : 2) seal_layers(const SealParams a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Scratch s;
    grid_dependency_wait();
    launch_dependents();  // an append, which waits for all of this before it writes to rings and pages
    const int blocks = gridDim.x, pages = *a.count, heads = pages * a.num_layers * HKV;
    const int parts = parts_of_page(blocks, heads);
    for (int job = blockIdx.x; job < heads * parts; job += blocks) {
        const SealedHead x(a, job / parts, pages);
        KeyPage page;
        page.record = x.record(), page.rotation = a.rotation;
        page.factors = x.layer.factors + (long long)x.head * D * D;
        page.at = page.real_from = x.page.at, page.exact_from = x.page.exact_from;
        seal_part(s, (Rows *)memory, KeyReader(x, a.slots), page, job % parts, parts);
    }
}
