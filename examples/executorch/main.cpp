// Greedy text of a model that `tightkv export --format pte` wrote, with neither torch nor Python.
// Usage: run MODEL.pte NEW_TOKENS TOKEN...   (token ids in, token ids out)
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <vector>

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::extension::from_blob;
using executorch::extension::Module;

template <typename T>
static int64_t position_of_largest(const Tensor &scores)
{
    const T *first = scores.const_data_ptr<T>();
    return std::max_element(first, first + scores.numel()) - first;
}

// Of logits [1, 1, vocabulary], in the dtype of the model.
static int64_t likeliest(const Tensor &logits)
{
    switch (logits.scalar_type()) {
    case ScalarType::BFloat16: return position_of_largest<executorch::aten::BFloat16>(logits);
    case ScalarType::Half: return position_of_largest<executorch::aten::Half>(logits);
    default: return position_of_largest<float>(logits);
    }
}

int main(int count, char **arguments)
{
    if (count < 4) {
        std::cerr << "usage: " << arguments[0] << " MODEL.pte NEW_TOKENS TOKEN...\n";
        return 2;
    }
    Module model(arguments[1]);
    std::vector<int64_t> ids, position(count - 3);
    for (int k = 3; k < count; k++)
        ids.push_back(std::atoll(arguments[k]));
    std::iota(position.begin(), position.end(), 0);  // 0 begins anew
    for (int64_t left = std::atoll(arguments[2]); left > 0; left--) {
        const int size = static_cast<int>(ids.size());
        auto ids_tensor = from_blob(ids.data(), {1, size}, ScalarType::Long);
        auto position_tensor = from_blob(position.data(), {size}, ScalarType::Long);
        auto result = model.forward({ids_tensor, position_tensor});
        if (!result.ok()) {
            std::cerr << "error " << static_cast<int>(result.error()) << "\n";
            return 1;
        }
        const int64_t token = likeliest(result->at(0).toTensor());
        std::cout << token << (left > 1 ? " " : "\n") << std::flush;
        ids = {token};
        position = {position.back() + 1};
    }
}
