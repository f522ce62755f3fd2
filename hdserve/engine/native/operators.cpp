// The operators of a compiled model, for a CPU: its linear layers and its attention, by the kernels
// of hdserve/engine/kernels, without Python in between.
//
// What an operator gives is what its Python function gives, bit for bit: linear/skinny.py,
// attention/packed.py.  The kernels are compiled by numba; their addresses are set once, by
// hdserve_set_kernels.  What changes from step to step is told by hdserve_begin_step, in the thread
// that runs the forward.  Outside a step, and where this file does not know the case, operators do
// as in Python.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Multiply = void (*)(int64_t rows, int64_t weights, int64_t products, int64_t num_rows,
                          int64_t num_inputs, int64_t num_outputs, int64_t is_bfloat16,
                          int64_t first, int64_t stop);
using MultiplyPrepacked = void (*)(int64_t rows, int64_t weights, int64_t bias, int64_t products,
                                   int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                                   int64_t num_streams, int64_t first, int64_t stop);
using Attend = void (*)(int64_t stored, int64_t listed, int64_t queries, int64_t attended,
                        int64_t num_heads, int64_t scores, int64_t scores_size, int64_t is_bfloat16,
                        double scale, double softcap, int64_t window, int64_t sinks, int64_t first,
                        int64_t stop);
using AttendBfloat16 = void (*)(int64_t stored, int64_t listed, int64_t queries, int64_t attended,
                                int64_t num_heads, int64_t scores, int64_t scores_size,
                                double scale, double softcap, int64_t window, int64_t sinks,
                                int64_t first, int64_t stop);
using Parallel = void (*)(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);

// As operators.py fills it.  Kernels are null for products that the processor does not have.
struct Kernels {
  Multiply multiply;
  MultiplyPrepacked multiply_prepacked;
  MultiplyPrepacked multiply_prepacked_floats;
  Attend attend;
  AttendBfloat16 attend_by_bf16_dot;
  AttendBfloat16 attend_with_amx;
  Parallel parallel;
  int64_t outputs_at_once;
  int64_t num_paired;
  int64_t min_weights_per_thread;
  int64_t rows_while_read;
  int64_t queries_per_tile;
  int64_t spare_columns;
  int64_t min_pairs_per_thread;
  int64_t pairs_per_key;
  int64_t no_window;
};

// As operators.py fills it.  `listed` is null where Python attends.
struct Step {
  int64_t num_threads;
  int64_t is_exact;
  const int64_t *kv_rows;
  const int64_t *listed;
  const int64_t (*layers)[6];  // keys, values, heads, rows, size of a key, size of a value
  int64_t item_bytes;
  int64_t uses_amx;
  int64_t scratch_floats;
  int64_t most_visible;
  int64_t num_visible;
  int64_t num_shared;
};

const Kernels *kernels = nullptr;
thread_local const Step *step = nullptr;

int64_t address(const at::Tensor &tensor) { return reinterpret_cast<int64_t>(tensor.data_ptr()); }

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_cpu(sizes, dtype));
}

// Do `work(first, stop)` for `num_items` items, in this thread and, where it is much, in those of
// the OpenMP library that PyTorch uses, which do not know the step; see hardware/workers.py.  Items
// that differ much are shared more evenly in several parts for each thread.
template <typename Work>
void share(const Work &work, int64_t num_items, int64_t size, int64_t size_per_part,
           int64_t parts_per_thread = 1) {
  if (size < 2 * size_per_part || step->num_threads == 1) return work(0, num_items);
  const int64_t parts =
      std::min({step->num_threads * parts_per_thread, size / size_per_part, num_items});
  struct Shared {
    const Work &work;
    int64_t num_items, parts;
    std::atomic<int64_t> next{0};
    std::mutex failing{};
    std::exception_ptr failure{};
  } shared{work, num_items, parts};
  kernels->parallel(
      [](void *data) {
        auto &shared = *static_cast<Shared *>(data);
        try {
          for (int64_t part; (part = shared.next++) < shared.parts;)
            shared.work(shared.num_items * part / shared.parts,
                        shared.num_items * (part + 1) / shared.parts);
        } catch (...) {  // which would end the process if it left the region
          const std::lock_guard guard(shared.failing);
          shared.failure = std::current_exception();
        }
      },
      &shared, static_cast<unsigned>(step->num_threads), 0);
  if (shared.failure) std::rethrow_exception(shared.failure);
}

// The operator of Python with this name, which takes and gives what `Operator` does.
template <typename Operator>
auto in_python(const char *name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Operator>();
}

at::Tensor skinny_linear(const at::Tensor &rows, const at::Tensor &weight, const at::Tensor &others,
                         const std::optional<at::Tensor> &bias, const at::Tensor &max_rows) {
  const int64_t num_inputs = weight.size(1), num_outputs = weight.size(0);
  const int64_t num_rows = rows.numel() / num_inputs;
  if (!step) {
    static const auto found =
        in_python<decltype(skinny_linear)>("hdserve::skinny_linear_in_python");
    return found.call(rows, weight, others, bias, max_rows);
  }
  const bool are_few = num_rows <= *max_rows.const_data_ptr<int64_t>();
  if (!num_rows || !(are_few || step->is_exact)) return at::linear(rows, others, bias);
  const at::Tensor inputs = rows.to(at::kFloat).contiguous();
  auto sizes = rows.sizes().vec();
  sizes.back() = num_outputs;
  at::Tensor products = empty(sizes, at::kFloat);
  const bool is_bfloat16 = weight.scalar_type() == at::kBFloat16;
  const auto multiply = [&](int64_t first, int64_t stop) {
    first *= kernels->outputs_at_once, stop *= kernels->outputs_at_once;
    kernels->multiply(address(inputs), address(weight), address(products), num_rows, num_inputs,
                      num_outputs, is_bfloat16, first, stop);
  };
  const int64_t num_passes = std::max<int64_t>(1, num_rows / kernels->rows_while_read);
  share(multiply, num_outputs / kernels->outputs_at_once, weight.numel() * num_passes,
        kernels->min_weights_per_thread);
  if (bias) products.add_(*bias);
  return products.to(rows.scalar_type());
}

// A layer of prepacked weights.
struct Prepacked {
  const at::Tensor &weights;
  const std::optional<at::Tensor> &bias;
  int64_t num_outputs;
};

// The products of the same rows by one layer or several, whose blocks are shared as one loop.
template <std::size_t num_layers>
std::array<at::Tensor, num_layers> multiply_prepacked(
    const at::Tensor &rows, const std::array<Prepacked, num_layers> &layers) {
  const int64_t num_inputs = rows.size(-1), num_rows = rows.numel() / num_inputs;
  const at::Tensor inputs = rows.contiguous();
  const auto kernel = rows.scalar_type() == at::kFloat ? kernels->multiply_prepacked_floats
                                                       : kernels->multiply_prepacked;
  auto sizes = rows.sizes().vec();
  std::array<at::Tensor, num_layers> products;
  int64_t num_blocks = 0;
  for (std::size_t i = 0; i < num_layers; ++i) {
    sizes.back() = layers[i].num_outputs;
    products[i] = empty(sizes, inputs.scalar_type());
    num_blocks += layers[i].weights.size(0);
  }
  const auto multiply = [&](int64_t first, int64_t stop) {
    for (std::size_t i = 0; i < num_layers; ++i) {
      const auto &[weights, bias, num_outputs] = layers[i];
      const int64_t own_blocks = weights.size(0);
      if (first < own_blocks && stop > 0)
        kernel(address(inputs), address(weights), bias ? address(*bias) : 0, address(products[i]),
               num_rows, num_inputs, num_outputs, weights.size(1), std::max<int64_t>(first, 0),
               std::min(stop, own_blocks));
      first -= own_blocks, stop -= own_blocks;
    }
  };
  const int64_t block_size = layers[0].weights.stride(0);
  const int64_t num_passes = std::max<int64_t>(1, num_rows / kernels->rows_while_read);
  share(multiply, num_blocks, num_blocks * block_size * num_passes,
        kernels->min_weights_per_thread);
  return products;
}

at::Tensor prepacked_linear(const at::Tensor &rows, const at::Tensor &prepacked,
                            const std::optional<at::Tensor> &bias, int64_t num_outputs) {
  if (!step || !rows.numel()) {
    static const auto found =
        in_python<decltype(prepacked_linear)>("hdserve::prepacked_linear_in_python");
    return found.call(rows, prepacked, bias, num_outputs);
  }
  return std::move(multiply_prepacked<1>(rows, {{{prepacked, bias, num_outputs}}})[0]);
}

std::tuple<at::Tensor, at::Tensor> two_prepacked_linears(
    const at::Tensor &rows, const at::Tensor &first, const at::Tensor &second,
    const std::optional<at::Tensor> &first_bias, const std::optional<at::Tensor> &second_bias,
    int64_t first_outputs, int64_t second_outputs) {
  if (!step || !rows.numel()) {
    static const auto found =
        in_python<decltype(two_prepacked_linears)>("hdserve::two_prepacked_linears_in_python");
    return found.call(rows, first, second, first_bias, second_bias, first_outputs, second_outputs);
  }
  auto [a, b] = multiply_prepacked<2>(
      rows, {{{first, first_bias, first_outputs}, {second, second_bias, second_outputs}}});
  return {std::move(a), std::move(b)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> three_prepacked_linears(
    const at::Tensor &rows, const at::Tensor &first, const at::Tensor &second,
    const at::Tensor &third, const std::optional<at::Tensor> &first_bias,
    const std::optional<at::Tensor> &second_bias, const std::optional<at::Tensor> &third_bias,
    int64_t first_outputs, int64_t second_outputs, int64_t third_outputs) {
  if (!step || !rows.numel()) {
    static const auto found =
        in_python<decltype(three_prepacked_linears)>("hdserve::three_prepacked_linears_in_python");
    return found.call(rows, first, second, third, first_bias, second_bias, third_bias,
                      first_outputs, second_outputs, third_outputs);
  }
  auto [a, b, c] = multiply_prepacked<3>(rows, {{{first, first_bias, first_outputs},
                                                 {second, second_bias, second_outputs},
                                                 {third, third_bias, third_outputs}}});
  return {std::move(a), std::move(b), std::move(c)};
}

// What a thread keeps scores in, and whatever else the kernel needs behind them.  It takes no memory
// before it is touched.
class Scratch {
 public:
  // The address, that of a cache line, and for how many columns there is room.
  std::pair<int64_t, int64_t> take(int64_t num_columns, int64_t scratch_floats) {
    if (num_columns_ < num_columns || scratch_floats_ < scratch_floats) {
      const int64_t columns =
          std::max(num_columns_, (2 * num_columns + kLine - 1) / kLine * kLine);
      const int64_t floats = std::max(scratch_floats_, scratch_floats);
      const int64_t number = kernels->queries_per_tile * columns + floats + kLine;
      num_columns_ = scratch_floats_ = 0;
      floats_.reset();
      floats_.reset(static_cast<float *>(std::calloc(number, sizeof(float))));
      if (!floats_) throw std::bad_alloc();
      num_columns_ = columns;
      scratch_floats_ = floats;
    }
    constexpr int64_t num_bytes = kLine * sizeof(float);
    const auto start = reinterpret_cast<int64_t>(floats_.get());
    return {(start + num_bytes - 1) / num_bytes * num_bytes, num_columns_};
  }

 private:
  static constexpr int64_t kLine = 16;
  struct Free {
    void operator()(float *floats) const { std::free(floats); }
  };
  std::unique_ptr<float, Free> floats_;
  int64_t num_columns_ = 0, scratch_floats_ = 0;
};

// What a step's rows see: `[1, num_rows, num_heads, size]` in float32, zeros in rows that see
// nothing.  PyTorch takes longer to make and to convert a few numbers than it takes to attend.
class Attended {
 public:
  Attended(int64_t num_rows, int64_t num_heads, int64_t size)
      : sizes_{1, num_rows, num_heads, size}, number_(num_rows * num_heads * size) {
    if (is_few())
      std::fill_n(few_, number_, 0.0f);
    else
      many_ = at::zeros(sizes_, at::kFloat);
  }

  int64_t address() const {
    return is_few() ? reinterpret_cast<int64_t>(few_) : ::address(many_);
  }

  at::Tensor as(at::ScalarType dtype) const {
    if (!is_few()) return many_.to(dtype);
    const at::Tensor result = empty(sizes_, dtype == at::kBFloat16 ? dtype : at::kFloat);
    if (dtype == at::kBFloat16)
      std::copy_n(few_, number_, result.mutable_data_ptr<at::BFloat16>());
    else
      std::copy_n(few_, number_, result.mutable_data_ptr<float>());
    return result.to(dtype);
  }

 private:
  bool is_few() const { return number_ <= kFew; }

  static constexpr int64_t kFew = 4096;
  std::array<int64_t, 4> sizes_;
  int64_t number_;
  alignas(64) float few_[kFew];
  at::Tensor many_;
};

// The lists of a step, without the rows that nothing reads.
class Listed {
 public:
  explicit Listed(const std::optional<at::Tensor> &read_rows) : listed_(step->listed) {
    if (read_rows) narrow(read_rows->contiguous());
  }
  Listed(const Listed &) = delete;  // may point to itself

  int64_t address() const { return reinterpret_cast<int64_t>(listed_); }
  int64_t num_spans() const { return listed_[1]; }

 private:
  using Span = std::array<int64_t, 3>;  // first row, number of rows, first row in the cache

  // One span for each run of rows that are read.
  void narrow(const at::Tensor &read_rows) {
    const int64_t *first = read_rows.const_data_ptr<int64_t>();
    std::vector<int64_t> rows(first, first + read_rows.numel());
    std::sort(rows.begin(), rows.end());
    auto row = rows.cbegin();
    const auto *span = reinterpret_cast<const Span *>(listed_[0]);
    for (const Span *end = span + num_spans(); span != end; ++span) {
      const auto [start, number, first_key] = *span;
      row = std::lower_bound(row, rows.cend(), start);
      for (; row != rows.cend() && *row < start + number; ++row) {
        const bool is_next = !spans_.empty() && spans_.back()[2] == first_key &&
                             *row <= spans_.back()[0] + spans_.back()[1];
        if (!is_next)
          spans_.push_back({*row, 1, first_key});
        else
          spans_.back()[1] = *row - spans_.back()[0] + 1;
      }
    }
    std::copy_n(listed_, narrowed_.size(), narrowed_.begin());
    narrowed_[0] = reinterpret_cast<int64_t>(spans_.data());
    narrowed_[1] = static_cast<int64_t>(spans_.size());
    listed_ = narrowed_.data();
  }

  const int64_t *listed_;  // addresses of spans, rows and tails, each with its length
  std::vector<Span> spans_;
  std::array<int64_t, 6> narrowed_{};
};

// Store `rows [1, heads, n, size]` in the cache's `[heads, num_kv_rows, size]`.
void write(const at::Tensor &rows, int64_t stored, int64_t num_kv_rows, int64_t size) {
  const at::Tensor whole = rows.stride(3) == 1 ? rows : rows.contiguous();
  const int64_t item = whole.element_size(), num_bytes = size * item;
  TORCH_CHECK(whole.size(3) == size && item == step->item_bytes,
              "keys and values are not of the size and dtype of the cache");
  const char *source = static_cast<const char *>(whole.data_ptr());
  char *target = reinterpret_cast<char *>(stored);
  for (int64_t head = 0; head < whole.size(1); ++head)
    for (int64_t row = 0; row < whole.size(2); ++row)
      std::memcpy(target + (head * num_kv_rows + step->kv_rows[row]) * num_bytes,
                  source + (head * whole.stride(1) + row * whole.stride(2)) * item, num_bytes);
}

at::Tensor packed_attention(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                            const at::Tensor &layer, std::optional<double> scaling,
                            std::optional<int64_t> sliding_window, std::optional<double> softcap,
                            const std::optional<at::Tensor> &sinks,
                            const std::optional<at::Tensor> &read_rows) {
  if (!step || !step->listed) {
    static const auto found =
        in_python<decltype(packed_attention)>("hdserve::packed_attention_in_python");
    return found.call(query, key, value, layer, scaling, sliding_window, softcap, sinks,
                      read_rows);
  }
  const int64_t *stored = step->layers[*layer.const_data_ptr<int64_t>()];
  write(key, stored[0], stored[3], stored[4]);
  write(value, stored[1], stored[3], stored[5]);
  const int64_t num_heads = query.size(1), num_rows = query.size(2), num_kv_heads = stored[2];
  const bool is_bfloat16 = value.scalar_type() == at::kBFloat16;
  const bool uses_bf16_dot =
      kernels->attend_by_bf16_dot && is_bfloat16 && stored[4] % kernels->num_paired == 0;
  const AttendBfloat16 attend_bfloat16 = step->uses_amx  ? kernels->attend_with_amx
                                         : uses_bf16_dot ? kernels->attend_by_bf16_dot
                                                         : nullptr;
  const auto dtype = attend_bfloat16 ? at::kBFloat16 : at::kFloat;
  const at::Tensor queries = query.transpose(1, 2).to(dtype).contiguous();
  Attended attended(num_rows, num_heads, value.size(3));
  const at::Tensor besides = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const double scale = scaling.value_or(std::pow(static_cast<double>(query.size(3)), -0.5));
  const int64_t wanted = step->most_visible + num_rows + kernels->spare_columns;
  const Listed listed(read_rows);
  const auto attend = [&, scratch_floats = step->scratch_floats](int64_t first, int64_t stop) {
    thread_local Scratch scratch;
    const auto [scores_at, num_columns] = scratch.take(wanted, scratch_floats);
    const auto stored_at = reinterpret_cast<int64_t>(stored);
    const double cap = softcap.value_or(0.0);
    const int64_t window = sliding_window.value_or(kernels->no_window);
    const int64_t sinks_at = sinks ? address(besides) : 0;
    if (attend_bfloat16)
      attend_bfloat16(stored_at, listed.address(), address(queries), attended.address(), num_heads,
                      scores_at, num_columns, scale, cap, window, sinks_at, first, stop);
    else
      kernels->attend(stored_at, listed.address(), address(queries), attended.address(), num_heads,
                      scores_at, num_columns, is_bfloat16, scale, cap, window, sinks_at, first,
                      stop);
  };
  const int64_t num_pairs = step->num_visible * num_heads +
                            step->num_shared * num_kv_heads * kernels->pairs_per_key;
  constexpr int64_t kPartsPerThread = 8;  // a chunk of a prompt beside rows of other sequences
  share(attend, listed.num_spans() * num_kv_heads, num_pairs, kernels->min_pairs_per_thread,
        kPartsPerThread);
  return attended.as(value.scalar_type());
}

}  // namespace

extern "C" void hdserve_set_kernels(const Kernels *found) { kernels = found; }
extern "C" void hdserve_begin_step(const Step *begun) { step = begun; }

// The operators as the code of a compiled model calls them, not through PyTorch's dispatcher, which
// looks each up by its name.  Tensors are handles, what is optional is a pointer, and results belong
// to the caller.  declarations.py declares the same functions to PyTorch's compiler.

namespace {

using Handle = AtenTensorHandle;

const at::Tensor &given(Handle handle) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
}

std::optional<at::Tensor> given(const Handle *handle) {
  return handle ? std::optional(given(*handle)) : std::nullopt;
}

template <typename Number>
std::optional<Number> given(const Number *number) {
  return number ? std::optional(*number) : std::nullopt;
}

// Hand over `result`, in the order of rows that the compiler expects.
void give(const at::Tensor &result, Handle *to) {
  *to = torch::aot_inductor::new_tensor_handle(result.contiguous());
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_skinny_linear(Handle rows, Handle weight, Handle others,
                                                       const Handle *bias, Handle max_rows,
                                                       Handle *products) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give(skinny_linear(given(rows), given(weight), given(others), given(bias), given(max_rows)),
         products);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_prepacked_linear(Handle rows, Handle prepacked,
                                                          const Handle *bias, int64_t num_outputs,
                                                          Handle *products) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give(prepacked_linear(given(rows), given(prepacked), given(bias), num_outputs), products);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_two_prepacked_linears(
    Handle rows, Handle first, Handle second, const Handle *first_bias, const Handle *second_bias,
    int64_t first_outputs, int64_t second_outputs, Handle *first_products,
    Handle *second_products) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const auto [a, b] =
        two_prepacked_linears(given(rows), given(first), given(second), given(first_bias),
                              given(second_bias), first_outputs, second_outputs);
    give(a, first_products), give(b, second_products);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_three_prepacked_linears(
    Handle rows, Handle first, Handle second, Handle third, const Handle *first_bias,
    const Handle *second_bias, const Handle *third_bias, int64_t first_outputs,
    int64_t second_outputs, int64_t third_outputs, Handle *first_products, Handle *second_products,
    Handle *third_products) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const auto [a, b, c] = three_prepacked_linears(
        given(rows), given(first), given(second), given(third), given(first_bias),
        given(second_bias), given(third_bias), first_outputs, second_outputs, third_outputs);
    give(a, first_products), give(b, second_products), give(c, third_products);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_packed_attention(
    Handle query, Handle key, Handle value, Handle layer, const double *scaling,
    const int64_t *sliding_window, const double *softcap, const Handle *sinks,
    const Handle *read_rows, Handle *attended) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give(packed_attention(given(query), given(key), given(value), given(layer), given(scaling),
                          given(sliding_window), given(softcap), given(sinks), given(read_rows)),
         attended);
  });
}

TORCH_LIBRARY_IMPL(hdserve, CPU, library) {
  library.impl("skinny_linear", &skinny_linear);
  library.impl("prepacked_linear", &prepacked_linear);
  library.impl("two_prepacked_linears", &two_prepacked_linears);
  library.impl("three_prepacked_linears", &three_prepacked_linears);
  library.impl("packed_attention", &packed_attention);
}
