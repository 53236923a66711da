"""Declares two operator schemas just before torchvision is imported, and lets SGLang's LoRA layers
ask for pinned memory, which a CPU does not have.

The registry's torchvision is a CUDA build whose extension does not load on CPU torch; its import
then fails because `torchvision::nms` was never declared. SGLang imports torchvision at start-up.
"""

import importlib.abc
import sys

_library = None


def _without_pinned_memory(make):
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


class _DeclareTorchvisionOps(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        global _library
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _library = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                _library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.Tensor.pin_memory = lambda tensor, *_: tensor  # pyright: ignore[reportAttributeAccessIssue]
            for name in ("tensor", "empty", "zeros", "arange"):
                setattr(torch, name, _without_pinned_memory(getattr(torch, name)))


sys.meta_path.insert(0, _DeclareTorchvisionOps())
