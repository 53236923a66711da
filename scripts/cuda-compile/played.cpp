// A CUDA device for torch's bookkeeping (device guards, autograd's queues). Nothing is ever allocated or launched on it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface { // torch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks) // before those of a CUDA build
} // namespace at

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
