// Copied into compiled programs, behind load.h: ftbptt::product, a @ b or a batch of such, split between threads by
// matrices of the batch, and by rows or columns of the result. Each part is one single-threaded product: by our own
// library (see matmul.h) or, without one, by torch's, which then takes no batches.
#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
#else
static int (*const MKL_Set_Num_Threads_Local)(int) = nullptr;
#endif

namespace ftbptt {
constexpr int64_t kWorthSharing = 8 << 20;  // multiplications; smaller products are for one thread
constexpr int64_t kLeastPart = 32;          // rows or columns per thread

struct Matrices {
  AtenTensorHandle handle = nullptr;
  int64_t count = 1, next = 0;  // how many, and the stride from one to the next
  std::array<int64_t, 2> size, stride;

  AOTITorchError describe(AtenTensorHandle tensor) {
    handle = tensor;
    int64_t rank, *sizes, *strides;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &rank));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    if (rank == 3) count = *sizes++, next = *strides++;
    size = {sizes[0], sizes[1]};
    stride = {strides[0], strides[1]};
    return AOTI_TORCH_SUCCESS;
  }

  // A view of rows (axis 0) or columns (axis 1) first .. last - 1 of the only matrix.
  AOTITorchError slice(int axis, int64_t first, int64_t last, AtenTensorHandle* result) const {
    std::array<int64_t, 2> slice_size = size;
    slice_size[axis] = last - first;
    return aoti_torch__reinterpret_tensor(handle, 2, slice_size.data(), stride.data(), first * stride[axis], result);
  }
};

struct Product {
  Matrices a, b, c;
  int32_t dtype;
  Run run;  // of our own library; null without one

  // Computes rows (axis 0) or columns (axis 1) first .. last - 1 of c's matrix i.
  AOTITorchError part(int64_t i, int axis, int64_t first, int64_t last) const {
    if (run != nullptr) return own_part(i, axis, first, last);
    AtenTensorHandle in = nullptr, out = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK((axis == 0 ? a : b).slice(axis, first, last, &in));
    const torch::aot_inductor::RAIIAtenTensorHandle in_owner(in);
    AOTI_TORCH_ERROR_CODE_CHECK(c.slice(axis, first, last, &out));
    const torch::aot_inductor::RAIIAtenTensorHandle out_owner(out);
    const int before = MKL_Set_Num_Threads_Local(1);
    const AOTITorchError error = axis == 0 ? aoti_torch_cpu_mm_out(out, in, b.handle)
                                           : aoti_torch_cpu_mm_out(out, a.handle, in);
    MKL_Set_Num_Threads_Local(before);
    return error;
  }

 private:
  AOTITorchError own_part(int64_t i, int axis, int64_t first, int64_t last) const {
    const int64_t item = dtype == aoti_torch_dtype_float64() ? 8 : 4;
    const auto at = [&](const Matrices& matrices, int64_t offset, void** memory) {
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(matrices.handle, memory));
      *memory = static_cast<char*>(*memory) + (i * matrices.next + offset) * item;
      return AOTI_TORCH_SUCCESS;
    };
    std::array<void*, 3> memory;
    AOTI_TORCH_ERROR_CODE_CHECK(at(a, axis == 0 ? first * a.stride[0] : 0, &memory[0]));
    AOTI_TORCH_ERROR_CODE_CHECK(at(b, axis == 1 ? first * b.stride[1] : 0, &memory[1]));
    AOTI_TORCH_ERROR_CODE_CHECK(at(c, first * c.stride[axis], &memory[2]));
    const int64_t rows = axis == 0 ? last - first : c.size[0], columns = axis == 1 ? last - first : c.size[1];
    const std::array<int64_t, 8> numbers = {rows,        columns,     a.size[1],   a.stride[0],
                                            a.stride[1], b.stride[0], b.stride[1], c.stride[0]};
    run(memory.data(), numbers.data());
    return AOTI_TORCH_SUCCESS;
  }
};
}  // namespace ftbptt

inline AOTITorchError aoti_torch_cpu_product(
    AtenTensorHandle a, AtenTensorHandle b, const char* library, AtenTensorHandle* result) {
  using namespace ftbptt;
  Product product;
  AOTI_TORCH_ERROR_CODE_CHECK(product.a.describe(a));
  AOTI_TORCH_ERROR_CODE_CHECK(product.b.describe(b));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(a, &product.dtype));
  const int64_t count = product.a.count, rows = product.a.size[0], columns = product.b.size[1];
  const std::array<int64_t, 3> size = {count, rows, columns};
  const std::array<int64_t, 3> stride = {rows * columns, std::max<int64_t>(columns, 1), 1};
  int64_t rank;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(a, &rank));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      rank, size.data() + 3 - rank, stride.data() + 3 - rank, product.dtype, aoti_torch_device_type_cpu(), 0, result));
  AOTI_TORCH_ERROR_CODE_CHECK(product.c.describe(*result));
  product.run = *library == 0 ? nullptr : load(library);

  const int axis = rows >= columns ? 0 : 1;
  const int64_t length = product.c.size[axis], most = omp_get_max_threads();
  const bool is_large = count * rows * columns * product.a.size[1] >= kWorthSharing;
  const int64_t threads = is_large && count * (length / kLeastPart) >= most ? most : 1;
  // What is large and narrow is left to MKL's threads.
  if (product.run == nullptr && ((is_large && threads == 1) || MKL_Set_Num_Threads_Local == nullptr))
    return aoti_torch_cpu_mm_out(*result, a, b);
  // A batch that the threads can share evenly is shared by its matrices.
  const int64_t parts = count % threads == 0 ? 1 : threads;
  const auto edge = [&](int64_t i) { return i == parts ? length : length * i / parts / 16 * 16; };
  std::atomic<AOTITorchError> error{AOTI_TORCH_SUCCESS};
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count * parts; ++i) {
    const AOTITorchError part_error = product.part(i / parts, axis, edge(i % parts), edge(i % parts + 1));
    if (part_error != AOTI_TORCH_SUCCESS) error = part_error;
  }
  return error;
}
