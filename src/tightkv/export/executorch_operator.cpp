/* tightkv::static_attention.out for ExecuTorch's runtime, which registers it when this library is
   loaded. Its C++ interface changes by release, so integrations/executorch.py compiles this file
   against the release that is installed. */
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <optional>

extern "C" {
#include "static_cache.h"
}

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

int64_t dtype_of(ScalarType type)
{
    switch (type) {
    case ScalarType::Float: return FLOAT32;
    case ScalarType::BFloat16: return BFLOAT16;
    case ScalarType::Half: return FLOAT16;
    case ScalarType::Bool: return BOOLEAN;
    case ScalarType::Long: return INT64;
    case ScalarType::Byte: return UINT8;
    default: return OTHER_DTYPE;
    }
}

operand describe(const Tensor &tensor)
{
    operand x{};
    x.data = tensor.mutable_data_ptr();
    x.dtype = dtype_of(tensor.scalar_type());
    x.rank = tensor.dim();
    for (int64_t k = 0; k < x.rank && k < MOST_RANK; k++)
        x.size[k] = tensor.size(k), x.stride[k] = tensor.strides()[k];
    return x;
}

operand describe(const std::optional<Tensor> &tensor)
{
    if (tensor.has_value())
        return describe(*tensor);
    operand x{};
    x.rank = -1;
    return x;
}

Tensor &static_attention_out(KernelRuntimeContext &context, const Tensor &query, const Tensor &key,
                             const Tensor &value, const Tensor &position,
                             const std::optional<Tensor> &left_pad,
                             const std::optional<Tensor> &mask, const Tensor &spec,
                             const std::optional<Tensor> &feedback, Tensor &pages, Tensor &ring,
                             Tensor &sinks, Tensor &state, double scale, double softcap,
                             int64_t window, bool causal, int64_t kernels, Tensor &out)
{
    ET_KERNEL_CHECK_MSG(context, query.dim() == 4, InvalidArgument, out,
                        "tightkv: query has %d dimensions; expected 4", (int)query.dim());
    const auto q = query.sizes();
    const Tensor::SizesType size[4] = {q[0], q[2], q[1], q[3]};
    ET_KERNEL_CHECK_MSG(context, executorch::runtime::resize_tensor(out, {size, 4}) == Error::Ok,
                        InvalidArgument, out, "tightkv: the output cannot have the query's size");
    static_args args{};
    args.query = describe(query), args.key = describe(key), args.value = describe(value);
    args.position = describe(position), args.left_pad = describe(left_pad);
    args.mask = describe(mask), args.spec = describe(spec), args.feedback = describe(feedback);
    args.pages = describe(pages), args.ring = describe(ring), args.sinks = describe(sinks);
    args.state = describe(state), args.out = describe(out);
    args.scale = scale, args.softcap = softcap, args.window = window, args.causal = causal;
    args.threads = executorch::extension::get_thread_count();
    ET_KERNEL_CHECK_MSG(context, kernels == 0, InvalidArgument, out,
                        "tightkv: kernels=%lld are for GPUs", (long long)kernels);
    char why[512];
    ET_KERNEL_CHECK_MSG(context, tightkv_static_attention(&args, why, sizeof why) == 0,
                        InvalidArgument, out, "tightkv: %s", why);
    return out;
}

void run_on_pool(void (*body)(void *), void *data, unsigned threads, unsigned)
{
    executorch::extension::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        for (; begin < end; begin++)
            body(data);
    });
}

[[maybe_unused]] const bool shares_threads = (tightkv_share_threads(run_on_pool), true);

}  // namespace

EXECUTORCH_LIBRARY(tightkv, "static_attention.out", static_attention_out);
