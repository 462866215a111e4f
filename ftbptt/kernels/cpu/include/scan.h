// Copied into compiled programs, behind load.h: the operator ftbptt::scan, which calls a kernel without Python.
template <typename... Outputs>
AOTITorchError aoti_torch_cpu_scan(
    const AtenTensorHandle* inputs, int64_t n_inputs, const char* library, const int64_t* numbers,
    int64_t, const int64_t* shapes, int64_t, const int64_t* ranks, int64_t, const int64_t* dtypes,
    int64_t, Outputs*... outputs) {
  constexpr int64_t kOutputs = sizeof...(Outputs);
  AtenTensorHandle* const handles[] = {outputs...};
  std::vector<void*> memory(n_inputs + kOutputs);
  for (int64_t i = 0; i < n_inputs; ++i)
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(inputs[i], &memory[i]));
  for (int64_t i = 0; i < kOutputs; ++i) {
    std::vector<int64_t> strides(ranks[i]);
    int64_t stride = 1;
    for (int64_t axis = ranks[i] - 1; axis >= 0; --axis) {
      strides[axis] = stride;
      stride *= shapes[axis];
    }
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        ranks[i], shapes, strides.data(), int32_t(dtypes[i]), aoti_torch_device_type_cpu(), 0,
        handles[i]));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(*handles[i], &memory[n_inputs + i]));
    shapes += ranks[i];
  }
  ftbptt::load(library)(memory.data(), numbers);
  return AOTI_TORCH_SUCCESS;
}
