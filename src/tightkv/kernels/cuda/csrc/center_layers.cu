// Seal pages of many layers without error feedback: keys relative to the mean of their page, from the rings alone.

#include "append_tokens.cuh"
#include "sealed_layers.cuh"

extern "C" __global__ void __launch_bounds__(256, HADAMARD && D <= 128 ? 6 : D <= 256 ? 4 : 2)
    center_layers(const SealParams a) {
    __shared__ Room room;
    grid_dependency_wait();
    launch_dependents();  // an append, which waits for all of this before it writes to rings and pages
    const int pages = *a.count;
    AppendParams of_ring = {};
    of_ring.rotation = a.rotation, of_ring.ring = a.slots;
    for (int number = blockIdx.x; number < pages * a.num_layers * HKV; number += gridDim.x) {
        const SealedHead x(a, number, pages);
        const int at = x.page.at, end = at + PAGE, exact_from = x.page.exact_from;
        const NewTokens none = {0, 0, end, end, at};  // all are in the ring
        HeadSide side = {};
        side.ring = x.ring(a.slots), side.codes = x.codes(a.slots), side.is_key = true;
        encode_page(room, of_ring, side, none, x.record(), at, max(at, exact_from), end, exact_from, true, true);
        __syncthreads();  // the mean is no longer read
    }
}
