// Greedy text of a model that `tightkv export --format pt2` wrote, with libtorch and no Python.
// Usage: run OPERATOR_LIBRARY MODEL.pt2 NEW_TOKENS TOKEN...   (token ids in, token ids out)
// A model for a GPU has its kernels beside it, in model.kernels.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <vector>

static torch::Device load_kernels(void *library, const char *model)
{
    const auto path = std::filesystem::path(model).replace_filename("model.kernels");
    if (!std::filesystem::exists(path))
        return torch::kCPU;
    using Load = const char *(*)(const char *);
    const auto load = reinterpret_cast<Load>(dlsym(library, "tightkv_load_kernels"));
    if (const char *problem = load(path.c_str()); *problem)
        throw std::runtime_error(problem);
    return torch::kCUDA;
}

int main(int count, char **arguments)
{
    if (count < 5) {
        std::cerr << "usage: " << arguments[0] << " OPERATOR_LIBRARY MODEL.pt2 NEW_TOKENS TOKEN...\n";
        return 2;
    }
    void *library = dlopen(arguments[1], RTLD_NOW);  // registers tightkv::static_attention
    if (library == nullptr) {
        std::cerr << dlerror() << "\n";
        return 1;
    }
    try {
        c10::InferenceMode guard;
        const torch::Device device = load_kernels(library, arguments[2]);
        torch::inductor::AOTIModelPackageLoader model(arguments[2]);
        std::vector<int64_t> prompt;
        for (int k = 4; k < count; k++)
            prompt.push_back(std::atoll(arguments[k]));
        torch::Tensor ids = torch::tensor(prompt, torch::kLong).unsqueeze(0).to(device);
        torch::Tensor position = torch::arange(ids.size(1), ids.options());  // 0 begins anew
        for (int64_t left = std::atoll(arguments[3]); left > 0; left--) {
            const torch::Tensor logits = model.run({ids, position})[0];
            ids = logits.select(1, -1).argmax(-1, /*keepdim=*/true);
            position = position.slice(0, -1) + 1;
            std::cout << ids.item<int64_t>() << (left > 1 ? " " : "\n") << std::flush;
        }
    } catch (const std::exception &error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
