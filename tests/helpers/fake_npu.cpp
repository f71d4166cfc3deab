// A device "npu" for tests of host code: torch's PrivateUse1, two devices whose memory and arithmetic are the CPU's.
//
// Every operator without a kernel here runs on the CPU, on tensors that see the same memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>

namespace {

using at::Tensor;
using c10::Device;
using c10::IValue;
using c10::Storage;

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local int64_t current = 0;
std::atomic<int64_t> reads{0};  // how often a value or a tensor came to the host

// --- memory

c10::DataPtr seen_from(Device device, const Storage& memory) {
  auto* keep = new Storage(memory);
  return {keep->mutable_data(), keep, [](void* p) { delete static_cast<Storage*>(p); }, device};
}

Tensor over(Storage storage, Device device, const Tensor& like) {
  auto key = device.type() == NPU ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The same memory as a tensor of another device.
Tensor moved(const Tensor& x, Device device) {
  Storage storage(Storage::use_byte_size_t(), x.storage().nbytes(), seen_from(device, x.storage()),
                  c10::GetCPUAllocator(), /*resizable=*/true);
  return over(std::move(storage), device, x);
}

Tensor on_cpu(const Tensor& x) { return x.defined() && x.device().type() == NPU ? moved(x, Device(at::kCPU)) : x; }

Device chosen(std::optional<Device> asked) {
  return Device(NPU, asked && asked->has_index() ? asked->index() : static_cast<c10::DeviceIndex>(current));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return moved(at::empty(size, at::dtype(dtype.value_or(at::get_default_dtype_as_scalartype())), format),
               chosen(device));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return moved(at::empty_strided(size, stride, at::dtype(dtype.value_or(at::get_default_dtype_as_scalartype()))),
               chosen(device));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  reads += to.is_cpu();
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Scalar value(const Tensor& x) {
  ++reads;
  return at::_local_scalar_dense(on_cpu(x));
}

// --- arithmetic

struct Moved {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // of the NPU, and what sees its memory
  std::optional<Device> device;

  Tensor to_cpu(const Tensor& x) {
    if (!x.defined() || x.device().type() != NPU) return x;
    device = x.device();
    pairs.emplace_back(x, on_cpu(x));
    return pairs.back().second;
  }

  Tensor to_npu(const Tensor& x) {
    if (!x.defined()) return x;
    for (auto& [there, here] : pairs) {
      if (here.is_same(x)) return there;
      if (here.storage().unsafeGetStorageImpl() == x.storage().unsafeGetStorageImpl())
        return over(there.storage(), there.device(), x);  // a view
    }
    return moved(x, *device);
  }

  // What was resized has new memory.
  void resize() {
    for (auto& [there, here] : pairs) {
      if (here.storage().data() != there.storage().data()) {
        there.storage().set_data_ptr_noswap(seen_from(there.device(), here.storage()));
        there.storage().set_nbytes(here.storage().nbytes());
      }
      if (here.sizes() != there.sizes())
        there.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides());
    }
  }
};

template <typename Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(change(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& x : value.toOptionalTensorVector()) list.push_back(x ? std::optional(change(*x)) : x);
    return list;
  }
  return value;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Moved memory;
  for (auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    auto& value = const_cast<IValue&>(argument);
    if (value.isDevice()) {
      memory.device = value.toDevice();
      value = Device(at::kCPU);
    }
    value = changed(value, [&](const Tensor& x) { return memory.to_cpu(x); });
  }
  op.callBoxed(stack);
  memory.resize();
  for (auto& result : torch::jit::last(*stack, op.schema().returns().size()))
    const_cast<IValue&>(result) = changed(result, [&](const Tensor& x) { return memory.to_npu(x); });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &value);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

// --- devices

struct Guard final : c10::impl::NoOpDeviceGuardImpl<NPU> {
  Device getDevice() const noexcept override { return Device(NPU, current); }
  Device exchangeDevice(Device device) const noexcept override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const noexcept override { current = device.has_index() ? device.index() : current; }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  // Everything is done at once, so an event has always happened.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const noexcept override {}
  void block(void*, const c10::Stream&) const noexcept override {}
  bool queryEvent(void*) const noexcept override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
} hooks;

TORCH_LIBRARY(fake_npu, m) {
  m.def("set_up() -> ()", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("current() -> int", [] { return current; });
  m.def("set_current(int device) -> ()", [](int64_t device) { current = device; });
  m.def("reads() -> int", [] { return reads.load(); });
  m.def("on_cpu(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, [](const Tensor& x) {
          return on_cpu(x);
        }));
}

}  // namespace
