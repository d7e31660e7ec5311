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

using executorch::extension::from_blob;
using executorch::extension::Module;

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
        const auto type = executorch::aten::ScalarType::Long;
        auto ids_tensor = from_blob(ids.data(), {1, size}, type);
        auto position_tensor = from_blob(position.data(), {size}, type);
        auto result = model.forward({ids_tensor, position_tensor});
        if (!result.ok()) {
            std::cerr << "error " << static_cast<int>(result.error()) << "\n";
            return 1;
        }
        const auto logits = result->at(0).toTensor();  // float32 [1, 1, vocabulary]
        const float *scores = logits.const_data_ptr<float>();
        const int64_t token = std::max_element(scores, scores + logits.numel()) - scores;
        std::cout << token << (left > 1 ? " " : "\n") << std::flush;
        ids = {token};
        position = {position.back() + 1};
    }
}
